/** Messages: a line that goes again, and the live region that a screen reader reads. */

import { byId, button, make } from "./dom.js";

const SHOWN_FOR = 7000;

/**
 * Say it to a screen reader alone.
 * @param {string} text
 */
export function announce(text) {
  byId("live").textContent = text;
}

/**
 * Show a message; an error stays until it is closed.
 * @param {string} text
 * @param {"note" | "error"} [kind]
 */
export function show(text, kind = "note") {
  const close = button("Close", "close", () => message.remove(), { isBare: true });
  const message = make("div", { className: `message is-${kind}`, role: kind === "error" ? "alert" : "status" }, make("p", {}, text), close);
  byId("messages").append(message);
  if (kind === "note") setTimeout(() => message.remove(), SHOWN_FOR);
}

/**
 * Run an action of a person; what goes wrong is shown.
 * @param {() => Promise<any>} action
 */
export async function attempt(action) {
  try {
    return await action();
  } catch (error) {
    show(error instanceof Error ? error.message : String(error), "error");
    return undefined;
  }
}
