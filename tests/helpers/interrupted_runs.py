"""Interrupted runs, and their comparison with uninterrupted ones, bit for bit.

A run is interrupted by closing its event iterator, which leaves the run folder as a kill does: the
state is written at every step, and nothing on exit. Several ranks: `interrupted_ranks.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import everyframe
from everyframe.core.events import Event, FramesDecoded, RunSaved, Step, VideoDone
from everyframe.engine import run
from everyframe.runs.folder import RunFolder
from everyframe.runs.run_state import EVERY_STEP, SaveOptions

STEPS = 3


PICTURE = np.random.default_rng(0).integers(0, 255, (24, 24, 3), np.uint8)


OPEN_SORA: dict[str, Any] = {
    "prompt": "a red circle", "size": "16x16", "num_frames": 3, "num_inference_steps": STEPS,
    "seed": 3,
}  # fmt: skip


def begun(root: Path, **options: Any) -> Iterator[Event]:
    return run.stream(everyframe.Request(**options), keep=SaveOptions(root, pace=EVERY_STEP))


def videos(events: list[Event]) -> dict[int, np.ndarray[Any, Any]]:
    seeds = {e.seed for e in events if isinstance(e, FramesDecoded)}
    return {
        seed: np.concatenate(
            [e.frames for e in events if isinstance(e, FramesDecoded) and e.seed == seed]
        )
        for seed in seeds
    }


def same(events: list[Event], others: list[Event]) -> None:
    """The same videos, bit for bit, with the same records."""
    mine, theirs = videos(events), videos(others)
    assert mine.keys() == theirs.keys()
    for seed, frames in mine.items():
        np.testing.assert_array_equal(frames, theirs[seed])
    records = [[e.record for e in each if isinstance(e, VideoDone)] for each in (events, others)]
    assert records[0] == records[1]


def stop_before(events: Iterator[Event], number: int) -> RunFolder:
    """The folder of a run that ended before the event of that number."""
    name = None
    for event in itertools.islice(events, number):
        name = event.path if isinstance(event, RunSaved) else name
    events.close()  # type: ignore[attr-defined]
    assert name is not None
    return RunFolder(Path(name))


def interrupt(root: Path, step: int, **options: Any) -> RunFolder:
    """A run that ended after that step of denoising."""
    stream = begun(root, **options)
    folder = None
    for event in stream:
        folder = RunFolder(Path(event.path)) if isinstance(event, RunSaved) else folder
        if isinstance(event, Step) and (event.stage, event.step) == ("denoise", step):
            break
    stream.close()  # type: ignore[attr-defined]
    assert folder is not None
    return folder


def cut(model: str, root: Path, **options: Any) -> RunFolder:
    """A run of Open-Sora that ended in the middle of denoising."""
    return interrupt(root, 2, model=model, **{**OPEN_SORA, **options})
