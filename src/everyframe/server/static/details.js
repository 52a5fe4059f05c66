/** One video, large: how it was made, and what can be made of it. */

import { contentAddress } from "./api.js";
import { button, byId, icon, make } from "./dom.js";
import { bytes, duration, length, quality, size, time, words } from "./format.js";
import { attempt, show } from "./messages.js";
import { notesOf } from "./queue.js";
import { SNIPPETS, snippet } from "./snippets.js";

/**
 * @typedef {object} DetailActions
 * @property {(id: string) => void} reuse
 * @property {(id: string) => void} again the same settings with another seed
 * @property {(id: string) => void} remove
 * @property {(file: File) => boolean} start from a picture; false if the model takes none
 */

/**
 * Show a video in the dialog; its address is `#/video/ID`.
 * @param {import("./videos.js").Video} video
 * @param {import("./videos.js").Video[]} all finished ones, for the way to the next
 * @param {DetailActions} actions
 */
export function openDetails(video, all, actions) {
  const dialog = byId("details");
  const place = all.findIndex((each) => each.id === video.id);
  const go = (/** @type {number} */ step) => {
    const next = all[place + step];
    if (next) location.hash = `#/video/${encodeURIComponent(next.id)}`;
  };
  const player = makePlayer(video);
  const close = button("Close", "close", () => dialog.close(), { isBare: true });
  const newer = button("Newer video", "back", () => go(-1), { isBare: true });
  const older = button("Older video", "next", () => go(1), { isBare: true });
  newer.disabled = place <= 0;
  older.disabled = place === all.length - 1;
  const last = button("Start from its last frame", "last", () => attempt(() => startFromLastFrame(player, video, actions)));
  const save = make("a", { href: contentAddress(video.id), download: fileName(video), className: "button" }, icon("save"), "Save");
  dialog.replaceChildren(
    make("div", { className: "details-bar" }, newer, older, make("span", { className: "soft" }, `${place + 1} of ${all.length}`), close),
    make("div", { className: "details-screen" }, player, numbers(video, player, save)),
    make("div", { className: "details-text" },
      make("h2", {}, video.prompt || "Without prompt"),
      make("div", { className: "actions" },
        button("Reuse settings", "reuse", () => (dialog.close(), actions.reuse(video.id)), { kind: "primary" }),
        button("Another seed", "dice", () => (dialog.close(), actions.again(video.id))),
        last, save,
        button("Delete", "bin", (event) => confirmDelete(event, dialog, video, actions), { kind: "quiet" })),
      facts(video),
      notes(video),
      copies(video)),
  );
  dialog.onkeydown = (/** @type {KeyboardEvent} */ event) => {
    const isPlayer = event.target === player || /** @type {any} */ (event.target)?.matches?.("input, textarea, select");
    if (event.key === "ArrowLeft" && !isPlayer) go(-1);
    if (event.key === "ArrowRight" && !isPlayer) go(1);
  };
  dialog.onclick = (/** @type {MouseEvent} */ event) => {
    if (event.target === dialog) dialog.close();
  };
  dialog.onclose = () => {
    player.pause();
    dialog.replaceChildren();
    if (location.hash.startsWith("#/video/")) history.replaceState(null, "", "#/");
  };
  if (!dialog.open) dialog.showModal();
}

/** @param {import("./videos.js").Video} video */
function makePlayer(video) {
  const isSmall = Number(video.size.split("x")[0]) <= 200;
  const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
  return make("video", {
    src: contentAddress(video.id),
    poster: contentAddress(video.id, "thumbnail"),
    controls: true,
    loop: true,
    muted: true,
    playsInline: true,
    autoplay: !isStill,
    className: isSmall ? "is-small" : "",
    "aria-label": video.prompt || "Video",
  });
}

/**
 * The way through the videos of one job, each of its own seed.
 * @param {import("./videos.js").Video} video
 * @param {HTMLVideoElement} player
 * @param {HTMLAnchorElement} save
 */
function numbers(video, player, save) {
  const count = video.num_videos ?? 1;
  if (count === 1) return null;
  const choose = (/** @type {number} */ index) => {
    player.poster = contentAddress(video.id, "thumbnail", index);
    player.src = save.href = contentAddress(video.id, "video", index);
    save.download = fileName({ ...video, seed: video.seed + index - 1 });
  };
  const options = Array.from({ length: count }, (_, index) => make("option", { value: index + 1 }, `Video ${index + 1} of ${count}, seed ${video.seed + index}`));
  return make("select", { "aria-label": "Which of its videos", on: { change: (/** @type {any} */ event) => choose(Number(event.target.value)) } }, ...options);
}

