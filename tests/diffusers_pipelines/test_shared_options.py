"""Options that pipelines share with other families, given in Python: `strength` and `source`.

They are parameters of the pipeline's own call, so whatever it takes is passed on.
"""

from __future__ import annotations

from pathlib import Path
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


@pytest.mark.parametrize("name", ["option", "texts", "source"])
@pytest.mark.parametrize("recorded", ["option", "source"])
def test_a_record_with_its_file_given_again(
    recorded: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found in the working folder; elsewhere it is given again, by any name."""
    CASES["WanVideoToVideoPipeline"].build().save_pretrained(tmp_path / "model")
    frames = tmp_path / "walk"
    frames.mkdir()
    for number, picture in enumerate(pictures(5, 16)):
        picture.save(frames / f"{number}.png")
    model: dict[str, Any] = {"model": str(tmp_path / "model")}
    own: dict[str, Any] = {"max_sequence_length": 16}
    asked: dict[str, Any] = {"prompt": "a fox", "size": "16x16", "num_inference_steps": 5}
    if recorded == "option":
        asked["option"] = {**own, "video": str(frames), "strength": 0.6}
    else:
        asked |= {"option": own, "source": str(frames), "strength": 0.6}
    video: Any = everyframe.generate(**model, **asked)
    monkeypatch.chdir(tmp_path / "model")
    with pytest.raises(
        everyframe.InputError, match=r"'walk'; give it again by --(option video=|source )FILE"
    ):
        everyframe.generate(**model, from_record=video)
    given: dict[str, Any] = {
        "option": {"option": {"video": str(frames)}},
        "texts": {"option": [f"video={frames}"]},
        "source": {"source": str(frames), "strength": 0.6},
    }[name]
    again: Any = everyframe.generate(**model, from_record=video, **given)
    assert np.array_equal(again.frames, video.frames)


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
