/** Files dropped or pasted anywhere: a video of ours refills the form, a picture starts a video. */

import { byId, setText } from "./dom.js";
import { attempt, show } from "./messages.js";
import { readRecord, settingsOf } from "./record.js";

/**
 * @param {import("./composer.js").Composer} composer
 * @param {() => void} showForm
 */
export function takeDrops(composer, showForm) {
  const veil = byId("drop");
  let depth = 0;
  const hasFiles = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files");
  const hide = () => {
    depth = 0;
    veil.hidden = true;
  };
  addEventListener("dragenter", (event) => {
    if (!hasFiles(event)) return;
    depth += 1;
    setText(veil.firstElementChild, "Drop a picture to start from it, or a video of Everyframe to reuse its settings");
    veil.hidden = false;
  });
  addEventListener("dragleave", (event) => {
    if (hasFiles(event) && (depth -= 1) <= 0) hide();
  });
  addEventListener("dragover", (event) => {
    if (hasFiles(event)) event.preventDefault();
  });
  addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    hide();
    const file = event.dataTransfer?.files[0];
    if (file) attempt(() => take(file, event.target));
  });
  addEventListener("paste", (event) => {
    const file = event.clipboardData?.files[0];
    const isText = event.clipboardData?.types.includes("text/plain"); // tables bring a picture too
    if (file && !isText) attempt(() => take(file, null));
  });

  /**
   * @param {File} file
   * @param {EventTarget | null} target
   */
  async function take(file, target) {
    const isInSlot = target instanceof Element && target.closest(".slot");
    const record = isInSlot ? null : await readRecord(file);
    showForm();
    if (record) {
      const { values, notes } = settingsOf(record);
      await composer.fill(values, notes);
      return show(`The form has the settings of ${file.name}.`);
    }
    const isMedia = /^(image|video)\//.test(file.type);
    if (!isMedia) throw new Error(`${file.name} is neither a picture nor a video, and holds no record of Everyframe.`);
    if (!composer.take(file, target)) {
      const kind = file.type.startsWith("video/") ? "video that it could continue" : "picture";
      throw new Error(`${file.name} holds no record of Everyframe, and the chosen model takes no ${kind}.`);
    }
    return undefined;
  }
}
