"""Options that pipelines share with other families, given in Python: `strength` and `source`.

They are parameters of the pipeline's own call, so whatever it takes is passed on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import everyframe
from helpers.tiny_checkpoints.diffusers import CASES

SHORT = {"num_inference_steps": 5, "max_sequence_length": 16}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def pictures(number: int, side: int) -> list[Image.Image]:
    """Noise."""
    draws = np.random.default_rng(0)
    shape = (number, side, side, 3)
    return [Image.fromarray(each) for each in draws.integers(0, 256, shape, dtype=np.uint8)]


@pytest.mark.parametrize("name", ["video", "source"])
def test_a_generator_beside_them(name: str) -> None:
    pipe: Any = CASES["WanVideoToVideoPipeline"].build()
    call: dict[str, Any] = {"prompt": "a fox", "strength": 0.4, "height": 16, "width": 16, **SHORT}
    video = pictures(5, 16)
    wanted = pipe(video=video, **call, generator=generator(), output_type="np").frames[0]
    given: dict[str, Any] = {name: video, "generator": generator(), "output": "float"}
    made = everyframe.run(pipe, **call, **given)
    assert isinstance(made, everyframe.Video)
    assert np.array_equal(made.frames, wanted)


def test_a_strength_for_each_condition() -> None:
    pipe: Any = CASES["LTXConditionPipeline"].build()
    call: dict[str, Any] = {
        "prompt": "a fox", "image": pictures(2, 20), "frame_index": [0, 8], "strength": [1.0, 0.3],
        "height": 32, "width": 32, "num_frames": 9, **SHORT,
    }  # fmt: skip
    wanted = pipe(**call, generator=generator(), output_type="np").frames[0]
    made = everyframe.run(pipe, **call, seed=1, output="float")
    assert isinstance(made, everyframe.Video)
    assert np.array_equal(made.frames, wanted)
