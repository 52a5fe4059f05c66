"""What share of a run's time does the guard take?

    python benchmarks/guard.py                 # a minute or two
    python benchmarks/guard.py --device cuda   # on a card; half a minute

The embedded model makes a video: text, denoising, decoding. In one run, in one process, the time
inside of the guard's own reductions and of the last gate is summed where they are called, and
divided by the time of the run from its first stage on; so a busy machine slows both. The model is
a small one, at whose size a step takes a tenth of a second: at the sizes of real models a step
takes far longer, and the guard's share is smaller. On a CPU time is this thread's own processor
time. On a card it is the card's clock, between two marks in the order of its work around each
reduction: what they compute where the card is busy, what launching them takes where it waits. A
look also waits for the card, after which the next work is late; so runs without looks take turns
with the others there. Bar: under 1 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import clock, hardware
from result_pages import compose_page, make_parser, publish

import everyframe
from everyframe.core.events import Repaired, WeightsReady
from everyframe.core.facts import DeviceFacts
from everyframe.core.request import Request
from everyframe.engine import run as engine
from everyframe.hardware import machine_facts, pick_device
from everyframe.hardware.cpu import processor_flags
from everyframe.numerics import tensor_stats
from everyframe.numerics.tensor_stats import Range
from everyframe.runs.run_state import SaveOptions

BAR = 0.01
#: Instruction sets that a page names where the CPU has them.
SETS = {"avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile",
        "amx_bf16", "amx_int8", "asimd", "bf16", "sve"}  # fmt: skip

PROMPT = "a red circle moves to the right on a blue background"


class Clock:
    """Time inside of the functions that it wraps, in ms of a card or this thread's on a CPU."""

    def __init__(self, device: str) -> None:
        self.calls = 0
        self._seconds = 0.0
        self._device = device
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        on_card = self._device.startswith("cuda")

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if on_card:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                result = function(*args, **kwargs)
                end.record()
                self._marks.append((begin, end))
                return result
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds += time.thread_time() - began

        return timed

    def seconds(self) -> float:
        """All of it, once the device has finished."""
        clock(self._device)
        on_card = sum(float(begin.elapsed_time(end)) for begin, end in self._marks)
        return self._seconds + on_card / 1000


def looks_of() -> dict[tuple[Any, str], Callable[..., Any]]:
    """Each look by the module that calls it and its name, of all modules that were imported."""
    named = ("value_range", "blank_frames")
    owners = [
        module
        for place, module in sys.modules.items()
        if place.startswith(("everyframe.runtime.", "everyframe.families."))
        or place == engine.__name__
    ]
    found = {
        (owner, name): getattr(owner, name)
        for owner in owners
        for name in (*named, "_check_finite")
        if name == "_check_finite" or getattr(owner, name, None) is getattr(tensor_stats, name)
        if hasattr(owner, name)
    }
    assert {name for _, name in found} == {*named, "_check_finite"}, "a look is called otherwise"
    return found


def one_run(request: Request, looks: bool = True) -> tuple[float, float, int]:
    """(seconds of the guard, seconds of the run, looks that the guard took or would have)."""
    inside = Clock(request.device)
    watched = looks_of()
    for (owner, name), function in watched.items():
        seen = function if looks else partial(_nothing_wrong, name)
        setattr(owner, name, inside.around(seen))
    try:
        began = 0.0
        for event in engine.stream(request, keep=SaveOptions(None)):
            if isinstance(event, WeightsReady):
                began = clock(request.device)
            if isinstance(event, Repaired):
                raise RuntimeError(f"this run was to need no repair: {event.text}")
        whole = clock(request.device) - began
        return inside.seconds(), whole, inside.calls
    finally:
        for (owner, name), function in watched.items():
            setattr(owner, name, function)


def _nothing_wrong(name: str, *_: Any, **__: Any) -> Any:
    """What a look gives that finds nothing, without looking."""
    return {"value_range": Range(0.0, 1.0), "blank_frames": [], "_check_finite": None}[name]


def without_looks(device: DeviceFacts, runs: list[float], bare: list[float]) -> str:
    """What whole runs take without them, on a card."""
    if device.kind == "cpu":
        return ""
    ratio = statistics.median(a / b for a, b in zip(runs, bare, strict=True))
    return f"""
Whole runs without any look, by turns with these: {statistics.median(bare):.3f} s; with looks a run
takes {ratio:.4f} times as long (median over pairs: {
        ", ".join(f"{a / b:.3f}" for a, b in zip(runs, bare, strict=True))
    }).
"""


def page(
    request: Request,
    runs: list[tuple[float, float, int]],
    bare: list[float],
    device: DeviceFacts,
    note: str,
) -> str:
    """The result as Markdown."""
    shares = [guard / whole for guard, whole, _ in runs]
    share = statistics.median(shares)
    facts = machine_facts(device.kind)
    plan = everyframe.plan(request)
    settings = plan.settings
    rows = "\n".join(
        f"| {number} | {whole:.2f} s | {1000 * guard:.2f} ms | {looks} | {guard / whole:.3%} |"
        for number, (guard, whole, looks) in enumerate(runs, start=1)
    )
    text = f"""
**{share:.3%}** of the run ({"under" if share < BAR else "over"} the bar of {BAR:.0%}).

{plan.title}, {settings.width}x{settings.height}, {settings.num_frames} frames,
{settings.num_inference_steps} steps; loading is counted in, planning is not.

| run | whole | guard | looks | share |
| --- | --- | --- | --- | --- |
{rows}

The seconds are {_clock_of(device)}; the guard's are those
inside of its own reductions: a look each for embeddings, every prediction, every state of the
sampler and every lot of frames, one for their colour, and the last gate. What is not in them:
building the guard, once a stage, and the look at each operation that the first call in float16
gets, as these runs are in float32. This is a small model, at whose size a step takes little; the
reductions pass once over what comes out of a model, and larger models compute more for it.
{without_looks(device, [whole for _, whole, _ in runs], bare)}
{hardware(facts, device)}
{f"Instructions: {', '.join(sorted(processor_flags() & SETS))}." if device.kind == "cpu" else ""}
{note}
"""
    return compose_page("The guard's share of a run's time", text)


def _clock_of(device: DeviceFacts) -> str:
    if device.kind == "cpu":
        return "processor time of the thread that runs"
    return "wall time of the run and time on the card's own clock"


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--steps", type=int, default=10, help="of the sampler, default 10")
    parser.add_argument("--device", default="cpu", help="cpu, or a card such as cuda")
    parser.add_argument("--note", default="", help="a sentence on the machine, for the page")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = pick_device(machine_facts(args.device), args.device)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["EVERYFRAME_CACHE"] = cache
        request = Request(
            prompt=PROMPT, device=device.torch_name, dtype="fp32", seed=1,
            num_inference_steps=args.steps,
        )  # fmt: skip
        list(engine.stream(request, keep=SaveOptions(None)))  # which imports all and warms up
        runs, bare = [], []
        for _ in range(args.rounds):
            runs.append(one_run(request))
            if device.kind != "cpu":
                bare.append(one_run(request, looks=False)[1])
        text = page(request, runs, bare, device, args.note)
    publish("guard", text, is_page=args.is_page, device=device)


if __name__ == "__main__":
    main()
