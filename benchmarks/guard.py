"""What share of a run's time does the guard take?

    python benchmarks/guard.py             # a minute or two
    python benchmarks/guard.py --no-page   # print only

The embedded model makes a video: text, denoising, decoding. In one run, in one process, the time
inside of the guard's own reductions and of the last gate is summed where they are called, and
divided by the time of the run from its first stage on; so a busy machine slows both. The model is
a small one, at whose size a step takes a tenth of a second: at the sizes of real models a step
takes far longer, and the guard's share is smaller. Time is this thread's own processor time, and
the device a CPU; on a card the reductions are waited for as well, which is not measured here. Bar:
under 1 %.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from versions import versions_of

import everyframe
from everyframe.core.events import Ready, Repaired
from everyframe.core.request import Request
from everyframe.engine import run as engine
from everyframe.families import guarding
from everyframe.hardware import machine_facts
from everyframe.runs.keeper import Keep

RESULTS = Path(__file__).parent / "results"
BAR = 0.01

PROMPT = "a red circle moves to the right on a blue background"


class Clock:
    """Processor time of this thread inside of the functions that it wraps, and their calls."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began
                self.calls += 1

        return timed


def one_run(request: Request) -> tuple[float, float, int]:
    """(seconds of the guard, seconds of the run, looks that the guard took)."""
    clock = Clock()
    watched = {
        (owner, name): getattr(owner, name)
        for owner, name in (
            (guarding, "range_of"), (guarding, "blank_frames"), (engine, "_check_finite")
        )
    }  # fmt: skip
    for (owner, name), function in watched.items():
        setattr(owner, name, clock.around(function))
    try:
        began = 0.0
        for event in engine.stream(request, keep=Keep(None)):
            if isinstance(event, Ready):
                began = time.thread_time()
            if isinstance(event, Repaired):
                raise RuntimeError(f"this run was to need no repair: {event.text}")
        return clock.seconds, time.thread_time() - began, clock.calls
    finally:
        for (owner, name), function in watched.items():
            setattr(owner, name, function)


def page(request: Request, runs: list[tuple[float, float, int]]) -> str:
    """The result as Markdown."""
    shares = [guard / whole for guard, whole, _ in runs]
    share = statistics.median(shares)
    facts = machine_facts("cpu")
    versions = versions_of(facts)
    plan = everyframe.plan(request)
    settings = plan.settings
    command = shlex.join(["python", "benchmarks/guard.py", *sys.argv[1:]])
    rows = "\n".join(
        f"| {number} | {whole:.2f} s | {1000 * guard:.2f} ms | {looks} | {guard / whole:.3%} |"
        for number, (guard, whole, looks) in enumerate(runs, start=1)
    )
    return f"""# The guard's share of a run's time, {date.today().isoformat()}

**{share:.3%}** of the run ({"under" if share < BAR else "over"} the bar of {BAR:.0%}).

{plan.title}, {settings.width}x{settings.height}, {settings.num_frames} frames,
{settings.num_inference_steps} steps; loading is counted in, planning is not.

| run | whole | guard | looks | share |
| --- | --- | --- | --- | --- |
{rows}

The seconds are processor time of the thread that runs; the guard's are those inside of its own
reductions: a look each for embeddings, every prediction, every state of the sampler and every lot
of frames, and the last gate. What is not in them: building the guard, once a stage. This is a small
model, at whose size a step takes little; the reductions pass once over what comes out of a model,
and larger models compute more for it.

Hardware: {facts.cpu.name}, 1 of {facts.num_cores} cores; load at the end {os.getloadavg()[0]:.1f}.
Versions: {versions}.

Command: `{command}`
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10, help="of the sampler, default 10")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--no-page", action="store_true", help="print only")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["EVERYFRAME_CACHE"] = cache
        request = Request(
            prompt=PROMPT, device="cpu", dtype="fp32", seed=1, num_inference_steps=asked.steps
        )
        one_run(request)  # which warms up as well
        text = page(request, [one_run(request) for _ in range(asked.rounds)])
    print(text)
    if not asked.no_page:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"guard-{date.today().isoformat()}.md").write_text(text)


if __name__ == "__main__":
    main()
