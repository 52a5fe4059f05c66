/** The plan line: what a run would take, asked of the server while a person types. */

import { ApiError, send } from "./api.js";
import { make } from "./dom.js";
import { bytes, duration, length, quality } from "./format.js";

const WAIT = 450;
/** A plan is not asked for again for these: they change nothing of it. */
const WITHOUT_EFFECT = ["prompt", "negative_prompt", "seed"];

export class PlanLine {
  /** @type {AbortController | null} */
  #asked = null;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  /** What the plan that is shown was made of; "" where none is. */
  #shown = "";

  /**
   * @param {() => any} bodyOf the request's body now
   * @param {(error: ApiError) => void} complain about a wrong value
   */
  constructor(bodyOf, complain) {
    this.bodyOf = bodyOf;
    this.complain = complain;
    this.line = make("p", { className: "plan-line" });
    this.rest = make("div", { className: "plan-rest" });
    this.box = make("details", { className: "plan" }, make("summary", { "aria-label": "Plan" }, this.line), this.rest);
    this.element = make("div", { className: "plan-box", "aria-live": "polite" }, this.box);
    this.#say("The plan appears here: time, memory and precision.", "is-idle");
  }

  /** Ask for the plan soon; what was asked before is dropped. */
  ask() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#ask(), WAIT);
  }

  async #ask() {
    const body = this.bodyOf();
    const fields = body instanceof FormData ? [...body] : Object.entries(body);
    if (fields.every(([name]) => name === "model")) {
      this.#shown = "";
      this.#asked?.abort();
      return this.#say("Describe the video to see its plan: time, memory and precision.", "is-idle");
    }
    const kind = JSON.stringify(fields.map(([name, value]) => (WITHOUT_EFFECT.includes(name) ? name : [name, shapeOf(value)])));
    if (kind === this.#shown) return undefined;
    this.#asked?.abort();
    const asked = (this.#asked = new AbortController());
    this.element.classList.add("is-asking");
    if (!this.#shown) this.#say("Planning…", "is-idle");
    try {
      const response = await send("POST", "plan", { body, signal: asked.signal });
      this.#show((await response.json()).details);
      this.#shown = kind;
    } catch (error) {
      if (asked.signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      this.#shown = "";
      this.refuse(error);
    } finally {
      if (this.#asked === asked) this.element.classList.remove("is-asking");
    }
    return undefined;
  }

  /**
   * @param {string} text
   * @param {string} look
   */
  #say(text, look) {
    this.box.className = `plan ${look}`;
    this.box.open = false;
    this.line.replaceChildren(text);
    this.rest.replaceChildren();
  }

  /**
   * Say why there is no plan.
   * @param {ApiError} error
   */
  refuse(error) {
    if (error.code === "plan_does_not_fit") {
      if (error.details?.components) return this.#show(error.details, error.message);
      return this.#say(error.message, "is-refused");
    }
    if (error.isPassing) return this.#say(`No plan now: ${error.message}.`, "is-idle");
    if (error.param === "prompt") return this.#say(error.message, "is-idle");
    this.#say("No plan: a setting is wrong.", "is-idle");
    return this.complain(error);
  }

  /**
   * @param {any} plan `Plan.to_json()` of everyframe
   * @param {string} [refusal]
   */
  #show(plan, refusal = plan.infeasible ?? "") {
    const seconds = secondsOf(plan);
    const fact = (/** @type {string} */ name, /** @type {string} */ value) => make("span", { className: "fact" }, make("span", { className: "fact-name" }, name), value);
    this.box.className = refusal ? "plan is-refused" : "plan";
    this.line.replaceChildren(
      fact("time", seconds === null ? "not known yet" : seconds < 1 ? "under a second" : `about ${duration(seconds)}`),
      fact("memory", `${bytes(plan.peak_bytes)} of ${bytes(plan.device.free_memory ?? plan.device.memory)}`),
      fact("precision", precisionsOf(plan)),
      ...(plan.quality ? [fact("quality", quality(plan.quality))] : []),
    );
    this.rest.replaceChildren(...detailsOf(plan, refusal));
    if (refusal) this.box.open = true;
  }
}

/**
 * A value as far as a plan may depend on it: a file by name, size and age.
 * @param {any} value
 */
function shapeOf(value) {
  return value instanceof File ? [value.name, value.size, value.lastModified] : value;
}

/**
 * Forecast of all videos of the request; null without known rates.
 * @param {any} plan
 */
function secondsOf(plan) {
  const known = plan.stages.map((/** @type {any} */ stage) => stage.seconds).filter((/** @type {any} */ each) => each !== null);
  if (!known.length) return null;
  const { num_videos: videos = 1, chain = 1 } = plan.settings;
  return known.reduce((/** @type {number} */ sum, /** @type {number} */ each) => sum + each, 0) * videos * chain;
}

/** @param {any} precision */
const precisionOf = (precision) => (precision.weight_dtype ? `${precision.compute} with ${precision.weight_dtype} weights` : precision.compute);

/** @param {any} plan */
function precisionsOf(plan) {
  const all = plan.components.map((/** @type {any} */ part) => precisionOf(part.precision));
  return [...new Set(all)].join(", ");
}

/**
 * @param {any} plan
 * @param {string} refusal
 */
function detailsOf(plan, refusal) {
  const { settings, device } = plan;
  const video = `${settings.width} × ${settings.height}, ${settings.num_frames} frames at ${settings.fps} fps (${length(settings.num_frames / settings.fps)}), ${settings.num_inference_steps} steps, guidance ${settings.guidance_scale}`;
  const share = Math.min(1, plan.peak_bytes / (device.free_memory || device.memory || Infinity));
  const head = make("tr", {}, ...["Part", "Precision", "Memory"].map((name) => make("th", { scope: "col" }, name)));
  const rows = plan.components.map((/** @type {any} */ part) =>
    make("tr", {}, make("td", {}, part.title), make("td", {}, precisionOf(part.precision)), make("td", {}, bytes(part.weight_bytes + part.working_bytes))));
  const notes = [...(plan.downloads ?? []).map((/** @type {string} */ file) => `fetched first: ${file}`), ...(plan.notes ?? [])];
  return [
    refusal && make("p", { className: "error" }, refusal),
    make("p", {}, video, make("br"), `on ${device.name}`),
    make("div", { className: "meter", role: "img", "aria-label": `${Math.round(share * 100)} % of the free memory`, vars: { "--share": share } }),
    make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)),
    notes.length && make("ul", {}, ...notes.map((note) => make("li", {}, note))),
  ].filter(Boolean);
}
