/** Asks for the API key where the server wants one; the key becomes a cookie of this site. */

import { call, onUnauthorized } from "./api.js";
import { byId, make } from "./dom.js";

/** @type {Promise<void> | null} the dialog that is open: all that wait share it */
let asked = null;

/** Ask once for all requests that are refused. */
export function askForKeys() {
  onUnauthorized(() => (asked ??= ask().finally(() => (asked = null))));
}

/** @returns {Promise<void>} */
function ask() {
  const dialog = byId("access");
  const input = make("input", { id: "key", type: "password", autocomplete: "current-password", required: true });
  const error = make("p", { className: "error", role: "alert", hidden: true });
  const form = make("form", {},
    make("h2", { id: "access-title" }, "This server asks for a key"),
    make("label", { for: "key" }, "API key"), input, error,
    make("div", { className: "actions" }, make("button", { type: "submit", className: "primary" }, "Open")));
  dialog.replaceChildren(form);
  dialog.oncancel = (/** @type {Event} */ event) => event.preventDefault();
  dialog.showModal();
  return new Promise((resolve) => {
    form.addEventListener("submit", async (/** @type {Event} */ event) => {
      event.preventDefault();
      try {
        await call("POST", "session", { key: input.value });
        dialog.close();
        dialog.replaceChildren();
        resolve();
      } catch (problem) {
        error.textContent = problem instanceof Error ? problem.message : String(problem);
        error.hidden = false;
        input.select();
      }
    });
  });
}
