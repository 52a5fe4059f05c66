"""What is done where memory is short gives the same video: exactly, or up to rounding.

The resolver's choices are exercised on the CPU, whose memory stands for a device's: weights go from
host to host by the same code that takes them to a card.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everyframe
import tiny
import tiny_svd
from everyframe.core.events import Frames
from everyframe.core.plan import Plan
from everyframe.engine import run as engine
from everyframe.families.family import Take
from everyframe.planning.resolve import Prepared, prepare

#: Two orders of the same float32 sums, over two steps and a decoder.
CLOSE = 1e-4


def frames_of(prepared: Prepared, change: Callable[[Plan], Plan], **given: Any) -> np.ndarray:
    plan = change(prepared.plan)
    take = Take(plan.settings.seed, **given)
    record: dict[str, Any] = {"request": {}, "settings": {}}
    with torch.inference_mode():
        events = list(engine._run(plan, prepared.model, [take], record))
    return np.concatenate([event.frames for event in events if isinstance(event, Frames)])


def unchanged(plan: Plan) -> Plan:
    return plan


def saving(name: str, value: int) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, settings=plan.settings.with_saving(name, value))


def offloaded(plan: Plan) -> Plan:
    return replace(plan, components=tuple(replace(p, offload=True) for p in plan.components))


@pytest.fixture(scope="module", params=["opensora-1.2", "opensora-1.0"])
def opensora(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    make = tiny.opensora_1_2 if request.param == "opensora-1.2" else tiny.opensora_1_0
    model = make(tmp_path_factory.mktemp("models") / "tiny")
    size = {} if request.param == "opensora-1.0" else {"size": "32x32", "num_frames": 5}
    return prepare(
        everyframe.Request(
            prompt="a red circle", model=str(model), num_inference_steps=2, seed=1, device="cpu",
            guidance_scale=4, **size,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def usual(opensora: Prepared) -> np.ndarray:
    return frames_of(opensora, unchanged)


@pytest.mark.parametrize(
    ("change", "close"),
    [
        (offloaded, 0.0),
        (saving("branches_at_once", 1), CLOSE),
        (saving("decode_frames", 1), CLOSE),
    ],
    ids=["offload", "branches", "frames"],
)
def test_opensora_with_less_memory(
    opensora: Prepared, usual: np.ndarray, change: Callable[[Plan], Plan], close: float
) -> None:
    assert usual.std() > 0.01
    assert np.abs(frames_of(opensora, change) - usual).max() <= close


def test_svd_with_less_memory(tmp_path: Path) -> None:
    folder = tiny_svd.svd(tmp_path / "svd")
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    prepared = prepare(
        everyframe.Request(
            image=picture, model=str(folder), size="64x64", num_frames=3, num_inference_steps=2,
            seed=1, device="cpu",
        )
    )  # fmt: skip
    given = {"given": engine.GivenFrames(first=picture[None])}
    usual = frames_of(prepared, unchanged, **given)
    assert usual.std() > 0.01
    assert np.array_equal(frames_of(prepared, offloaded, **given), usual)
    alone = frames_of(prepared, saving("branches_at_once", 1), **given)
    assert np.abs(alone - usual).max() <= CLOSE
