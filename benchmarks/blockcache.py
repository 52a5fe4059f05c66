"""What do caches between a transformer's blocks cost in decibels, beside our own methods?

    python benchmarks/blockcache.py            # 16 videos of `shapes`; half an hour

A cache computes the first of the 8 blocks in every step, or none, two or four of them, and takes
what the others add from the last whole steps: as it was (order 0) or extrapolated (order 1, as
Taylor caches do). Which steps are whole is a list, evenly or as of our ``e130``, or a threshold's
choice (first-block cache, MagCache, cache-dit). Each is compared with `abm2` and `taylor1` by the
worst frame's PSNR against the exact video, as ``everyframe calibrate`` measures it, and by the
blocks that were computed. Times are not measured. cache-dit takes part where it is installed.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from block_cache_methods import (
    Cache,
    CacheDit,
    CachedStack,
    FirstBlockThreshold,
    FixedSteps,
    Magnitudes,
    MeasuredRatios,
)
from result_pages import compose_page, make_parser, publish, versions_of
from torch import nn

import everyframe
from everyframe.core.quality import parse_method
from everyframe.engine.calibration import shapes_prompts
from everyframe.hardware import machine_facts
from everyframe.numerics.psnr import frame_psnr
from everyframe.runtime.components.component_observers import on_component_loaded

STEPS, BLOCKS = 30, 8

#: Whole steps of the methods that have a list of them, placed evenly and crowded early.
WHOLE, PLACES = (5, 7, 10, 12, 15), ("", "e130")

#: Blocks in every step, and order of the extrapolation.
FIXED = ((0, 1), (1, 0), (1, 1), (2, 1), (4, 1))

#: Computed steps of our own method, for comparisons at equal cost.
OWN = (4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 22, 24)


@dataclass
class Row:
    """A method, and what each of its videos had."""

    name: str
    #: None: a method of Everyframe's own, by name.
    make: Callable[[], Cache] | None
    decibels: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)

    @property
    def calls(self) -> float:
        """Blocks computed in the mean, in whole calls of the model."""
        return statistics.mean(self.computed) / BLOCKS


def made(prompt: str, seed: int, quality: str = "exact", cache: Cache | None = None) -> Any:
    """Frames (T, H, W, 3) in 0..1 of a video, and the blocks that were computed."""
    stacks: list[CachedStack] = []
    with ExitStack() as on:
        if cache is not None:

            def look(name: str, module: nn.Module) -> None:
                if name == "denoiser":
                    stacks.append(on.enter_context(CachedStack(module, cache)))

            on.enter_context(on_component_loaded(look))
        video = everyframe.generate(
            prompt, seed=seed, quality=quality, output="float", run_dir="off", device="cpu"
        )
    assert isinstance(video, everyframe.Video)
    if cache is None:
        method = parse_method(quality).sampling if "@" in quality else None
        whole = STEPS if method is None else method.num_computed
        return video.frames, whole * BLOCKS
    (stack,) = stacks
    assert stack.num_steps == STEPS, "the sampler's own steps"
    return video.frames, stack.num_computed


def fixed_rows() -> list[Row]:
    """Methods with a list of whole steps, at equal numbers of them."""
    rows = [Row(f"abm2@{count}e130", None) for count in OWN]
    rows += [Row(f"abm2@{count}", None) for count in WHOLE]
    for count in WHOLE:
        for place in PLACES:
            rows.append(Row(f"taylor1@{count}{place}", None))
            whole = parse_method(f"taylor1@{count}{place}").sampling
            assert whole is not None
            steps = whole.computed_steps(STEPS)
            rows += [
                Row(f"F{first} order {order} @{count}{place}",
                    partial(FixedSteps, first, order, steps))
                for first, order in FIXED
            ]  # fmt: skip
            if not place and importlib.util.find_spec("cache_dit") is not None:
                mask = [int(each in steps) for each in range(STEPS)]
                rows += [
                    Row(f"cache-dit F1 order {order} @{count}{place}",
                        partial(CacheDit, STEPS, order=order, mask=mask))
                    for order in (0, 1)
                ]  # fmt: skip
    return rows


def threshold_rows(ratios: Sequence[float]) -> list[Row]:
    """Methods that decide by their features which steps are whole."""
    rows = [
        Row(f"first block, threshold {threshold:g}, order {order}",
            partial(FirstBlockThreshold, threshold, order))
        for threshold in (0.05, 0.1, 0.2, 0.3, 0.5) for order in (0, 1)
    ]  # fmt: skip
    rows += [
        Row(f"magnitudes, threshold {threshold:g}, first {first}, at most {most} skipped",
            partial(Magnitudes, ratios, threshold, first=first, most=most))
        for threshold, first, most in ((0.06, 6, 3), (0.12, 6, 5), (0.24, 3, 5), (0.4, 2, 10))
    ]  # fmt: skip
    if importlib.util.find_spec("cache_dit") is not None:
        rows += [
            Row(f"cache-dit F1 W4 R{threshold:g}, order {order}",
                partial(CacheDit, STEPS, order=order, threshold=threshold))
            for threshold in (0.08, 0.12, 0.24, 0.5) for order in (0, 1)
        ]  # fmt: skip
    return rows


def measured(videos: Sequence[tuple[str, int]]) -> list[Row]:
    """All methods on all videos."""
    exact, seen = [], []
    for prompt, seed in videos:
        ratios = MeasuredRatios()
        exact.append(made(prompt, seed)[0])
        same, computed = made(prompt, seed, cache=ratios)
        assert np.array_equal(same, exact[-1]), "the stack is the model's own loop"
        assert computed == STEPS * BLOCKS
        seen.append(ratios.ratios)
    means = [statistics.mean(each) for each in zip(*seen, strict=True)]
    rows = [*fixed_rows(), *threshold_rows(means)]
    for number, (prompt, seed) in enumerate(videos):
        for row in rows:
            made_by = (row.name, None) if row.make is None else ("exact", row.make())
            frames, computed = made(prompt, seed, *made_by)
            row.decibels.append(float(np.min(frame_psnr(frames, exact[number]))))
            row.computed.append(computed)
        print(f"video {number + 1} of {len(videos)}", flush=True)
    return rows


def beside(row: Row, rows: Sequence[Row]) -> Row | None:
    """Our own `abm2` with crowded steps that computes as many blocks, or up to a call fewer."""
    own = [r for r in rows if r.name.startswith("abm2@") and r.name.endswith("e130")]
    return max((r for r in own if r.calls <= row.calls), key=lambda r: r.calls, default=None)


def gain_beside(row: Row, everyone: Sequence[Row]) -> tuple[str, float, float] | None:
    """Of a cache: our own beside it, and its decibels less that one's, worst and median."""
    own = beside(row, everyone)
    if own is None or row.make is None:
        return None
    worst = min(row.decibels) - min(own.decibels)
    return own.name, worst, statistics.median(row.decibels) - statistics.median(own.decibels)


