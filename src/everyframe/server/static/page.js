/** The page: its parts are made here and told of each other. Read next: videos.js, composer.js. */

import { askForKeys } from "./access.js";
import { call } from "./api.js";
import { Composer } from "./composer.js";
import { openDetails } from "./details.js";
import { byId, setText } from "./dom.js";
import { takeDrops } from "./drop.js";
import { drawGallery } from "./gallery.js";
import { drawMachine } from "./machine.js";
import { announce, attempt } from "./messages.js";
import { drawQueue } from "./queue.js";
import { settingsOf } from "./record.js";
import { requestOf } from "./snippets.js";
import { useTheme } from "./theme.js";
import { isActive, Videos } from "./videos.js";

/** Events come at most this often into the page, in milliseconds. */
const DRAW_EVERY = 60;

const CONNECTIONS = {
  connecting: "Connecting…",
  open: "",
  lost: "The server is away; trying again. No job is lost.",
  draining: "The server is stopping; jobs go on when it is back.",
};

const videos = new Videos();
const composer = new Composer(byId("composer"), (video) => videos.get(video.id) ?? videos.put(video));

const actions = {
  cancel: (/** @type {string} */ id) => attempt(() => act("POST", id, "/cancel")),
  retry: (/** @type {string} */ id) => attempt(() => act("POST", id, "/retry")),
  remove: (/** @type {string} */ id) => attempt(async () => {
    await call("DELETE", `videos/${encodeURIComponent(id)}`);
    videos.remove(id);
    announce("Video deleted");
  }),
  reuse: (/** @type {string} */ id) => attempt(() => reuse(id)),
  again: (/** @type {string} */ id) => attempt(() => reuse(id, { seed: undefined })),
  start: (/** @type {File} */ file) => {
    const isTaken = composer.take(file);
    if (isTaken) showForm();
    return isTaken;
  },
};

/**
 * @param {string} method
 * @param {string} id
 * @param {string} action
 */
async function act(method, id, action) {
  await videos.update(id, () => call(method, `videos/${encodeURIComponent(id)}${action}`));
}

/**
 * Fill the form with the settings of a video: of its record, or of its request before it is done.
 * @param {string} id
 * @param {Record<string, any>} [changes]
 */
async function reuse(id, changes = {}) {
  const video = /** @type {import("./videos.js").Video} */ (videos.get(id));
  const isDone = video.status === "completed";
  const record = isDone ? await call("GET", `videos/${encodeURIComponent(id)}/content?variant=metadata`) : { request: requestOf(video) };
  const { values, notes } = settingsOf(record);
  await composer.fill({ model: video.model, ...values, ...changes }, notes);
  showForm();
}

function showForm() {
  location.hash = "#/";
  composer.prompt.focus();
}

let isDrawing = false;
function draw() {
  if (isDrawing) return;
  isDrawing = true;
  setTimeout(() => {
    isDrawing = false;
    drawQueue(videos, actions);
    drawGallery(videos);
    const running = videos.list.find((video) => video.status === "in_progress");
    document.title = running ? `${running.progress} % · Everyframe` : "Everyframe";
    if (!byId("details").open) route();
  }, DRAW_EVERY);
}

let lookedFor = "";
/** Show what the address names: the studio, the machine, or a video. */
function route() {
  const { hash } = location;
  const isMachine = hash === "#/machine";
  const wasMachine = !byId("machine").hidden;
  byId("studio").hidden = isMachine;
  byId("machine").hidden = !isMachine;
  for (const link of document.querySelectorAll("[data-view]")) {
    const isHere = (link.getAttribute("data-view") === "machine") === isMachine;
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (isMachine && !wasMachine) drawMachine();
  const id = hash.startsWith("#/video/") ? hash.slice("#/video/".length) : ""; // letters and digits
  const video = videos.get(id);
  if (id && !video && videos.isLoaded && id !== lookedFor) {
    lookedFor = id; // older than those that are listed, or deleted
    videos.refresh(id);
  }
  const dialog = byId("details");
  if (video?.status === "completed") {
    openDetails(video, videos.list.filter((each) => each.status === "completed"), actions);
  } else if (dialog.open) {
    dialog.close();
  }
}

videos.addEventListener("change", (event) => {
  draw();
  const { video, before } = /** @type {CustomEvent} */ (event).detail;
  if (!video || !before || before.status === video.status) return;
  const name = video.prompt || "a video";
  if (video.status === "in_progress") announce(`Started: ${name}`);
  else if (video.status === "completed") announce(`Ready: ${name}`);
  else if (video.status === "failed") announce(`Failed: ${name}. ${video.error?.message ?? ""}`);
  else if (!isActive(video)) announce(`Cancelled: ${name}`);
});
videos.addEventListener("remove", draw);
videos.addEventListener("connection", () => {
  const line = byId("connection");
  setText(line, CONNECTIONS[videos.connection]);
  line.className = `connection is-${videos.connection}`;
  if (videos.connection === "lost") announce(CONNECTIONS.lost);
  else if (videos.connection === "open" && !composer.isLoaded) attempt(() => composer.load());
});
byId("filter").addEventListener("input", draw);
byId("more").addEventListener("click", () => attempt(() => videos.loadMore()));
addEventListener("hashchange", route);

useTheme();
askForKeys();
takeDrops(composer, showForm);
route();
videos.start();
