/** A video's request as a command, as Python and as a call of the API. */

import { address } from "./api.js";
import { FILES } from "./record.js";

/** Fields that have a place of their own below. */
const PLACED = new Set(["prompt", "seed"]);

/** @typedef {"Command" | "Python" | "curl"} Kind */
/** @type {Kind[]} */
export const SNIPPETS = ["Command", "Python", "curl"];

/**
 * What makes this video again, its seed included.
 * @param {import("./videos.js").Video} video
 */
export function requestOf(video) {
  const asked = video.request ?? { size: video.size, num_frames: video.num_frames, num_inference_steps: video.num_inference_steps };
  return { prompt: video.prompt, model: video.model, ...asked, seed: video.seed };
}

/**
 * @param {string} kind
 * @param {import("./videos.js").Video} video
 */
export function snippet(kind, video) {
  const whole = requestOf(video);
  // Of a picture or video that was sent along, the server tells that it was there, and no more.
  const request = Object.fromEntries(Object.entries(whole).filter(([name, value]) => !(FILES.includes(name) && value === true)));
  const options = Object.entries(request).filter(([name, value]) => !PLACED.has(name) && value !== null && value !== undefined);
  if (kind === "Command") {
    const flags = options.flatMap(([name, value]) => flagsOf(name, value));
    const prompt = request.prompt ?? "";
    const placed = prompt.startsWith("-") ? flagsOf("prompt", prompt) : [quote(prompt)];
    return ["everyframe generate", ...placed, ...flags, `--seed ${request.seed}`].join(" ");
  }
  if (kind === "Python") {
    const values = options.map(([name, value]) => `${name}=${python(value)}`);
    return `import everyframe\n\nvideo = everyframe.generate(${[python(request.prompt ?? ""), ...values, `seed=${request.seed}`].join(", ")})\n`;
  }
  return `curl ${quote(address("videos"))} -H 'content-type: application/json' -d ${quote(JSON.stringify(request))}`;
}

/**
 * @param {string} name
 * @param {any} value
 * @returns {string[]}
 */
function flagsOf(name, value) {
  const flag = `--${name.replaceAll("_", "-")}`;
  if (value === true) return [flag];
  if (value === false) return [`${flag}=false`];
  if (Array.isArray(value)) return value.flatMap((each) => flagsOf(name, each));
  if (typeof value === "object") return Object.entries(value).map(([key, each]) => `${flag} ${quote(`${key}=${each}`)}`);
  const text = String(value);
  return [text.startsWith("-") ? `${flag}=${quote(text)}` : `${flag} ${quote(text)}`]; // else it is read as a flag
}

/**
 * A word of a POSIX shell.
 * @param {string} text
 */
function quote(text) {
  return /^[\w.:/@=-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/**
 * A value as Python source: JSON but for three words.
 * @param {any} value
 * @returns {string}
 */
function python(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, each]) => `${python(key)}: ${python(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}
