"""Decoding in tiles: a plan takes them where a piece does not fit, a run where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import everyframe
from everyframe.core.events import Event, FramesDecoded, Repaired
from everyframe.families.stepvideo import dry_run
from everyframe.planning.resolve import PreparedPlan, prepare
from helpers.out_of_memory import TOO_LITTLE, before_calls
from helpers.plans import frames_of as planned_frames
from helpers.plans import saving, unchanged

ASKED: dict[str, Any] = {
    "prompt": "a red circle", "size": "64x48", "num_frames": 17, "num_inference_steps": 2,
    "seed": 5, "device": "cpu", "dtype": "fp32",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_models: Callable[[str], Path]) -> str:
    return str(tiny_models("stepvideo"))


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "SIDES", (2,))


def planned(model: str, **more: Any) -> PreparedPlan:
    return prepare(everyframe.Request(model=model, **ASKED, **more))


@contextmanager
def no_room_for_width(above: int) -> Iterator[None]:
    """Within, the decoder finds no memory for more than so many columns of latents."""

    def hook(module: nn.Module, given: tuple[Any, ...]) -> None:
        is_wide = type(module).__name__ == "Decoder" and given[0].shape[-1] > above
        if is_wide and not given[0].is_meta:
            raise RuntimeError(TOO_LITTLE)

    with before_calls(hook):
        yield


def test_a_plan_takes_tiles_where_a_piece_does_not_fit(model: str) -> None:
    whole = planned(model)
    need, weights = whole.plan.peak_bytes, whole.plan.component("vae").weight_bytes
    less = planned(model, max_memory=f"{(need + weights) // 2}B").plan
    assert whole.plan.settings.savings == ()
    assert less.settings.saving("decode_tile", 0) == 2
    assert less.peak_bytes < need
    assert less.infeasible is None
    (note,) = [note for note in less.notes if "tiles" in note]
    assert "frames are decoded in 4 tiles" in note
    assert "(lossy)" in note
    # Four tiles of two by two cover three rows of four columns: a third more is computed.
    assert less.stages[-1].operations > 1.2 * whole.plan.stages[-1].operations


def test_a_run_that_is_out_of_memory_goes_on_in_tiles(model: str) -> None:
    with no_room_for_width(above=3):
        events: list[Event] = list(everyframe.stream(everyframe.Request(model=model, **ASKED)))
    (repair,) = [event for event in events if isinstance(event, Repaired)]
    assert (repair.stage, repair.component, repair.cause) == ("decode", "vae", "memory")
    found = np.concatenate([event.frames for event in events if isinstance(event, FramesDecoded)])
    prepared = prepare(everyframe.Request(model=model, **ASKED), will_run=True)
    assert np.array_equal(found, planned_frames(prepared, saving("decode_tile", 2)))
    assert not np.array_equal(found, planned_frames(prepared, unchanged))
