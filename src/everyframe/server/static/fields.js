/** Controls of a model's options, made from its card: type, limits, unit, default and help of each. */

import { make } from "./dom.js";
import { words } from "./format.js";

/** Labels that say it better than the option's own name. */
const LABELS = {
  num_frames: "Frames",
  num_inference_steps: "Steps",
  guidance_scale: "Guidance",
  fps: "Frames per second",
  loras: "LoRAs",
  num_videos: "Number of videos",
  dtype: "Precision",
};

/**
 * @typedef {object} Field One option's control.
 * @property {string} name
 * @property {HTMLElement} element
 * @property {HTMLInputElement | HTMLSelectElement | HTMLTextAreaElement} input
 * @property {() => any} read the value; undefined where the model's default counts
 * @property {(value: any) => void} write
 * @property {(message: string) => void} complain shows an error beside it; "" takes it away
 */

/**
 * @typedef {object} Option An option of a model's card.
 * @property {string} name
 * @property {"string" | "integer" | "number" | "boolean" | "array" | "object" | "file"} type
 * @property {string | null} group
 * @property {string | null} help
 * @property {string | null} unit
 * @property {any} default
 * @property {any[]} [enum]
 * @property {"picture" | "video" | "picture or video"} [accepts] what a file may be
 * @property {number} [minimum]
 * @property {number} [maximum]
 * @property {number} [exclusiveMinimum]
 * @property {number} [exclusiveMaximum]
 */

/**
 * Make the control of one option.
 * @param {Option} option
 * @param {string[]} [suggestions]
 * @returns {Field}
 */
export function makeField(option, suggestions = []) {
  const { name } = option;
  const id = `field-${name}`;
  const { input, read, write } = controlOf(option);
  Object.assign(input, { id, name, autocomplete: "off" });
  const help = make("span", { id: `${id}-help`, hidden: true }, option.help ?? "");
  const error = make("p", { id: `${id}-error`, className: "error", hidden: true });
  input.setAttribute("aria-describedby", `${id}-error ${id}-help`);
  const unit = option.unit && !LABELS_WITH_UNIT.has(name) ? make("span", { className: "unit" }, ` ${option.unit}`) : null;
  const label = make("label", { for: id, title: option.help ?? "" }, /** @type {any} */ (LABELS)[name] ?? words(name), unit);
  const list = suggestions.length ? make("datalist", { id: `${id}-list` }, ...suggestions.map((value) => make("option", { value }))) : null;
  if (list) input.setAttribute("list", list.id);
  const isCheck = input.type === "checkbox";
  const element = make("div", { className: isCheck ? "field is-check" : "field" }, ...(isCheck ? [input, label] : [label, input]), list, help, error);
  return { name, element, input, read, write, complain };

  /** @param {string} message */
  function complain(message) {
    error.textContent = message;
    error.hidden = !message;
    if (message) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }
}

const LABELS_WITH_UNIT = new Set(["num_frames", "size", "height", "width"]);

/**
 * @param {Option} kind
 * @returns {any}
 */
function controlOf(kind) {
  const usual = kind.default;
  if (kind.type === "boolean") return checkbox(Boolean(usual));
  if (kind.enum) return choice(usual === null || usual === undefined ? ["", ...kind.enum] : kind.enum, usual);
  if (kind.type === "array") return lines(kind, (given) => given, (value) => value);
  if (kind.type === "object") return lines(kind, pairs, (value) => Object.entries(value).map((pair) => pair.join("=")));
  if (kind.type === "integer" || kind.type === "number") return number(kind, usual);
  return text(usual);
}

/** @param {boolean} usual */
function checkbox(usual) {
  const input = make("input", { type: "checkbox", checked: usual });
  return {
    input,
    read: () => (input.checked === usual ? undefined : input.checked),
    write: (/** @type {any} */ value) => (input.checked = value === undefined ? usual : value === true || value === "true"),
  };
}

/**
 * @param {any[]} values
 * @param {any} usual
 */
function choice(values, usual) {
  const input = make("select", {}, ...values.map((value) => make("option", { value, selected: value === (usual ?? "") }, value === "" ? "as the model has it" : String(value))));
  return {
    input,
    read: () => (input.value === String(usual ?? "") ? undefined : input.value),
    write: (/** @type {any} */ value) => (input.value = String(value ?? usual ?? "")),
  };
}

/**
 * @param {Option} kind
 * @param {any} usual
 */
function number(kind, usual) {
  const isWhole = kind.type === "integer";
  const input = make("input", {
    type: "number",
    inputMode: isWhole ? "numeric" : "decimal",
    step: isWhole ? "1" : "any",
    min: kind.minimum ?? (kind.exclusiveMinimum !== undefined && isWhole ? kind.exclusiveMinimum + 1 : kind.exclusiveMinimum),
    max: kind.maximum ?? kind.exclusiveMaximum,
    placeholder: usual ?? "",
  });
  return { input, read: () => (input.value === "" ? undefined : Number(input.value)), write: (/** @type {any} */ value) => (input.value = value ?? "") };
}

/** @param {any} usual */
function text(usual) {
  const input = make("input", { type: "text", placeholder: usual ?? "", spellcheck: false });
  return { input, read: () => input.value.trim() || undefined, write: (/** @type {any} */ value) => (input.value = value ?? "") };
}

/**
 * Several values, one a line.
 * @param {any} kind
 * @param {(given: string[]) => any} parse
 * @param {(value: any) => any[]} split
 */
function lines(kind, parse, split) {
  const input = make("textarea", { rows: 2, placeholder: kind.type === "object" ? "NAME=VALUE, one a line" : "one a line", spellcheck: false });
  const given = () => input.value.split("\n").map((/** @type {string} */ line) => line.trim()).filter(Boolean);
  return {
    input,
    read: () => (given().length ? parse(given()) : undefined),
    write: (/** @type {any} */ value) => (input.value = value ? split(value).join("\n") : ""),
  };
}

/** @param {string[]} given */
function pairs(given) {
  return Object.fromEntries(given.map((line) => [line.split("=", 1)[0].trim(), line.slice(line.indexOf("=") + 1).trim()]));
}
