/** Numbers and times for people. */

/**
 * "30 MB", "23.8 GB"; as the command line prints it, in powers of 1000.
 * @param {number | null | undefined} bytes
 */
export function bytes(bytes) {
  if (bytes === null || bytes === undefined) return "?";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = bytes;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = unit >= 3 && value < 100 ? 1 : 0;
  return `${value.toFixed(digits)} ${units[unit]}`;
}

/**
 * "under a second", "8 s", "3 min 20 s", "2 h 5 min".
 * @param {number | null | undefined} seconds
 */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "";
  if (seconds < 1) return "under a second";
  const whole = Math.round(seconds);
  if (whole < 100) return `${whole} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 10) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (minutes < 100) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/**
 * "1.4 s" of a video's length in decimal seconds.
 * @param {string | number | null | undefined} seconds
 */
export function length(seconds) {
  const value = Number(seconds);
  return seconds === null || seconds === undefined || Number.isNaN(value) ? "" : `${+value.toFixed(1)} s`;
}

/**
 * "64 × 64" of "64x64".
 * @param {string | null | undefined} size
 */
export function size(size) {
  return (size ?? "").replace("x", " × ");
}

/**
 * "taylor1@8, 35.5 dB at worst" of what a plan does for a quality; "" where none was asked for.
 * @param {{method: string, worst_db: number | null} | null | undefined} chosen
 */
export function quality(chosen) {
  if (!chosen) return "";
  return chosen.worst_db === null ? chosen.method : `${chosen.method}, ${chosen.worst_db.toFixed(1)} dB at worst`;
}

/**
 * Date and time of a Unix time in seconds, in the reader's language; today's without the date.
 * @param {number | null | undefined} at
 */
export function time(at) {
  if (!at) return "";
  const date = new Date(at * 1000);
  const isToday = date.toDateString() === new Date().toDateString();
  return date.toLocaleString(undefined, isToday ? { timeStyle: "short" } : { dateStyle: "medium", timeStyle: "short" });
}

/**
 * An option's name as a label: "num_inference_steps" becomes "Num inference steps".
 * @param {string} name
 */
export function words(name) {
  const text = name.replaceAll("_", " ").replaceAll("-", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** Names of the stages for people. */
const STAGES = {
  text: "Reading the prompt",
  encode: "Reading the picture",
  image: "Reading the picture",
  condition: "Reading the picture",
  denoise: "Denoising",
  decode: "Decoding frames",
};

/**
 * What a job does now, such as "Denoising, step 12 of 30".
 * @param {{phase?: string | null, step?: number | null, total_steps?: number | null}} job
 */
export function phase({ phase, step, total_steps: total }) {
  if (!phase) return "Starting";
  const name = /** @type {Record<string, string>} */ (STAGES)[phase] ?? words(phase);
  return step && total && total > 1 ? `${name}, step ${step} of ${total}` : name;
}
