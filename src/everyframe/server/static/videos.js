/** The videos as this page knows them: loaded by the API, held current by its events. */

import { ApiError, call } from "./api.js";
import { follow } from "./events.js";

const PAGE_SIZE = 60;
/** Hidden tabs give up their stream: a browser opens six connections to a server, for all tabs. */
const POLL_WHILE_HIDDEN = 10_000;

/**
 * @typedef {object} Video A VideoResource of the API; see docs/how-to/serve.md.
 * @property {string} id
 * @property {"queued" | "in_progress" | "completed" | "failed" | "cancelled"} status
 * @property {number} progress percent
 * @property {number} created_at Unix time in seconds
 * @property {number | null} completed_at
 * @property {{code: string, message: string} | null} error
 * @property {string} model
 * @property {string | null} prompt
 * @property {string} seconds
 * @property {string} size
 * @property {number} seed
 * @property {number} num_frames
 * @property {number} [num_videos]
 * @property {number} fps
 * @property {number} num_inference_steps
 * @property {{method: string, worst_db: number | null} | null} [quality] chosen for what was asked
 * @property {string | null} phase
 * @property {number | null} step
 * @property {number | null} total_steps
 * @property {number | null} eta_s
 * @property {number | null} queue_position
 * @property {number | null} inference_time_s
 * @property {number | null} peak_memory_mb
 * @property {number | null} resumed_from_step
 * @property {string[]} warnings
 * @property {any[]} repairs
 * @property {Record<string, any>} [request] the fields that the client gave
 */

/** @param {Video} video */
export const isActive = (video) => video.status === "queued" || video.status === "in_progress";

/** @typedef {"connecting" | "open" | "lost" | "draining"} Connection */

/**
 * Emits `change` (a video changed: `detail.video`, `detail.before`), `remove` (`detail.id`) and
 * `connection`.
 */
export class Videos extends EventTarget {
  /** @type {Map<string, Video>} */
  #all = new Map();
  /**
   * Ids of those that were loaded page by page, in the server's order and without a gap. One that an
   * event or an address named is not among them: between it and these there may be others.
   * @type {string[]}
   */
  #paged = [];
  /** @type {Map<string, string>} the last preview of a running job: a data URL */
  previews = new Map();
  /** @type {Connection} */
  connection = "connecting";
  hasMore = false;
  isLoaded = false;

  /** All known videos, the newest first. */
  get list() {
    return [...this.#all.values()].sort((a, b) => b.created_at - a.created_at || (a.id < b.id ? 1 : -1));
  }

  /** @param {string} id */
  get(id) {
    return this.#all.get(id);
  }

  /** Load, and follow the server's events for as long as the page lives. */
  start() {
    /** @type {AbortController | null} */
    let stream = null;
    /** @type {ReturnType<typeof setInterval> | undefined} */
    let poll;
    const begin = () => {
      clearInterval(poll);
      if (document.hidden) {
        stream?.abort();
        stream = null;
        poll = setInterval(() => this.#tryToLoad(), POLL_WHILE_HIDDEN);
      } else if (!stream) {
        stream = new AbortController();
        this.#follow(stream.signal);
      }
    };
    document.addEventListener("visibilitychange", begin);
    begin();
  }

  /** @param {AbortSignal} signal */
  #follow(signal) {
    const on = {
      event: (/** @type {import("./events.js").ServerEvent} */ event) => this.#apply(event),
      open: () => {
        this.#setConnection("open");
        this.#tryToLoad();
      },
      lost: () => this.#setConnection(this.connection === "draining" ? "draining" : "lost"),
    };
    follow("events?preview=1", on, signal);
  }

  /** @param {Connection} connection */
  #setConnection(connection) {
    this.connection = connection;
    this.dispatchEvent(new Event("connection"));
  }