def summary(rows: Sequence[Row]) -> str:
    """How many caches are ahead of our own at their cost."""
    gains = {row.name: found for row in rows if (found := gain_beside(row, rows)) is not None}
    ahead = [
        [f"{name} by {gain[which]:.1f} dB" for name, (_, *gain) in gains.items() if gain[which] > 0]
        for which in (0, 1)
    ]
    worst, median = (f"{len(each)} ({', '.join(each)})" if each else "none" for each in ahead)
    return (
        f"Of {len(gains)} caches, ahead of our own at their cost: at worst {worst}; in the median "
        f"{median}."
    )


def table(rows: Sequence[Row], everyone: Sequence[Row]) -> str:
    """Rows as a table, in their order; the last columns are a cache's decibels less our own's."""
    lines = [
        "| method | blocks, in whole calls | worst, dB | median, dB | beside | worst | median |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for row in rows:
        numbers = min(row.decibels), statistics.median(row.decibels)
        gain, last = gain_beside(row, everyone), "| | | |"
        if gain is not None:
            last = f"| {gain[0]} | {gain[1]:+.1f} | {gain[2]:+.1f} |"
        lines.append(f"| {row.name} | {row.calls:.1f} | {numbers[0]:.1f} | {numbers[1]:.1f} {last}")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--videos", type=int, default=16)
    args = parser.parse_args()
    videos = [(each, seed) for seed, each in enumerate(shapes_prompts(args.videos))]
    rows = measured(videos)
    facts = machine_facts("cpu")
    has_list = [row for row in rows if "@" in row.name]
    by_choice = [row for row in rows if "@" not in row.name]
    has_peer = importlib.util.find_spec("cache_dit") is not None
    peer = f", cache-dit {version('cache-dit')}" if has_peer else "; cache-dit is not installed"
    text = f"""
{len(videos)} prompts, a seed each; 64x64, 17 frames, {STEPS} Euler steps with guidance 1.2 are
exact. PSNR is of the worst frame of each video against the exact one. `Fn` computes the first n of
{BLOCKS} blocks in every step and takes what the others add from the last whole step (order 0), or
on the line through the last two (order 1). `@N` are N whole steps, `e130` more of them at the
beginning. The cost is the number of blocks computed, in calls of all {BLOCKS}; embeddings and the
last layer, which a cache computes in every step and `abm2` and `taylor1` do not, are left out of
it. `beside` is the `abm2` with crowded steps that computes as many blocks or up to a call fewer,
and the last two columns are the cache's decibels less its: below 0 the cache is behind.

{summary(rows)}

## A list of whole steps

{table(has_list, rows)}

## A threshold's choice

Steps are whole where features have changed by the threshold; the mean of the videos is given.

{table(by_choice, rows)}

Hardware: {facts.cpu.name}, {torch.get_num_threads()} of {facts.num_cores} cores; no times taken.
Versions: {versions_of(facts)}{peer}.
"""
    page = compose_page("Caches between the blocks of `shapes`", text)
    publish("blockcache", page, is_page=args.is_page)


if __name__ == "__main__":
    main()
