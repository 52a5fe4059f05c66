/** Finished videos as cards that play under the pointer or the focus. */

import { contentAddress } from "./api.js";
import { byId, icon, make, reconcile, setText } from "./dom.js";
import { length, size } from "./format.js";

const isStill = matchMedia("(prefers-reduced-motion: reduce)");
const isTouched = matchMedia("(hover: none)");

/** On a screen without pointer a card plays while it is in the middle of the view. */
const middle = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      const card = /** @type {any} */ (target);
      if (isIntersecting && isTouched.matches) card.play();
      else card.rest();
    }
  },
  { rootMargin: "-25% 0px -25% 0px", threshold: 0.6 },
);

/**
 * Draw the completed videos that the filter leaves.
 * @param {import("./videos.js").Videos} videos
 */
export function drawGallery(videos) {
  const wanted = byId("filter").value.trim().toLowerCase();
  const done = videos.list.filter((video) => video.status === "completed");
  const shown = done.filter((video) => `${video.prompt ?? ""} ${video.model}`.toLowerCase().includes(wanted));
  reconcile(byId("cards"), shown, (video) => video.id, makeCard);
  const empty = byId("empty");
  empty.hidden = Boolean(shown.length) || !videos.isLoaded;
  setText(empty, done.length ? "No video has these words." : "No videos yet. Describe one, or drop a picture or a video of yours anywhere on this page.");
  byId("more").hidden = !videos.hasMore;
}

/** @param {import("./videos.js").Video} video */
function makeCard(video) {
  const [width, height] = video.size.split("x").map(Number);
  const still = make("img", { src: contentAddress(video.id, "thumbnail"), alt: "", loading: "lazy", decoding: "async", width, height });
  const screen = make("span", { className: width <= 200 ? "screen is-small" : "screen", vars: { "--aspect": width / height } }, still, make("span", { className: "play" }, icon("play")));
  const prompt = make("span", { className: "card-prompt" }, video.prompt || "Without prompt");
  const facts = make("span", { className: "card-facts" }, [size(video.size), length(video.seconds), `seed ${video.seed}`].filter(Boolean).join(" · "));
  const link = make("a", { href: `#/video/${encodeURIComponent(video.id)}`, className: "card" }, screen, prompt, facts);
  const card = make("li", {}, link);

  card.play = () => {
    if (isStill.matches || screen.querySelector("video")) return;
    const player = make("video", { src: contentAddress(video.id), muted: true, loop: true, playsInline: true, tabIndex: -1, "aria-hidden": "true" });
    screen.append(player);
    player.addEventListener("playing", () => screen.classList.add("is-playing"));
    player.play().catch((/** @type {Error} */ error) => {
      if (error.name !== "AbortError") card.rest(); // AbortError: the pointer left first
    });
  };
  card.rest = () => {
    screen.classList.remove("is-playing");
    screen.querySelector("video")?.remove();
  };
  for (const [type, listen] of Object.entries({ pointerenter: card.play, pointerleave: card.rest, focus: card.play, blur: card.rest })) {
    link.addEventListener(type, listen);
  }
  middle.observe(card);
  return card;
}
