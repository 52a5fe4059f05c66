"""How soon does a request begin its first step, in a new process and in a warm engine?

    python benchmarks/warm_engine.py                   # three minutes, the embedded model
    python benchmarks/warm_engine.py --model FOLDER    # another model

Each way makes the same video, whose bits are compared: `generate(isolate=True)`, which starts a
process for each request; `generate` in one process; and the engine of `everyframe.load`, in this
process and in a worker that stays. A request begins with the call; its first step is over with the
first `Step` event of the denoiser, so a step is counted in. The processor time is that of this
process and its children in the same span. Ways take turns; what counts is the median, and the least
where other programs keep the machine busy. Needs /proc, so Linux.

Bar: a second request of the same plan is over with its first step within 0.3 s, in both engines.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from result_pages import compose_page, make_parser, publish, versions_of

import everyframe
from everyframe.core.events import Event, Step
from everyframe.hardware.facts import machine_facts

BAR = 0.3
TICK = os.sysconf("SC_CLK_TCK")


def core_seconds() -> float:
    """Processor time of this process and its living children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    total = time.process_time()
    for child in children:
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICK
    return total


@dataclass
class Way:
    """A way to make the video, and what its requests took: first step, whole, processor."""

    name: str
    generate: Callable[..., Any]
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)

    def make(self, request: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        """Make the video once and note the times; returns its frames."""
        steps: list[tuple[float, float]] = []

        def note(event: Event) -> None:
            if isinstance(event, Step) and event.stage != "text" and not steps:
                steps.append((time.perf_counter(), core_seconds()))

        begun, worked = time.perf_counter(), core_seconds()
        video = self.generate(**request, run_dir="off", on_event=note)
        self.whole.append(time.perf_counter() - begun)
        self.first.append(steps[0][0] - begun)
        self.cores.append(steps[0][1] - worked)
        frames: np.ndarray[Any, Any] = video.frames
        return frames


def measure(model: str | None, rounds: int) -> list[Way]:
    """All ways by turns, so many times after a first time."""
    own: dict[str, Any] = {} if model is None else {"model": model}
    request = {"prompt": "a red circle on a blue background", "seed": 7, "num_inference_steps": 4}
    with everyframe.load(model) as here, everyframe.load(model, isolate=True) as apart:
        ways = [
            Way("`generate(isolate=True)`, a process each", lambda **given: everyframe.generate(
                isolate=True, **own, **given)),
            Way("`generate` in one process", lambda **given: everyframe.generate(**own, **given)),
            Way("`load(...)`", here.generate),
            Way("`load(..., isolate=True)`", apart.generate),
        ]  # fmt: skip
        expected = ways[1].make(request)
        for way in ways[2:]:
            way.make(request)
        for way in ways[1:]:
            way.first, way.whole, way.cores = [], [], []
        for number in range(rounds):
            for way in ways[1:] if number >= 3 else ways:
                assert np.array_equal(way.make(request), expected), way.name
    return ways


def page(ways: list[Way], model: str | None, rounds: int) -> str:
    """The result as Markdown."""
    facts = machine_facts("cpu")
    rows = [
        f"| {way.name} | {statistics.median(way.first):.2f} s | {min(way.first):.2f} s | "
        f"{statistics.median(way.cores):.2f} s | {statistics.median(way.whole):.2f} s |"
        for way in ways
    ]
    lines = [
        f"From the call to the end of the denoiser's first step, `{model or 'shapes'}`, a request",
        "of a plan that ran before; all videos have the same bits. The machine is shared: the",
        "processor time says what a request costs.",
        "",
        "| way | first step, median | least | processor time, median | whole video, median |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
        f"On {facts.cpu.name}, {facts.num_cores} cores, load {os.getloadavg()[0]:.0f} at the end;",
        f"{rounds} rounds (3 of the first way); {versions_of(facts)}.",
        f"Bar: {BAR} s for the two engines.",
    ]
    return compose_page("How soon a request begins", "\n".join(lines))


def main() -> None:
    """Measure, print and write the page."""
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--model")
    args = parser.parse_args()
    warnings.simplefilter("ignore", everyframe.EveryframeWarning)
    text = page(measure(args.model, args.rounds), args.model, args.rounds)
    publish("warm-engine", text, is_page=args.is_page)


if __name__ == "__main__":
    main()
