"""Pages about machines: results of `everyframe bench`, and the choices of plans by GPU vendor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from api_pages import NOTE

from everyframe.api import plan
from everyframe.core.bytes import format_bytes
from everyframe.core.plan import Plan
from everyframe.doctor.benchmark.result import BenchResult, read_result
from everyframe.doctor.reference_tables import table
from everyframe.hardware.known_issues import known_issues
from everyframe.hardware.profiles import profile_names

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "machines"
CARDS = Path(__file__).parent / "reference" / "cards"

#: Make -> its title, the vendor in known issues, and its profiles.
MAKES = {
    "cpu": ("Processors", "cpu", ("cpu-fp32", "cpu-bf16")),
    "nvidia": ("NVIDIA cards", "nvidia", ("cuda-sm70", "cuda-sm75", "cuda-sm80", "cuda-sm86",
               "cuda-sm89", "cuda-sm90", "cuda-sm100", "cuda-sm120")),
    "amd": ("AMD cards", "amd", ("rocm",)),
    "apple": ("Apple chips", "apple", ("mps",)),
}  # fmt: skip

#: Make -> what was run there and what was not, with the date.
_RUN = {
    "cpu": "Measured: all tests, on AMD EPYC with AVX-512 and Intel Xeon with AMX (2026-11-23).",
    "nvidia": "Measured: an H100 (2026-11-22 and 23). All other cards here were only run dry.",
    "amd": "Nothing was run on a card of AMD: everything below was only run dry.",
    "apple": "Nothing was run on a chip of Apple: everything below was only run dry.",
}

#: The request that every plan here is for.
REQUEST: dict[str, Any] = {
    "model": "opensora-1.2", "resolution": "480p", "aspect": "16:9", "num_frames": 51, "seed": 7,
}  # fmt: skip


def machines_page() -> str:
    """Results by machine, a section each."""
    lines = ["# Results by machine", "", NOTE, "",
             "Each section is a file of [`everyframe bench -o FILE.json`](../how-to/bench.md) in",
             "`benchmarks/results/machines`; a pull request with yours adds a section. Rates are",
             "the best of some rounds, times medians. A load above 0.5 means that other programs",
             "ran too: such times are too long; ratios within a section still hold."]  # fmt: skip
    for path in sorted(RESULTS.glob("*.json")):
        lines += ["", *_machine(read_result(path), path.name)]
    return "\n".join(lines) + "\n"


def _machine(result: BenchResult, file: str) -> Iterator[str]:
    machine = result.machine
    yield f"## {machine.device}, {format_bytes(machine.memory)} ({result.date})"
    yield ""
    versions = ", ".join(f"{name} {text}" for name, text in machine.versions.items())
    yield f"{machine.processor} with {machine.instructions}, threads: {machine.num_threads} of " \
          f"{machine.num_cores} cores; {versions}; Everyframe {result.everyframe}; load " \
          f"{result.load:g} a core; `{file}`."  # fmt: skip
    yield from ("", "| peak | rate |", "|---|---|")
    for peak in result.peaks:
        unit = "GFLOP/s" if peak.kind == "product" else "GB/s"
        what = f"product in {peak.name}" if peak.kind == "product" else peak.name
        yield f"| {what} | {peak.rate / 1e9:.3g} {unit} |"
    if result.fast_paths:
        yield from ("", "| fast path | verdict | gain | reason |", "|---|---|---|---|")
        for path in result.fast_paths:
            gain = "" if path.gain is None else f"{path.gain:.2f}"
            yield f"| `{path.name}` | {path.verdict} | {gain} | {path.reason} |"
    yield from ("", "| step of the synthetic blocks | seconds | plain torch | forecast | memory "
                "| forecast |", "|---|---|---|---|---|---|")  # fmt: skip
    for each in result.blocks:
        seconds = "" if each.forecast_seconds is None else f"{each.forecast_seconds:.3g}"
        memory = "" if each.peak_bytes is None else format_bytes(each.peak_bytes)
        forecast = format_bytes(each.forecast_bytes)
        yield f"| {each.work}, {each.precision} | {each.seconds:.3g} | " \
              f"{each.plain_seconds:.3g} | {seconds} | {memory} | {forecast} |"  # fmt: skip
    if result.video is not None:
        video = result.video
        yield from ("", f"{video.work}, {video.precision}: {video.steps_per_second:.3g} steps a "
                    f"second, first frame after {video.first_frame_seconds:.2f} s, a video in "
                    f"{video.warm_seconds:.2f} s once warm.")  # fmt: skip
    for part, how in result.failed.items():
        yield from ("", f"Failed: {part}: {how}.")


def cards_index() -> str:
    """The list of makes."""
    lines = ["# What the plan chooses by make of card", "", NOTE, "",
             "One request, planned for each profile of each make (`everyframe plan --as`):",
             f"`{json.dumps(REQUEST)}`.", ""]  # fmt: skip
    lines += [f"- [{title}]({make}.md): {_RUN[make]}" for make, (title, *_) in MAKES.items()]
    return "\n".join(lines) + "\n"


def card_page(make: str) -> str:
    """One make: its profiles, what the plan of a request chooses there, and why."""
    title, vendor, profiles = MAKES[make]
    lines = [f"# {title}", "", NOTE, "", _RUN[make], "",
             "What a plan chooses is concluded from the facts of a profile by the code that plans",
             "for a real machine. Dry runs find clashes of precision and count memory; they can't",
             "show that a driver computes correctly: `everyframe doctor` does, there."]  # fmt: skip
    for name in profiles:
        lines += ["", *_profile(name)]
    lines += ["", "## Known issues", "", *_issues(vendor)]
    return "\n".join(lines) + "\n"


def _profile(name: str) -> Iterator[str]:
    facts = _shipped()[name]
    made = plan("a ship in a storm", profile=name, **REQUEST)
    yield f"## {facts['name']} (`{name}`)"
    yield ""
    yield f"{format_bytes(facts['memory'])} of memory. Tested combinations: {_tested(facts)}."
    yield from ("", "| component | precision | float32 islands | paths to try there | fallbacks |",
                "|---|---|---|---|---|")  # fmt: skip
    for part in made.components:
        paths = ", ".join(f"`{each}`" for each in part.fast_paths or ()) or "none before a trial"
        islands = ", ".join(f"`{each}`" for each in part.precision.islands) or "none"
        fallbacks = _fallbacks(made, part)
        yield f"| {part.title} | {part.precision} | {islands} | {paths} | {fallbacks} |"
    yield ""
    seconds = "" if made.seconds is None else f" About {made.seconds:.0f} s by the maker's rates."
    if made.infeasible is not None:
        yield f"It can't be made there: {made.infeasible}"
    else:
        yield f"It fits: {format_bytes(made.peak_bytes)} at its peak.{seconds}"
    for note in made.notes:
        yield f"- {note}"
    yield ""
    yield f"Sources of the facts: {'; '.join(facts.get('sources', ())) or 'the maker'}."


def _fallbacks(made: Plan, part: Any) -> str:
    found = [words for words, is_on in (
        ("moved between the host and the device", part.model_offload),
        ("blocks moved one by one", part.block_offload),
        ("blocks read from files", part.from_disk),
        (f"weights in {part.precision.weight_dtype}", bool(part.precision.weight_dtype)),
    ) if is_on]  # fmt: skip
    return ", ".join(found) or "none"


def _tested(facts: dict[str, Any]) -> str:
    import re

    rows = [
        f"{row.evidence} ({row.by}, {row.date})"
        for row in table().rows
        if row.kind == facts["kind"] and row.device != ".*" and re.search(row.device, facts["name"])
    ]
    return "; ".join(rows) or "none"


def _issues(vendor: str) -> Iterator[str]:
    found = [issue for issue in known_issues() if issue.where.vendor == vendor]
    if not found:
        yield "None that names this make alone; [all of them](../known-issues.md)."
        return
    yield f"{len(found)} of [the known issues](../known-issues.md) name this make:"
    yield ""
    for issue in found:
        yield f"- {issue.title} (`{issue.id}`)"


@cache
def _shipped() -> dict[str, Any]:
    text = files("everyframe.hardware").joinpath("profiles.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    assert set(found) == set(profile_names()), "each profile is one of the file"
    assert set(found) == {name for _, _, names in MAKES.values() for name in names}
    return found