  async #tryToLoad() {
    try {
      await this.load();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.#setConnection("lost");
    }
  }

  /** Load the newest videos; what the server no longer has among them goes. */
  async load() {
    const before = new Map(this.#all);
    const { data, has_more: hasMore } = await call("GET", `videos?limit=${PAGE_SIZE}&order=desc`);
    const ids = data.map((/** @type {Video} */ video) => video.id);
    // Older pages stay where these join them. Else there is a gap, and paging begins anew.
    const join = hasMore ? this.#paged.indexOf(ids.at(-1)) : -1;
    const older = join < 0 ? [] : this.#paged.slice(join + 1);
    const there = new Set([...ids, ...older]);
    const paged = new Set(this.#paged);
    const oldest = hasMore ? data.at(-1).created_at : -Infinity;
    for (const video of this.list) {
      const isOld = before.get(video.id) === video;
      const isCovered = paged.has(video.id) || video.created_at > oldest;
      if (isOld && isCovered && !there.has(video.id)) this.remove(video.id);
    }
    this.#paged = [...ids, ...older];
    if (!older.length) this.hasMore = hasMore;
    this.isLoaded = true;
    this.#putAll(data, before);
  }

  /**
   * Load the next older ones.
   * @returns {Promise<void>}
   */
  async loadMore() {
    const after = this.#paged.at(-1);
    if (!after) return this.load();
    const before = new Map(this.#all);
    try {
      const { data, has_more: hasMore } = await call("GET", `videos?limit=${PAGE_SIZE}&order=desc&after=${encodeURIComponent(after)}`);
      if (this.#paged.at(-1) !== after) return await this.loadMore(); // a load came in between
      this.#paged.push(...data.map((/** @type {Video} */ video) => video.id));
      this.hasMore = hasMore;
      this.#putAll(data, before);
    } catch (error) {
      if (!(error instanceof ApiError) || error.param !== "after") throw error;
      this.remove(after); // deleted while nobody told this page
      return await this.loadMore();
    }
    return undefined;
  }

  /**
   * Put the videos of an answer.
   * @param {Video[]} data
   * @param {Map<string, Video>} before the videos as they were known when the request was sent
   */
  #putAll(data, before) {
    data.forEach((video) => this.#putUnlessNewer(video, before.get(video.id)));
    this.dispatchEvent(new CustomEvent("change", { detail: {} }));
  }

  /**
   * Add or replace a video.
   * @param {Video} video
   */
  put(video) {
    const before = this.#all.get(video.id);
    this.#all.set(video.id, video);
    if (!isActive(video)) this.previews.delete(video.id);
    this.dispatchEvent(new CustomEvent("change", { detail: { video, before } }));
  }

  /**
   * Put what was asked for, unless an event came in between: that is newer than the answer.
   * @param {Video} video
   * @param {Video | undefined} before the video as it was known when the request was sent
   */
  #putUnlessNewer(video, before) {
    if (this.#all.get(video.id) === before) this.put(video);
  }

  /**
   * Put the answer of a request about a video.
   * @param {string} id
   * @param {() => Promise<Video>} ask
   */
  async update(id, ask) {
    const before = this.#all.get(id);
    this.#putUnlessNewer(await ask(), before);
  }

  /** @param {string} id */
  remove(id) {
    this.previews.delete(id);
    this.#paged = this.#paged.filter((each) => each !== id);
    if (this.#all.delete(id)) this.dispatchEvent(new CustomEvent("remove", { detail: { id } }));
  }

  /**
   * Load one, again if an event came in between.
   * @param {string} id
   * @returns {Promise<void>}
   */
  async refresh(id) {
    try {
      const before = this.#all.get(id);
      const video = await call("GET", `videos/${encodeURIComponent(id)}`);
      if (this.#all.get(id) !== before) return await this.refresh(id);
      this.put(video);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 404) this.remove(id);
    }
    return undefined;
  }

  /** @param {import("./events.js").ServerEvent} event */
  #apply({ type, data }) {
    if (type === "draining") return this.#setConnection("draining");
    const id = data?.video ?? data?.id;
    if (!id) return;
    if (type === "done") return this.put(data);
    if (type === "deleted") return this.remove(id);
    const known = this.#all.get(id);
    if (!known) return this.refresh(id);
    if (type === "preview") this.previews.set(id, data.image);
    this.put({ ...known, ...patchOf(type, data, known) });
  }
}

/**
 * What an event changes in its video.
 * @param {string} type
 * @param {any} data
 * @param {Video} known
 * @returns {Partial<Video>}
 */
function patchOf(type, data, known) {
  if (type === "status") return { status: data.status, queue_position: data.queue_position ?? null, ...(data.status === "queued" && { error: null }) };
  if (type === "stage") return { phase: data.stage, step: 0, total_steps: data.num_steps };
  if (type === "note") return { warnings: [...(known.warnings ?? []), data.text] };
  if (type === "repaired") return { repairs: [...(known.repairs ?? []), data] };
  if (type === "resumed") return { resumed_from_step: data.step ?? known.resumed_from_step };
  if (type !== "progress") return {};
  const { phase, step, total_steps, eta_s } = data;
  return { status: "in_progress", phase, step, total_steps, eta_s, progress: Math.max(known.progress, data.progress) };
}
