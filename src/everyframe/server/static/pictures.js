/** Slots for pictures and videos that a model takes: a first frame, a video to continue, a mask. */

import { button, icon, make } from "./dom.js";
import { words } from "./format.js";

/** Labels that say it better than the option's own name. */
const LABELS = { image: "First frame", last_image: "Last frame", extend: "Extend a video", source: "Picture or video", mask: "Mask" };
/** What an option takes -> kinds of files. Animated pictures are videos too. */
const ACCEPTED = { picture: "image/*", video: "video/*,image/gif,image/webp", "picture or video": "image/*,video/*" };

/** @typedef {{name: string, accepts: string, element: HTMLElement, read: () => File | undefined, write: (file: File | undefined) => void}} Slot */

/**
 * Make the slot of an option of type "file".
 * @param {import("./fields.js").Option} option
 * @param {() => void} onChange
 * @returns {Slot}
 */
export function makeSlot({ name, help, accepts = "picture" }, onChange) {
  const text = /** @type {Record<string, string>} */ (LABELS)[name] ?? words(name);
  /** @type {File | undefined} */
  let file;
  let shown = "";
  const input = make("input", { type: "file", id: `field-${name}`, accept: ACCEPTED[accepts], className: "unseen" });
  const face = make("label", { for: input.id, className: "slot-face" });
  const remove = button(`Remove: ${text.toLowerCase()}`, "close", () => (write(undefined), onChange()), { isBare: true });
  const element = make("div", { className: "slot" }, input, face, remove);
  const read = () => file;

  /** @param {File | undefined} given */
  function write(given) {
    if (shown) URL.revokeObjectURL(shown);
    file = given;
    shown = given ? URL.createObjectURL(given) : "";
    input.value = "";
    remove.hidden = !given;
    element.classList.toggle("is-filled", Boolean(given));
    const picture = given && (given.type.startsWith("video/") ? make("video", { src: shown, muted: true, playsInline: true }) : make("img", { src: shown, alt: "" }));
    face.replaceChildren(picture || icon(accepts === "video" ? "film" : "picture"), make("span", {}, given ? given.name : text));
    face.title = given ? `${text}: ${given.name}` : (help ?? text);
  }

  input.addEventListener("change", () => {
    if (input.files[0]) write(input.files[0]);
    onChange();
  });
  write(undefined);
  return { name, accepts, element, read, write };
}

/**
 * The slot that takes a dropped file: where it fell, else the first that takes its kind.
 * @param {Slot[]} slots
 * @param {File} file
 * @param {EventTarget | null} target
 */
export function slotFor(slots, file, target) {
  const kind = file.type.startsWith("video/") ? "video" : "picture";
  const takes = (/** @type {Slot} */ slot) => slot.accepts.includes(kind) || (slot.accepts === "video" && /gif|webp/.test(file.type));
  const hit = slots.find((slot) => target instanceof Node && slot.element.contains(target));
  return hit && takes(hit) ? hit : slots.find((slot) => takes(slot) && slot.accepts.includes(kind));
}
