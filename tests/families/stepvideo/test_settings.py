"""What is asked of a Step-Video, resolved: each variant's defaults, sizes, lengths, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from everyframe.core.errors import InputError
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.families.stepvideo.config import (
    HUNYUAN_CLIP,
    StepLLMConfig,
    StepVideoConfig,
    StepVideoModelConfig,
)
from everyframe.families.stepvideo.options import StepVideoOptions
from everyframe.families.stepvideo.settings import (
    NEG_MAGIC,
    POS_MAGIC,
    latent_shape,
    resolve_settings,
    smaller_settings,
)
from everyframe.families.stepvideo.vae_config import StepVAEConfig

BASE = StepVideoConfig(StepVideoModelConfig(), StepLLMConfig(), HUNYUAN_CLIP, StepVAEConfig())
TURBO = replace(BASE, is_turbo=True)


def resolved(config: StepVideoConfig = BASE, **given: Any) -> tuple[Settings, tuple[str, ...]]:
    own = {name: given.pop(name) for name in list(given) if name in StepVideoOptions.model_fields}
    given.setdefault("prompt", " a red circle ")
    return resolve_settings(config, "this model", Request(**given), StepVideoOptions(**own), 5)


@pytest.mark.parametrize(
    ("config", "steps", "guidance", "shift"), [(BASE, 50, 9.0, 13.0), (TURBO, 15, 5.0, 17.0)]
)
def test_defaults_are_what_upstream_recommends(
    config: StepVideoConfig, steps: int, guidance: float, shift: float
) -> None:
    settings, notes = resolved(config)
    assert (settings.height, settings.width) == (544, 992)
    assert (settings.num_frames, settings.fps) == (204, 25.0)
    assert (settings.num_inference_steps, settings.guidance_scale) == (steps, guidance)
    assert dict(settings.options) == {
        "time_shift": shift, "pos_magic": POS_MAGIC, "llm_bias": "sqrt", "truncate_prompt": False,
    }  # fmt: skip
    assert (settings.prompt, settings.negative_prompt) == ("a red circle", NEG_MAGIC)
    assert latent_shape(config, settings) == (64, 36, 34, 62)
    assert notes == ()


def test_what_is_given_is_taken() -> None:
    settings, _ = resolved(
        negative_prompt="blur", pos_magic="", time_shift=7, num_inference_steps=30,
        guidance_scale=4, size="768x768", num_frames=26, fps=8,
    )  # fmt: skip
    assert (settings.negative_prompt, settings.option("pos_magic")) == ("blur", "")
    assert (settings.option("time_shift"), settings.num_inference_steps) == (7.0, 30)
    assert latent_shape(BASE, settings) == (64, 5, 48, 48)
    for off in (0, 0.5, 1):
        assert resolved(guidance_scale=off)[0].negative_prompt is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"prompt": None}, "draws what a prompt says; give one"),
        ({"image": "a.png"}, "image has no effect on this model: it takes a prompt alone"),
        ({"extend": "a.mp4"}, "extend has no effect"),
        ({"edit_strength": 0.5}, "edit_strength has no effect"),
        ({"resolution": "720p"}, "no named sizes; give size"),
        ({"chain": 2}, "chain"),
        ({"size": "960x540"}, "height must be a multiple of 16, got 540; try 528 or 544"),
        ({"size": "8x32"}, "width must be a multiple of 16, got 8; try 16"),
        ({"num_frames": 200}, "num_frames must be a multiple of 17, or 1 or 9 more, got 200; "
                              "try 196 or 204"),
        ({"num_frames": 16}, "try 9 or 17"),
        ({"guidance_scale": 1, "negative_prompt": "a"}, "no effect with guidance_scale 1"),
        ({"guidance_scale": 0.5, "negative_prompt": "a"}, "no effect with guidance_scale 0.5"),
        ({"llm_bias": "sqr"}, "llm_bias must be one of sqrt, linear, none, got 'sqr'; did you"),
        ({"time_shift": 0}, "time_shift must be more than 0"),
        ({"seconds": 1e6}, "at most 100000"),
        ({"latents": torch.zeros(1, 36, 64, 34, 62)}, r"of shape (1, 64, 36, 34, 62)"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_reported(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as caught:
        resolved(**given)
    assert text in str(caught.value)


def test_seconds_become_the_nearest_length() -> None:
    settings, notes = resolved(seconds=8)
    assert settings.num_frames == 196  # 200 lies between 196 and 204
    assert notes == ("8 s become 196 frames (7.84 s): the autoencoder works in pieces of 17 "
                     "frames",)  # fmt: skip
    assert resolved(seconds=0.04)[0].num_frames == 1
    assert resolved(seconds=0.68)[1] == ()


def test_smaller_videos_can_all_be_made() -> None:
    settings, _ = resolved()
    found = list(smaller_settings(BASE, settings))
    pixels = [math.prod((s.height, s.width, s.num_frames)) for s in found]
    assert all(a >= b for a, b in pairwise(pixels))
    for each in found:
        assert latent_shape(BASE, each)[1] >= 3
        assert each.height % 16 == each.width % 16 == 0
