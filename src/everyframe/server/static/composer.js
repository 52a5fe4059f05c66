/** The form of a new video: made from the model's schema, kept over a reload, sent as a request. */

import { ApiError, call, send } from "./api.js";
import { button, make } from "./dom.js";
import { makeField } from "./fields.js";
import { announce, attempt, show } from "./messages.js";
import { makeSlot, slotFor } from "./pictures.js";
import { PlanLine } from "./plan.js";

/** Options beside the prompt; all others are under "More settings". */
const FIRST = ["size", "num_frames", "num_inference_steps", "guidance_scale", "seed"];
/** Options that have a place of their own, or say the same as `size`. */
const ELSEWHERE = new Set(["prompt", "model", "width", "height"]);
const DRAFT = "everyframe.draft";

export class Composer {
  /** @type {Map<string, import("./fields.js").Field>} */
  #fields = new Map();
  /** @type {import("./pictures.js").Slot[]} */
  #slots = [];
  #model = "";
  /** The server's default. It is sent as no name: then the server says early what it can't draw. */
  #usualModel = "";
  /** One key an attempt: sent again after a lost answer, it makes no second job. */
  #key = newKey();

  /**
   * @param {HTMLFormElement} form
   * @param {(video: import("./videos.js").Video) => void} onCreated
   */
  constructor(form, onCreated) {
    this.form = form;
    this.onCreated = onCreated;
    this.prompt = make("textarea", { id: "prompt", name: "prompt", rows: 3, placeholder: "Describe the video" });
    this.prompt.setAttribute("aria-describedby", "prompt-error");
    this.promptError = make("p", { id: "prompt-error", className: "error", hidden: true });
    this.models = make("select", { id: "model", name: "model" });
    this.modelNote = make("p", { className: "soft" });
    this.slots = make("div", { className: "slots" });
    this.first = make("div", { className: "fields" });
    this.more = make("div", {});
    this.moreBox = make("details", { className: "more-settings" }, make("summary", {}, "More settings"), this.more);
    this.error = make("p", { id: "composer-error", className: "error", role: "alert", hidden: true });
    this.submit = make("button", { type: "submit", className: "primary" }, "Make video", make("kbd", { "aria-hidden": "true" }, "Ctrl ↵"));
    this.plan = new PlanLine(() => this.#body(), (error) => this.#complain(error));
    const fields = make("div", { className: "composer-fields" },
      make("label", { for: "prompt", className: "prompt-label" }, "What should the video show?"),
      this.prompt, this.promptError, this.slots,
      make("div", { className: "field" }, make("label", { for: "model" }, "Model"), this.models, this.modelNote),
      this.first, this.moreBox);
    const clear = button("Clear", "close", () => this.clear());
    form.append(fields, make("div", { className: "composer-foot" }, this.plan.element, this.error, make("div", { className: "actions" }, this.submit, clear)));
    form.addEventListener("submit", (event) => (event.preventDefault(), this.send()));
    form.addEventListener("input", () => this.#changed());
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    this.models.addEventListener("change", () => attempt(() => this.#choose(this.models.value, () => this.values())));
  }

  /** Whether the server has said what it can make. */
  get isLoaded() {
    return Boolean(this.#model);
  }

  /** @param {string} model */
  #isServed(model) {
    return [...this.models.options].some((option) => option.value === model);
  }

  /** Load the models, and the draft of before a reload. */
  async load() {
    const { data } = await call("GET", "models");
    this.#usualModel = (data.find((/** @type {any} */ card) => card.is_default) ?? data[0]).id;
    this.models.replaceChildren(...data.map((/** @type {any} */ card) => make("option", { value: card.id }, card.id)));
    const draft = JSON.parse(sessionStorage.getItem(DRAFT) ?? "{}");
    const model = this.#isServed(draft.model) ? draft.model : this.#usualModel;
    await this.#choose(model, () => ({ ...draft, prompt: this.prompt.value || draft.prompt }));
  }

  /**
   * Build the form of a model; the names of the values that it has no control for.
   * @param {string} id
   * @param {() => Record<string, any>} valuesNow asked for once the schema is there: people type on
   * @returns {Promise<string[]>}
   */
  async #choose(id, valuesNow) {
    const path = `models/${encodeURIComponent(id)}`;
    let card = await call("GET", `${path}?defaults=false`);
    if (!card.family) card = await call("GET", path); // only its configs tell which options it has
    const values = valuesNow();
    this.#model = this.models.value = id;
    // They come of a plan, which takes a while the first time: the form is there before.
    call("GET", path).then((whole) => this.#model === id && this.#showDefaults(whole.defaults ?? {}), (error) => this.plan.refuse(error));
    /** @type {import("./fields.js").Option[]} */
    const options = card.options;
    this.modelNote.textContent = [card.title, card.licence].filter(Boolean).join(" · ");
    this.#slots = options.filter((option) => option.type === "file").map((option) => makeSlot(option, () => this.#changed()));
    this.slots.replaceChildren(...this.#slots.map((slot) => slot.element));
    /** @type {Map<string, HTMLElement>} */
    const groups = new Map();
    this.#fields = new Map();
    for (const option of options) {
      if (ELSEWHERE.has(option.name) || option.type === "file") continue;
      const field = makeField(option, suggestionsOf(option.name, card));
      this.#fields.set(option.name, field);
      if (FIRST.includes(option.name)) continue;
      const group = option.group ?? "Other";
      if (!groups.has(group)) groups.set(group, make("div", { className: "fields" }));
      groups.get(group)?.append(field.element);
    }
    this.first.replaceChildren(...FIRST.filter((name) => this.#fields.has(name)).map((name) => this.#field(name).element));
    this.#addDice();
    this.more.replaceChildren(...[...groups].map(([group, box]) => make("fieldset", {}, make("legend", {}, group === "Family" ? "Of this model" : group), box)));
    this.moreBox.hidden = !groups.size;
    const unknown = this.#write(values);
    this.#changed();
    return unknown;
  }

  /** @param {Record<string, any>} defaults of the plan */
  #showDefaults(defaults) {
    // The plan's seed is drawn, and its quality is what was chosen: neither is a default.
    const { width, height, seed, quality, ...shown } = defaults;
    if (width) shown.size = `${width}x${height}`;
    for (const [name, value] of Object.entries(shown)) {
      const input = this.#fields.get(name)?.input;
      if (input instanceof HTMLInputElement && value !== null) input.placeholder = String(value);
    }
  }

  /** @param {string} name */
  #field(name) {
    return /** @type {import("./fields.js").Field} */ (this.#fields.get(name));
  }

  #addDice() {
    if (!this.#fields.has("seed")) return;
    const { input, write } = this.#field("seed");
    /** @type {any} */ (input).placeholder = "random";
    const roll = () => {
      write(crypto.getRandomValues(new Uint32Array(1))[0] >>> 1);
      this.#changed();
    };
    input.after(button("Draw a seed", "dice", roll, { isBare: true, kind: "dice" }));
    input.parentElement?.classList.add("has-button");
  }

  /**
   * Write values into the controls; the names of those that this model has no control for.
   * @param {Record<string, any>} values
   */
  #write(values) {
    this.prompt.value = values.prompt ?? "";
    const known = { ...values };
    if (known.size === undefined && known.width && known.height) known.size = `${known.width}x${known.height}`;
    for (const field of this.#fields.values()) field.write(known[field.name]);
    const isBeside = [...this.#fields.values()].some(({ name }) => !FIRST.includes(name) && known[name] !== undefined);
    if (isBeside) this.moreBox.open = true;
    return Object.keys(values).filter((name) => !this.#fields.has(name) && !ELSEWHERE.has(name));
  }

  /** What a person gave, without files: prompt, model and each option that is not its default. */
  values() {
    /** @type {Record<string, any>} */
    const values = { prompt: this.prompt.value.trim() || undefined, model: this.#model && this.#model !== this.#usualModel ? this.#model : undefined };
    for (const field of this.#fields.values()) values[field.name] = field.read();
    return Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined));
  }

  /** The request's body: JSON, or a form where a picture or video goes along. */
  #body() {
    const values = this.values();
    const files = this.#slots.filter((slot) => slot.read());
    if (!files.length) return values;
    const form = new FormData();
    for (const [name, value] of Object.entries(values)) {
      for (const [key, each] of parts(name, value)) form.append(key, each);
    }
    for (const slot of files) form.append(slot.name, /** @type {File} */ (slot.read()));
    return form;
  }

  #changed() {
    this.#key = newKey();
    this.#complain(null);
    sessionStorage.setItem(DRAFT, JSON.stringify({ model: this.#model, ...this.values() }));
    this.plan.ask();
  }

  /**
   * Show an error at its field, or above the button; null takes all of them away.
   * @param {ApiError | null} error
   */
  #complain(error) {
    for (const field of this.#fields.values()) field.complain(field.name === error?.param ? error.message : "");
    const isOfPrompt = error?.param === "prompt";
    const isElsewhere = error && !isOfPrompt && !this.#fields.has(error.param ?? "");
    this.promptError.textContent = isOfPrompt ? error.message : "";
    this.promptError.hidden = !isOfPrompt;
    this.prompt.toggleAttribute("aria-invalid", isOfPrompt);
    this.error.textContent = isElsewhere ? error.message : "";
    this.error.hidden = !isElsewhere;
  }

  /** Make the video. */
  async send() {
    const bad = [...this.#fields.values()].find((field) => !field.input.checkValidity());
    if (bad) {
      bad.complain(bad.input.validationMessage);
      return this.#reveal(bad.input);
    }
    this.submit.disabled = true;
    try {
      const response = await send("POST", "videos", { body: this.#body(), headers: { "idempotency-key": this.#key } });
      this.#key = newKey();
      this.onCreated(await response.json());
      announce("Video queued");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.#complain(error);
      const field = this.#fields.get(error.param ?? "");
      if (field) this.#reveal(field.input);
      else if (error.param === "prompt") this.prompt.focus();
    } finally {
      this.submit.disabled = false;
    }
  }

  /** @param {HTMLElement} input */
  #reveal(input) {
    if (this.more.contains(input)) this.moreBox.open = true;
    input.focus();
  }

  /**
   * Fill the form with the settings of another video.
   * @param {Record<string, any>} values
   * @param {string[]} [notes] what a person is to know beside it
   */
  async fill(values, notes = []) {
    const said = [...notes];
    const { model, ...rest } = values;
    if (model && !this.#isServed(model)) said.push(`the model ${model} is not on this server`);
    const unknown = await this.#choose(this.#isServed(model) ? model : this.#model, () => rest);
    if (unknown.length) said.push(`not taken over: ${unknown.join(", ")}`);
    if (said.length) show(`Settings taken over; ${said.join("; ")}.`);
  }

  /** Empty all controls; the model stays. */
  async clear() {
    await attempt(() => this.#choose(this.#model, () => ({})));
    this.prompt.focus();
  }

  /**
   * Take a dropped picture or video as a given frame. False if the model takes none.
   * @param {File} file
   * @param {EventTarget | null} [target]
   */
  take(file, target = null) {
    const slot = slotFor(this.#slots, file, target);
    slot?.write(file);
    if (slot) this.#changed();
    return Boolean(slot);
  }
}

/**
 * Values that a person may choose from.
 * @param {string} name
 * @param {any} card
 * @returns {string[]}
 */
function suggestionsOf(name, card) {
  if (name === "loras") return card.loras ?? [];
  return card.options.find((/** @type {any} */ option) => option.name === name).examples ?? [];
}

/**
 * An option as fields of a form: `name[]` for each of a list, `name[key]` for each of an object.
 * @param {string} name
 * @param {any} value
 * @returns {[string, string][]}
 */
function parts(name, value) {
  if (Array.isArray(value)) return value.map((each) => [`${name}[]`, String(each)]);
  if (typeof value !== "object") return [[name, String(value)]];
  return Object.entries(value).map(([key, each]) => [`${name}[${key}]`, String(each)]);
}

/** `crypto.randomUUID` is there on HTTPS and loopback alone. */
function newKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
