"""What is done where memory is short gives the same video: exactly, or up to rounding.

The resolver's choices are exercised on the CPU, whose memory stands for a device's: weights go from
host to host by the same code that takes them to a card.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import everyframe
from everyframe.core.plan import Plan
from everyframe.planning.resolve import PreparedPlan, prepare
from everyframe.runtime.interface import ConditioningFrames
from helpers.plans import frames_of, saving, unchanged
from helpers.tiny_checkpoints import opensora as tiny_opensora
from helpers.tiny_checkpoints import svd as tiny_svd

#: Two orders of the same float32 sums, over two steps and a decoder.
CLOSE = 1e-4


#: Of the difference to the whole picture, in 0..1, on average; for weights that are random.
TILED = 0.1


@pytest.fixture(scope="module", params=["opensora-1.2", "opensora-1.0"])
def opensora(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PreparedPlan:
    make = (
        tiny_opensora.opensora_1_2
        if request.param == "opensora-1.2"
        else tiny_opensora.opensora_1_0
    )
    model = make(tmp_path_factory.mktemp("models") / "tiny")
    size = {} if request.param == "opensora-1.0" else {"size": "32x32", "num_frames": 5}
    return prepare(
        everyframe.Request(
            prompt="a red circle", model=str(model), num_inference_steps=2, seed=1, device="cpu",
            guidance_scale=4, **size,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def usual(opensora: PreparedPlan) -> np.ndarray:
    return frames_of(opensora, unchanged)


@pytest.mark.parametrize(
    ("change", "close"),
    [
        (saving("branches_at_once", 1), CLOSE),
        (saving("vae_frames", 1), CLOSE),
    ],
    ids=["branches", "frames"],
)
def test_opensora_with_less_memory(
    opensora: PreparedPlan, usual: np.ndarray, change: Callable[[Plan], Plan], close: float
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
    given = {"inputs": ConditioningFrames(first=picture[None])}
    usual = frames_of(prepared, unchanged, **given)
    assert usual.std() > 0.01
    alone = frames_of(prepared, saving("branches_at_once", 1), **given)
    assert np.abs(alone - usual).max() <= CLOSE
    # Latents of 8x8 in four tiles of 5x5.
    tiled = np.abs(frames_of(prepared, saving("decode_tile", 5), **given) - usual)
    assert 0 < tiled.mean() < TILED


@pytest.mark.slow
def test_shapes_in_tiles() -> None:
    """Trained weights, whose norms see much the same in a tile: what tiles change in a picture.

    Steps enough for latents that the decoder knows; after four of them tiles change a tenth. Of a
    small video, whose object fills much of a tile of 6 x 6, tiles change more: 0.024 on average.
    """
    prepared = prepare(
        everyframe.Request(
            prompt="a red circle", size="128x128", num_inference_steps=12, seed=1, device="cpu"
        )
    )
    usual = frames_of(prepared, unchanged)
    tiled = np.abs(frames_of(prepared, saving("decode_tile", 12)) - usual)
    assert 0 < tiled.mean() < 0.01
