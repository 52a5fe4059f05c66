"""First and last frame, video to video and negative prompt have the same options in all models.

A clip to continue, `extend`, is in `test_clip_continuation.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
from PIL import Image

import everyframe
from everyframe.core.errors import InputError
from everyframe.core.options import facts_of
from everyframe.core.request import Request
from everyframe.diffusers_pipelines.inputs.options import SHARED, PipelineOptions
from everyframe.diffusers_pipelines.inputs.signature import NAMES, of_class
from everyframe.families.registry import all_options

#: What any model calls the same thing.
MEANINGS = {
    "image": r"(first|start|init|cond|input)?_?(image|frame)",
    "last_image": r"(last|end|final|tail)_(image|frame)",
    "negative_prompt": r"(negative|neg)_prompt",
    "source": r"(input_|source_|init_)?video",
    "strength": r"strength",
}
#: Parameters of such names that mean something else.
OTHERWISE = {
    # A picture that is drawn of the prompt, and none that is given.
    ("opensora2", "first_frame"),
}


def means(name: str) -> str | None:
    return next((own for own, pattern in MEANINGS.items() if re.fullmatch(pattern, name)), None)


@pytest.mark.slow
def test_every_pipeline_of_diffusers_has_them() -> None:
    seen: dict[str, int] = dict.fromkeys(MEANINGS, 0)
    for name in dir(diffusers):
        cls = getattr(diffusers, name)
        is_plain = name.endswith("Pipeline") and not name.endswith("ModularPipeline")
        if not isinstance(cls, type) or not is_plain:
            continue
        interface = of_class(cls)
        if not interface.makes_video:
            continue
        for parameter in interface.parameters:
            option = means(parameter)
            if option is not None:
                assert parameter in (*NAMES.get(option, ()), SHARED.get(option)), (name, parameter)
                seen[option] += 1
    assert all(number > 2 for number in seen.values()), seen


def test_our_families_have_them() -> None:
    found: dict[str, list[tuple[str, type]]] = {}
    for family, options in all_options().items():
        for name in options.model_fields:
            if means(name) and (family, name) not in OTHERWISE:
                assert name == means(name), (family, name)
            if name in MEANINGS:
                found.setdefault(name, []).append((family, options))
    assert {*found} == {*SHARED}  # the others are options of every request
    assert {"image", "last_image", "negative_prompt", "extend"} <= {*Request.model_fields}
    for name, owners in found.items():
        assert {family for family, _ in owners} == {"inpaint", "pipeline"}
        one, other = (options.model_fields[name].description for _, options in owners)
        assert one == other
        assert len({facts_of(options, name)["names_files"] for _, options in owners}) == 1


def test_a_pipeline_takes_them_as_its_parameters() -> None:
    assert PipelineOptions(source="a.mp4", strength=0.4, option=["x=1"]).option == {
        "x": 1, "video": "a.mp4", "strength": 0.4
    }  # fmt: skip
    assert PipelineOptions(option={"x": 1}).option == {"x": 1}
    with pytest.raises(InputError, match="source and option video are the same"):
        PipelineOptions(source="a.mp4", option={"video": "b.mp4"})
    with pytest.raises(InputError, match="strength must be"):
        PipelineOptions(strength=2)


@pytest.fixture(scope="module")
def cogvideox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from helpers.tiny_checkpoints.diffusers.diffusions import cogvideox_parts

    folder = tmp_path_factory.mktemp("models") / "cogvideox"
    diffusers.CogVideoXVideoToVideoPipeline(**cogvideox_parts()).save_pretrained(folder)
    return folder


def test_a_pipeline_that_takes_a_video_says_by_which_option(cogvideox: Path) -> None:
    clip = np.zeros((9, 16, 16, 3), np.uint8)
    with pytest.raises(InputError, match="give the video as source"):
        everyframe.plan("a fox", model=str(cogvideox), extend=clip)


@pytest.mark.slow
def test_video_to_video_by_either_name(cogvideox: Path, tmp_path: Path) -> None:
    clip = np.random.default_rng(0).integers(0, 255, (9, 16, 16, 3), np.uint8)
    short = {"max_sequence_length": 16}
    asked: dict[str, Any] = {
        "prompt": "a fox", "model": str(cogvideox), "size": "16x16", "seed": 1,
        "num_inference_steps": 4, "dtype": "fp32", "run_dir": "off",
    }  # fmt: skip

    def frames(**more: Any) -> Any:
        video = everyframe.generate(**asked, **more)
        assert isinstance(video, everyframe.Video)
        return np.asarray(video.frames)

    pictures = [Image.fromarray(frame) for frame in clip]
    wanted = frames(option={**short, "video": pictures, "strength": 0.5})
    # An array of bytes is the same video: diffusers would take its numbers for 0..1.
    assert np.array_equal(frames(option={**short, "video": clip, "strength": 0.5}), wanted)
    assert np.array_equal(frames(option=short, source=clip, strength=0.5), wanted)
    assert not np.array_equal(frames(option=short, source=clip, strength=1.0), wanted)