/** @param {import("./videos.js").Video} video */
function facts(video) {
  const stages = Object.entries(/** @type {any} */ (video).stage_durations ?? {});
  const checks = Object.entries(/** @type {any} */ (video).checks ?? {});
  const memory = video.peak_memory_mb ? bytes(video.peak_memory_mb * 1e6) : "";
  /** @type {[string, string | number | null | undefined][]} */
  const rows = [
    ["Model", video.model],
    ["Size", size(video.size)],
    ["Length", [length(video.seconds), video.num_frames && `${video.num_frames} frames at ${video.fps} fps`].filter(Boolean).join(", ")],
    ["Steps", video.num_inference_steps],
    ["Quality", quality(video.quality)],
    ["Seed", video.seed],
    ["Made", time(video.completed_at)],
    ["Took", (video.inference_time_s ?? 0) < 10 ? length(video.inference_time_s) : duration(video.inference_time_s)],
    ["Stages", stages.map(([name, seconds]) => `${words(name).toLowerCase()} ${length(Number(seconds))}`).join(", ")],
    ["Memory", memory],
    ["Checks", checks.map(([name, result]) => `${words(name).toLowerCase()}: ${typeof result === "object" ? JSON.stringify(result) : result}`).join(", ")],
  ];
  const shown = rows.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return make("dl", { className: "facts" }, ...shown.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
}

/** @param {import("./videos.js").Video} video */
function notes(video) {
  const all = notesOf(video);
  return all.length ? make("ul", { className: "job-notes" }, ...all.map((note) => make("li", {}, note))) : null;
}

/** @param {import("./videos.js").Video} video */
function copies(video) {
  const copy = async (/** @type {string} */ kind) => {
    await navigator.clipboard.writeText(snippet(kind, video));
    show(`${kind} copied`);
  };
  const buttons = SNIPPETS.map((kind) => button(kind, "copy", () => attempt(() => copy(kind)), { kind: "quiet" }));
  return make("div", { className: "copies", role: "group", "aria-label": "Copy as" }, make("span", { className: "soft" }, "Copy as"), ...buttons);
}

/**
 * A second press deletes: no question in a window of its own.
 * @param {Event} event
 * @param {HTMLDialogElement} dialog
 * @param {import("./videos.js").Video} video
 * @param {DetailActions} actions
 */
function confirmDelete(event, dialog, video, actions) {
  const pressed = /** @type {any} */ (event.currentTarget);
  if (pressed.dataset.isSure) {
    dialog.close();
    return actions.remove(video.id);
  }
  pressed.dataset.isSure = "yes";
  pressed.replaceChildren(icon("bin"), "Delete for good?");
  pressed.addEventListener("blur", () => {
    delete pressed.dataset.isSure;
    pressed.replaceChildren(icon("bin"), "Delete");
  }, { once: true });
  return undefined;
}

/**
 * Take the last frame as the first picture of the next video.
 * @param {HTMLVideoElement} player
 * @param {import("./videos.js").Video} video
 * @param {DetailActions} actions
 */
async function startFromLastFrame(player, video, actions) {
  const picture = await lastFrame(await (await fetch(player.currentSrc || player.src)).blob(), video.fps);
  const isTaken = actions.start(new File([picture], `last frame of ${video.seed}.png`, { type: "image/png" }));
  if (!isTaken) throw new Error(`The model that is chosen takes no picture.`);
  player.closest("dialog")?.close();
}

/**
 * The last frame of a video, as PNG.
 * @param {Blob} blob
 * @param {number} fps
 * @returns {Promise<Blob>}
 */
async function lastFrame(blob, fps) {
  const address = URL.createObjectURL(blob);
  const player = make("video", { muted: true, src: address, preload: "auto" });
  try {
    await happens(player, "loadeddata");
    player.currentTime = Math.max(0, player.duration - 0.5 / fps);
    await happens(player, "seeked");
    const canvas = make("canvas", { width: player.videoWidth, height: player.videoHeight });
    canvas.getContext("2d").drawImage(player, 0, 0);
    return await new Promise((resolve, reject) => {
      canvas.toBlob((/** @type {Blob | null} */ made) => (made ? resolve(made) : reject(new Error("The frame can't be read."))), "image/png");
    });
  } finally {
    URL.revokeObjectURL(address);
  }
}

/**
 * @param {HTMLVideoElement} player
 * @param {string} type
 */
function happens(player, type) {
  return new Promise((resolve, reject) => {
    player.addEventListener(type, resolve, { once: true });
    player.addEventListener("error", () => reject(new Error("This browser can't play the video.")), { once: true });
  });
}

/** @param {import("./videos.js").Video} video */
function fileName(video) {
  const slug = (video.prompt ?? "video").toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60);
  return `${slug || "video"}-${video.seed}.mp4`;
}
