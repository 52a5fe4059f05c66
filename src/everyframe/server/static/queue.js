/** Jobs that wait, run, or need somebody: stage, step, time left, preview, and what can be done. */

import { button, byId, make, reconcile, setText } from "./dom.js";
import { duration, phase, size } from "./format.js";
import { isActive } from "./videos.js";

/** Bounds for the cells of a progress strip: a cell a frame, as far as they can be told apart. */
const FEWEST_CELLS = 8;
const MOST_CELLS = 48;
/** Waiting jobs that are shown before somebody asks for all: the videos stay in sight. */
const MOST_WAITING = 4;
let isWhole = false;

/**
 * @typedef {object} Actions What can be done with a video, given by the page.
 * @property {(id: string) => void} cancel
 * @property {(id: string) => void} retry
 * @property {(id: string) => void} remove
 * @property {(id: string) => void} reuse
 */

/**
 * Draw all jobs that are not completed: the running first, then the queue, then failed ones.
 * @param {import("./videos.js").Videos} videos
 * @param {Actions} actions
 */
export function drawQueue(videos, actions) {
  const rank = { in_progress: 0, queued: 1, failed: 2, cancelled: 3, completed: 4 };
  const jobs = videos.list.filter((video) => video.status !== "completed");
  jobs.sort((a, b) => rank[a.status] - rank[b.status] || (isActive(a) ? orderOf(a) - orderOf(b) : b.created_at - a.created_at));
  const waiting = jobs.filter((job) => job.status === "queued");
  const box = byId("queue");
  const hadFocus = box.contains(document.activeElement);
  box.hidden = !jobs.length;
  setText(byId("queue-title"), jobs.some(isActive) ? "In the making" : "Not finished");
  const shown = isWhole ? jobs : jobs.filter((job) => waiting.indexOf(job) < MOST_WAITING);
  const items = shown.map((job) => ({ job, place: waiting.indexOf(job) + 1 }));
  const all = byId("all-jobs");
  all.hidden = waiting.length <= MOST_WAITING;
  setText(all, isWhole ? "Show fewer" : `Show ${waiting.length - MOST_WAITING} more that wait`);
  all.setAttribute("aria-expanded", String(isWhole));
  all.onclick = () => {
    isWhole = !isWhole;
    drawQueue(videos, actions);
  };
  reconcile(byId("jobs"), items, ({ job }) => job.id, () => jobCard(videos, actions));
  if (hadFocus && !box.contains(document.activeElement)) byId("gallery").focus({ preventScroll: true });
}

/**
 * A job's place by time, and within one second by the server's own count of those before it.
 * @param {import("./videos.js").Video} job
 */
function orderOf(job) {
  return job.created_at + (job.queue_position ?? 0) / 1e6;
}

/**
 * @param {import("./videos.js").Videos} videos
 * @param {Actions} actions
 */
function jobCard(videos, actions) {
  let id = "";
  const picture = make("img", { alt: "", hidden: true });
  const screen = make("div", { className: "screen" }, picture);
  const prompt = make("h3", { className: "job-prompt" });
  const doing = make("p", { className: "doing" });
  const strip = make("div", { className: "strip", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100 });
  const notes = make("ul", { className: "job-notes" });
  const cancel = button("Cancel", "close", () => actions.cancel(id));
  const retry = button("Retry", "retry", () => actions.retry(id));
  const reuse = button("Reuse settings", "reuse", () => actions.reuse(id), { kind: "quiet" });
  const remove = button("Remove", "bin", () => actions.remove(id), { kind: "quiet" });
  const body = make("div", { className: "job-body" }, prompt, doing, strip, notes);
  const card = make("article", { className: "job" }, screen, body, make("div", { className: "actions" }, cancel, retry, reuse, remove));

  /** @param {{job: import("./videos.js").Video, place: number}} item */
  card.update = ({ job, place }) => {
    id = job.id;
    card.className = `job is-${job.status}`;
    card.setAttribute("aria-label", job.prompt || job.id);
    setText(prompt, job.prompt || "Without prompt");
    const [width, height] = (job.size ?? "16x9").split("x").map(Number);
    screen.style.setProperty("--aspect", String(width / height || 16 / 9));
    screen.classList.toggle("is-small", width <= 200);
    screen.hidden = job.status !== "in_progress";
    const preview = videos.previews.get(job.id);
    picture.hidden = !preview;
    if (preview && picture.src !== preview) picture.src = preview;
    picture.alt = preview ? `Preview after step ${job.step ?? 0}` : "";
    doing.replaceChildren(...sentence(job, place));
    const cells = Math.min(MOST_CELLS, Math.max(FEWEST_CELLS, job.num_frames ?? 24));
    strip.style.setProperty("--cells", String(cells));
    strip.style.setProperty("--done", String((job.progress ?? 0) / 100));
    strip.setAttribute("aria-valuenow", String(job.progress ?? 0));
    strip.setAttribute("aria-label", `Progress of ${job.prompt || "this video"}`);
    strip.setAttribute("aria-valuetext", `${job.progress ?? 0} %, ${phase(job)}`);
    strip.hidden = !job.progress && job.status !== "in_progress";
    notes.replaceChildren(...notesOf(job).map((note) => make("li", {}, note)));
    cancel.hidden = !isActive(job);
    retry.hidden = remove.hidden = isActive(job);
  };
  return card;
}

/**
 * What a job does, and how long it still takes.
 * @param {import("./videos.js").Video} job
 * @param {number} place in the queue, from 1
 */
function sentence(job, place) {
  const soft = (/** @type {string} */ text) => make("span", { className: "soft" }, text);
  if (job.status === "failed") return [make("span", { className: "error" }, job.error?.message ?? "It failed without a reason.")];
  if (job.status === "cancelled") return ["Cancelled", job.progress ? soft(`at ${job.progress} %; retry goes on from there`) : soft("before it began")];
  if (job.status === "queued") {
    return ["Waiting", soft([place === 1 ? "next" : `number ${place}`, size(job.size), job.model].filter(Boolean).join(" · "))];
  }
  const left = job.eta_s === null || job.eta_s === undefined ? "" : `${duration(job.eta_s)} left`;
  return [phase(job), left && soft(left), make("span", { className: "percent" }, `${job.progress} %`)];
}

/** @param {import("./videos.js").Video} job */
export function notesOf(job) {
  const repairs = (job.repairs ?? []).map((repair) => (typeof repair === "string" ? repair : (repair.text ?? `${repair.target ?? repair.module} runs in ${repair.to}`)));
  const resumed = job.resumed_from_step ? [`Resumed from step ${job.resumed_from_step}: no step was lost`] : [];
  return [...resumed, ...repairs.map((text) => `Repaired: ${text}`), ...(job.warnings ?? [])];
}
