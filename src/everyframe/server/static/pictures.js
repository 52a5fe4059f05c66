/** Slots for given frames: a first or last picture, or a video to continue. */

import { button, icon, make } from "./dom.js";

/** Option -> what it says and takes. */
const KINDS = {
  image: { label: "First frame", accept: "image/*", icon: "picture" },
  last_image: { label: "Last frame", accept: "image/*", icon: "picture" },
  extend: { label: "Continue a video", accept: "video/*,image/gif,image/webp", icon: "film" },
};

/** The options that a slot can fill. */
export const SLOTS = Object.keys(KINDS);

/** @typedef {{name: string, element: HTMLElement, read: () => File | undefined, write: (file: File | undefined) => void}} Slot */

/**
 * Make the slot of one option.
 * @param {"image" | "last_image" | "extend"} name
 * @param {() => void} onChange
 * @returns {Slot}
 */
export function makeSlot(name, onChange) {
  const kind = KINDS[name];
  /** @type {File | undefined} */
  let file;
  let shown = "";
  const input = make("input", { type: "file", id: `field-${name}`, accept: kind.accept, className: "unseen" });
  const face = make("label", { for: input.id, className: "slot-face" });
  const remove = button(`Remove: ${kind.label.toLowerCase()}`, "close", () => (write(undefined), onChange()), { isBare: true });
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
    face.replaceChildren(picture || icon(kind.icon), make("span", {}, given ? given.name : kind.label));
    face.title = given ? `${kind.label}: ${given.name}` : kind.label;
  }

  input.addEventListener("change", () => {
    if (input.files[0]) write(input.files[0]);
    onChange();
  });
  write(undefined);
  return { name, element, read, write };
}

/**
 * The slot that takes a dropped file: where it fell, else the first that takes its kind.
 * @param {Slot[]} slots
 * @param {File} file
 * @param {EventTarget | null} target
 */
export function slotFor(slots, file, target) {
  const takes = (/** @type {Slot} */ slot) => (slot.name === "extend") === file.type.startsWith("video/");
  const hit = slots.find((slot) => target instanceof Node && slot.element.contains(target));
  return hit && (takes(hit) || hit.name === "extend") ? hit : slots.find(takes);
}
