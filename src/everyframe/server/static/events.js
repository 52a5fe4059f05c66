/**
 * Server-sent events over `fetch`, which unlike `EventSource` shows why a connection fails and
 * connects again after any failure. What was missed is not asked for: who follows loads all anew when
 * the stream is open again, which is right also at a server with another data folder.
 */

import { ApiError, send } from "./api.js";

const FIRST_WAIT = 500;
const LONGEST_WAIT = 10_000;
/** The server writes at least each 15 s; a silent connection is a dead one. */
const SILENCE = 40_000;

/**
 * @typedef {object} ServerEvent
 * @property {string} type
 * @property {any} data
 */

/**
 * Follow the events of `path` until `signal` aborts.
 * @param {string} path
 * @param {object} on
 * @param {(event: ServerEvent) => void} on.event
 * @param {() => void} on.open each time the stream is open
 * @param {(error: Error) => void} on.lost each time it breaks
 * @param {AbortSignal} signal
 */
export async function follow(path, on, signal) {
  let wait = FIRST_WAIT;
  while (!signal.aborted) {
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    signal.addEventListener("abort", stop);
    try {
      const response = await send("GET", path, { headers: { accept: "text/event-stream" }, signal: attempt.signal });
      on.open();
      wait = FIRST_WAIT;
      for await (const event of parse(chunks(response, attempt))) {
        on.event(event);
      }
      throw new ApiError(0, { message: "the server closed the stream" });
    } catch (error) {
      if (!signal.aborted) on.lost(/** @type {Error} */ (error));
    } finally {
      signal.removeEventListener("abort", stop);
      stop();
    }
    await pause(wait, signal);
    wait = Math.min(wait * 2, LONGEST_WAIT);
  }
}

/**
 * @param {Response} response
 * @param {AbortController} attempt aborted after a long silence
 */
async function* chunks(response, attempt) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  for (;;) {
    const timer = setTimeout(() => attempt.abort(), SILENCE);
    const { done, value } = await reader.read().finally(() => clearTimeout(timer));
    if (done) return;
    yield decoder.decode(value, { stream: true });
  }
}

/**
 * Parse the event stream format of the HTML standard.
 * @param {AsyncIterable<string>} texts
 * @returns {AsyncGenerator<ServerEvent>}
 */
export async function* parse(texts) {
  let rest = "";
  for await (const text of texts) {
    const blocks = (rest + text).replaceAll("\r\n", "\n").split("\n\n");
    rest = /** @type {string} */ (blocks.pop());
    for (const block of blocks) {
      const event = eventOf(block);
      if (event) yield event;
    }
  }
}

/** @param {string} block */
function eventOf(block) {
  const fields = { event: "message", data: /** @type {string[]} */ ([]) };
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (line.startsWith("data:")) fields.data.push(value);
    else if (line.startsWith("event:")) fields.event = value;
  }
  if (!fields.data.length && fields.event === "message") return null;
  const data = fields.data.join("\n");
  return { type: fields.event, data: data ? JSON.parse(data) : null };
}

/**
 * @param {number} milliseconds
 * @param {AbortSignal} signal
 */
function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve(undefined);
    }, { once: true });
  });
}
