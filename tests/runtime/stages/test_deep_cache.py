"""DeepCache in Stable Video Diffusion: whole and shallow steps, resumed and on ranks, checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import everyframe
from everyframe.core.errors import EveryframeWarning, InputError
from everyframe.core.events import ErrorEstimated
from everyframe.core.quality import SHALLOW_SHARE, LossyMethod, SamplingMethod
from everyframe.families.svd.blocks import ResidualBlock
from helpers.interrupted_runs import PICTURE
from helpers.tiny_checkpoints import opensora as tiny_opensora
from helpers.tiny_checkpoints import svd as tiny_svd

STEPS = 6
ASKED: dict[str, Any] = {
    "image": PICTURE, "height": 32, "width": 32, "num_frames": 3, "seed": 3,
    "num_inference_steps": STEPS, "output": "float",
}  # fmt: skip
NUM_BLOCKS = 8  # residual blocks of the tiny UNet


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_svd.svd(tmp_path_factory.mktemp("models") / "svd"))


@pytest.fixture
def num_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Number of residual blocks that were computed, in its only item."""
    count, forward = [0], ResidualBlock.forward

    def counted(self: ResidualBlock, *given: Any) -> Tensor:
        count[0] += 1
        return forward(self, *given)

    monkeypatch.setattr(ResidualBlock, "forward", counted)
    return count


def frames(model: str, **more: Any) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = everyframe.generate(**{**ASKED, "model": model, **more}).frames
    return found


def test_shallow_steps_compute_the_full_resolution_alone(model: str, num_blocks: list[int]) -> None:
    exact = frames(model)  # with its plan's dry run
    num_blocks[0] = 0
    assert np.array_equal(frames(model), exact)
    assert num_blocks[0] == NUM_BLOCKS * STEPS
    num_blocks[0] = 0
    cached = frames(model, quality="deepcache@2")
    # One on the way down and two on the way up.
    assert num_blocks[0] == 2 * NUM_BLOCKS + (STEPS - 2) * 3
    assert not np.array_equal(cached, exact)
    assert np.isfinite(cached).all()
    assert np.array_equal(frames(model, quality=f"deepcache@{STEPS}"), exact), "all are whole"
    first, second = everyframe.generate(
        **{**ASKED, "model": model, "quality": "deepcache@2", "num_videos": 2}
    )
    assert np.array_equal(first.frames, cached)
    assert np.array_equal(second.frames, frames(model, quality="deepcache@2", seed=4)), "reset"


@pytest.mark.slow
def test_guidance_in_part_of_the_steps(model: str, num_blocks: list[int]) -> None:
    """Features with guidance are none of a step without."""
    one, other = (frames(model, quality=f"deepcache@{n}g50") for n in (2, STEPS))
    assert one.shape == other.shape
    apart = frames(model, quality="deepcache@2g50", max_memory="64MB")
    np.testing.assert_allclose(apart, one, atol=2e-4)


def test_the_check_ends_the_loss(model: str) -> None:
    seen: list[Any] = []
    method = SamplingMethod("deepcache", 3, limit=1e-9)
    with pytest.warns(EveryframeWarning, match="all steps from here are exact"):
        ended = frames(model, method=LossyMethod(method), on_event=seen.append)
    (event,) = (each for each in seen if isinstance(each, ErrorEstimated))
    assert event.is_over
    assert event.error > 1e-9
    assert not np.array_equal(ended, frames(model, quality="deepcache@3"))


def test_it_is_planned_named_and_refused(model: str, tmp_path: Path) -> None:
    asked = {**ASKED, "model": model, "quality": "deepcache@2"}
    del asked["output"]
    plan = everyframe.plan(**asked)
    assert plan.settings.num_denoiser_calls == 2 + SHALLOW_SHARE * (STEPS - 2)
    assert plan.quality is not None
    assert plan.quality.method == "deepcache@2"
    with pytest.raises(InputError, match="deepcache is disabled"):
        everyframe.plan(**asked, disable=["deepcache"])
    other = str(tiny_opensora.opensora_1_2(tmp_path / "opensora"))
    with pytest.raises(InputError, match="can't do deepcache here"):
        everyframe.plan("a red circle", model=other, quality="deepcache@2")


@pytest.mark.slow
def test_a_dtype_that_a_repair_widens_goes_on(model: str) -> None:
    torch.manual_seed(0)
    assert np.isfinite(frames(model, quality="deepcache@3", dtype="bf16")).all()
