"""Lossy methods on several ranks: one rank's video, with the limit passed and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everyframe
from everyframe.core.errors import EveryframeWarning
from everyframe.core.quality import LossyMethod, SamplingMethod
from helpers.interrupted_runs import OPEN_SORA, PICTURE
from helpers.tiny_checkpoints import inpaint as tiny_inpaint
from helpers.tiny_checkpoints import opensora as tiny_opensora
from helpers.tiny_checkpoints import opensora2 as tiny_opensora2
from helpers.tiny_checkpoints import svd as tiny_svd

OPENSORA2 = {
    "prompt": "a red circle", "size": "48x32", "num_frames": 9, "seed": 5,
    "num_inference_steps": 8, "image": PICTURE,
}  # fmt: skip
INPAINT = {
    "prompt": "a red ball", "num_inference_steps": 8, "seed": 3, "control": "canny",
    "mask": "4,4,20,20", "source": np.stack([PICTURE, PICTURE[::-1], PICTURE[:, ::-1]]),
    "frames_at_once": 1,
}  # fmt: skip
SVD = {
    "image": PICTURE, "height": 32, "width": 32, "num_frames": 3, "seed": 3,
    "num_inference_steps": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "asked", "method"),
    [
        pytest.param(
            tiny_opensora.opensora_1_2,
            {**OPEN_SORA, "num_inference_steps": 9},
            "unipc",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            tiny_opensora.opensora_1_2,
            {**OPEN_SORA, "num_inference_steps": 9},
            "taylor2",
            marks=pytest.mark.slow,
        ),
        pytest.param(tiny_svd.svd, SVD, "ab2", marks=pytest.mark.slow),
        pytest.param(tiny_opensora2.opensora2, OPENSORA2, "abm2", marks=pytest.mark.slow),
        pytest.param(tiny_opensora2.opensora2, OPENSORA2, "taylor1", marks=pytest.mark.slow),
        pytest.param(tiny_inpaint.inpaint, INPAINT, "taylor1", marks=pytest.mark.slow),
        pytest.param(tiny_svd.svd, SVD, "deepcache", marks=pytest.mark.slow),
    ],
)
def test_several_ranks_give_one_rank_s_video(
    make: Callable[[Path], Any], asked: dict[str, Any], method: str, tmp_path: Path
) -> None:
    asked = {**asked, "model": str(make(tmp_path / "model")), "output": "float"}
    loose = SamplingMethod(method, 4)
    one = everyframe.generate(**asked, method=LossyMethod(loose)).frames
    two = everyframe.generate(**asked, method=LossyMethod(loose), devices="cpu,cpu,cpu").frames
    np.testing.assert_allclose(two, one, atol=2e-4)
    over = SamplingMethod(method, 4, limit=1e-9)
    with pytest.warns(EveryframeWarning, match="all steps from here are exact"):
        exact_end = everyframe.generate(**asked, method=LossyMethod(over)).frames
    with pytest.warns(EveryframeWarning, match="all steps from here are exact"):
        together = everyframe.generate(**asked, method=LossyMethod(over), devices="cpu,cpu").frames
    np.testing.assert_allclose(together, exact_end, atol=2e-4)
    assert np.abs(exact_end - one).max() > 1e-4, "the limit changed something"
