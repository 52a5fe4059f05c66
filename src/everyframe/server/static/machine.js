/** The machine: what doctor finds on it, with the fixes, and what is loaded. */

import { call } from "./api.js";
import { button, byId, make } from "./dom.js";
import { bytes, duration, words } from "./format.js";
import { attempt, show } from "./messages.js";

const MARKS = { fine: "Fine", note: "Note", error: "Trouble", broke: "Could not be checked" };

/** Draw the page; doctor's checks take a while, and what is known appears first. */
export async function drawMachine() {
  const box = byId("machine");
  const system = make("div", { className: "system" });
  const report = make("div", { className: "report", "aria-live": "polite" }, make("p", { className: "soft is-waiting" }, "Checking this machine…"));
  const again = button("Check again", "retry", () => drawMachine());
  box.replaceChildren(make("div", { className: "heading" }, make("h1", {}, "Machine"), again), system, report);
  await Promise.all([
    attempt(async () => system.replaceChildren(...systemOf(await call("GET", "system")))),
    attempt(async () => report.replaceChildren(...reportOf(await call("GET", "doctor")))),
  ]);
  report.querySelector(".is-waiting")?.remove();
}

/** @param {any} system */
function systemOf(system) {
  const warm = (system.warm ?? []).map((/** @type {any} */ each) => `${each.model} (${bytes(each.num_bytes)}${each.is_busy ? ", busy" : ""})`);
  /** @type {[string, string][]} */
  const rows = [
    ["Everyframe", system.version],
    ...system.devices.map((/** @type {any} */ device) => [device.device, `${device.name}, ${bytes(device.free_bytes)} of ${bytes(device.memory_bytes)} free`]),
    ["Loaded now", warm.join(", ") || "nothing"],
    ["Disk", `${bytes(system.disk.free_bytes)} free`],
    ["Up for", duration(system.uptime_s)],
  ];
  return [make("dl", { className: "facts" }, ...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]))];
}

/** @param {any} report doctor's report, docs/reference/doctor.schema.json */
function reportOf(report) {
  const order = ["error", "broke", "note", "fine"];
  const checks = [...report.checks].sort((a, b) => order.indexOf(a.mark) - order.indexOf(b.mark));
  const bad = checks.filter((check) => check.mark !== "fine");
  const fine = checks.filter((check) => check.mark === "fine");
  return [
    make("p", { className: `verdict is-${report.verdict}` }, report.message),
    ...bad.map(checkOf),
    make("details", { className: "fine-checks", open: !bad.length }, make("summary", {}, `${fine.length} checks are fine`), ...fine.map(checkOf)),
  ];
}

/** @param {any} check */
function checkOf(check) {
  const mark = /** @type {Record<string, string>} */ (MARKS)[check.mark] ?? check.mark;
  return make("section", { className: `check is-${check.mark}` },
    make("h2", {}, words(check.name), make("span", { className: "mark" }, mark)),
    make("p", {}, check.message),
    ...check.findings.map(findingOf));
}

/** @param {any} finding */
function findingOf(finding) {
  return make("div", { className: "finding" },
    make("p", {}, make("strong", {}, finding.message)),
    finding.cause && make("p", { className: "soft" }, finding.cause),
    ...finding.fix.map((/** @type {any} */ fix) => make("div", { className: "fix" }, make("span", {}, words(fix.do)), fix.command && commandOf(fix.command))));
}

/** @param {string} command */
function commandOf(command) {
  const copy = async () => {
    await navigator.clipboard.writeText(command);
    show("Command copied");
  };
  return make("span", { className: "command" }, make("code", {}, command), button("Copy the command", "copy", () => attempt(copy), { isBare: true }));
}
