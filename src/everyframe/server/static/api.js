/** The public HTTP API, as every other client uses it. Addresses are relative to the page's own. */

/** An answer that is an error: the envelope's message, code, parameter and details. */
export class ApiError extends Error {
  /**
   * @param {number} status HTTP status; 0 if the server can't be reached.
   * @param {{message?: string, code?: string | null, param?: string | null, details?: any}} error
   */
  constructor(status, { message, code, param, details }) {
    super(message || `the server answers ${status} without a reason`);
    this.status = status;
    this.code = code ?? null;
    this.param = param ?? null;
    this.details = details ?? null;
  }

  /** Whether a later try may succeed by itself. */
  get isPassing() {
    return [0, 429, 503].includes(this.status);
  }
}

/** @type {() => Promise<void>} asks for a key; set by the page */
let askForKey = () => Promise.reject(new Error("no way to ask for a key"));

/** @param {() => Promise<void>} ask */
export function onUnauthorized(ask) {
  askForKey = ask;
}

/** @param {string} path below /v1/, such as "videos" */
export function address(path) {
  return new URL(`v1/${path}`, document.baseURI).href;
}

/**
 * Send a request; an answer of 401 asks for the key and sends it once more.
 * @param {string} method
 * @param {string} path
 * @param {{body?: any, headers?: Record<string, string>, signal?: AbortSignal, isSecond?: boolean}} [given]
 *   `body`: FormData, or what becomes JSON.
 * @returns {Promise<Response>}
 */
export async function send(method, path, { body, headers = {}, signal, isSecond = false } = {}) {
  const isForm = body instanceof FormData;
  let response;
  try {
    response = await fetch(address(path), {
      method,
      signal,
      body: body === undefined || isForm ? body : JSON.stringify(body),
      headers: body === undefined || isForm ? headers : { ...headers, "content-type": "application/json" },
      credentials: "same-origin",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, { message: "the server can't be reached; is it running?", code: "unreachable" });
  }
  if (response.status === 401 && !isSecond && path !== "session") {
    await askForKey();
    return send(method, path, { body, headers, signal, isSecond: true });
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** @param {Response} response */
async function errorOf(response) {
  try {
    return new ApiError(response.status, (await response.json()).error ?? {});
  } catch {
    return new ApiError(response.status, { message: `the server answers ${response.status} ${response.statusText}` });
  }
}

/**
 * Send a request and parse the JSON of its answer.
 * @param {string} method
 * @param {string} path
 * @param {any} [body]
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function call(method, path, body, signal) {
  return (await send(method, path, { body, signal })).json();
}

/**
 * Address of a file of a video.
 * @param {string} id
 * @param {string} [variant]
 * @param {number} [index] from 1, of a job that makes several videos
 */
export function contentAddress(id, variant = "video", index = 1) {
  const query = new URLSearchParams();
  if (variant !== "video") query.set("variant", variant);
  if (index > 1) query.set("index", String(index));
  return address(`videos/${encodeURIComponent(id)}/content${query.size ? `?${query}` : ""}`);
}
