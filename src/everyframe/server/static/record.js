/**
 * Our record in a file: an MP4's comment, or the sidecar. `everyframe/media/record.py` writes it.
 * Only the headers of a video are read, never its frames.
 */

/** As `MOST_RECORD_BYTES` of `everyframe/media/limits.py`. */
const MOST_BYTES = 16 * 2 ** 20;

/** Options that hold a picture or a video; a mask and a control may be words too. */
export const FILES = ["image", "last_image", "extend", "source", "mask", "control"];

/** The way to the comment: FFmpeg and Apple nest it so. */
const PATH = ["moov", "udta", "meta", "ilst", "\u00a9cmt", "data"];
/** Bytes between a box's header and what it holds: version and flags; a data box's type, locale. */
const SKIP = { meta: 4, data: 8 };

/**
 * Read the record of a video of ours or of its sidecar; null for any other file.
 * @param {Blob & {name?: string}} file
 * @returns {Promise<Record<string, any> | null>}
 */
export async function readRecord(file) {
  if (file.type === "application/json" || file.name?.toLowerCase().endsWith(".json")) {
    return file.size > MOST_BYTES ? null : parseRecord(await file.text());
  }
  const comment = await findBox(file, 0, file.size, PATH);
  return comment ? parseRecord(await comment.text()) : null;
}

/**
 * @param {string} text
 * @returns {Record<string, any> | null}
 */
function parseRecord(text) {
  try {
    const record = JSON.parse(text);
    return String(record?.schema ?? "").startsWith("everyframe.") ? record : null;
  } catch {
    return null; // a comment of another program
  }
}

/**
 * What the box at the end of `path` holds, between `start` and `end` of the file.
 * @param {Blob} file
 * @param {number} start
 * @param {number} end
 * @param {string[]} path
 * @returns {Promise<Blob | null>}
 */
async function findBox(file, start, end, path) {
  for (let at = start; at + 8 <= end; ) {
    const header = new DataView(await file.slice(at, at + 16).arrayBuffer());
    const { size, skip } = sizeOf(header, end - at);
    if (size < skip || at + size > end) return null; // no MP4, or cut off
    const type = String.fromCharCode(...new Uint8Array(header.buffer, 4, 4));
    if (type === path[0]) {
      const inner = at + skip + (/** @type {Record<string, number>} */ (SKIP)[type] ?? 0);
      if (path.length > 1) return findBox(file, inner, at + size, path.slice(1));
      return at + size - inner > MOST_BYTES ? null : file.slice(inner, at + size);
    }
    at += size;
  }
  return null;
}

/**
 * Size of a box and of its header: 0 means to the end, 1 that 64 bits follow.
 * @param {DataView} header
 * @param {number} rest
 */
function sizeOf(header, rest) {
  const size = header.getUint32(0);
  if (size === 0) return { size: rest, skip: 8 };
  if (size !== 1) return { size, skip: 8 };
  return header.byteLength < 16 ? { size: 0, skip: 16 } : { size: Number(header.getBigUint64(8)), skip: 16 };
}

/**
 * Settings for the form of what a record asked for; its seed always, so that the same video comes.
 * @param {Record<string, any>} record
 * @returns {{values: Record<string, any>, notes: string[]}}
 */
export function settingsOf(record) {
  const { prompt, ...asked } = record.request ?? {};
  const values = { prompt: prompt ?? record.settings?.prompt, model: record.model?.name, ...asked };
  values.seed ??= record.settings?.seed;
  const notes = [];
  for (const name of [...FILES, "latents"]) {
    if (typeof values[name] === "string") continue; // a word, which no picture is needed for
    if (values[name]?.file) notes.push(`it began with ${values[name].file}: add it again`);
    else if (values[name]) notes.push(`its ${name.replace("_", " ")} has no name: add it again`);
    delete values[name];
  }
  if (Array.isArray(values.loras)) values.loras = values.loras.map(loraText);
  return { values, notes };
}

/** @param {any} lora */
function loraText(lora) {
  if (typeof lora === "string") return lora;
  const name = lora.file?.file ?? lora.file ?? lora.name;
  const strength = lora.strength ?? 1;
  return `${name}${strength === 1 ? "" : `:${strength}`}${lora.component ? `@${lora.component}` : ""}`;
}
