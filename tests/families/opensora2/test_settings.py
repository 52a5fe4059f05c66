"""What is asked of an Open-Sora 2.0, resolved: upstream's sizes, lengths, words and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everyframe.core.errors import InputError
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.families.opensora2.config import MMDiTConfig, OpenSora2Config
from everyframe.families.opensora2.options import OpenSora2Options
from everyframe.families.opensora2.prompts import texts_of, with_suffixes
from everyframe.families.opensora2.settings import (
    first_frame_size,
    latent_shape,
    named_size,
    resolve_settings,
    smaller_settings,
)
from everyframe.families.opensora2.vae_config import DCAEConfig, HunyuanVAEConfig

VIDEO = OpenSora2Config(MMDiTConfig(), HunyuanVAEConfig(), {}, {})
PLAIN = OpenSora2Config(MMDiTConfig(cond_embed=False), HunyuanVAEConfig(), {}, {})
DEEP = OpenSora2Config(MMDiTConfig(in_channels=128, patch_size=1), DCAEConfig(), {}, {})
GOLDEN = json.loads(
    (Path(__file__).parents[2] / "golden" / "opensora2_sampler" / "config.json").read_text()
)
PICTURE = np.zeros((8, 8, 3), np.uint8)
CLIP = np.zeros((40, 8, 8, 3), np.uint8)


def resolved(config: OpenSora2Config = VIDEO, **given: Any) -> tuple[Settings, tuple[str, ...]]:
    own = {name: given.pop(name) for name in list(given) if name in OpenSora2Options.model_fields}
    given.setdefault("prompt", " a red circle ")
    return resolve_settings(config, "this model", Request(**given), OpenSora2Options(**own), 5)


def test_defaults_are_upstreams() -> None:
    settings, notes = resolved()
    assert (settings.height, settings.width, settings.num_frames) == (192, 336, 129)
    assert (settings.num_inference_steps, settings.guidance_scale, settings.fps) == (50, 7.5, 24)
    assert (settings.prompt, settings.negative_prompt) == ("a red circle", None)
    assert latent_shape(VIDEO, settings) == (16, 33, 24, 42)
    assert notes == ()
    deep, _ = resolved(DEEP)
    assert (deep.height, deep.width, deep.num_frames) == (576, 1024, 128)
    assert latent_shape(DEEP, deep) == (128, 32, 18, 32)


@pytest.mark.parametrize("step", [16, 32])
@pytest.mark.parametrize("table", ["inference", "training"])
def test_named_sizes_are_upstreams_table(table: str, step: int) -> None:
    for name, sizes in GOLDEN["sizes"][f"{table}_{step}"].items():
        for aspect, size in sizes.items():
            width, height = (round(float(side) * 100) for side in aspect.split(":"))
            found = named_size(name, (width, height), step=step, of_training=table == "training")
            assert found == tuple(size), (name, aspect)


@pytest.mark.parametrize("case", GOLDEN["prompts"], ids=lambda case: case["sent_to_encoders"])
def test_words_around_a_prompt_are_upstreams(case: dict[str, Any]) -> None:
    score = None if case["motion_score"] is None else int(case["motion_score"])
    assert with_suffixes(case["prompt"], case["fps"], score) == case["sent_to_encoders"]


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, (576, 1024)),
        # At 256px both have one size, at 768px not.
        ({"resolution": "256px", "aspect": "185:100"}, (560, 1056)),
        ({"resolution": "256px", "aspect": "9:16"}, (1024, 576)),
        ({"resolution": "768px"}, (576, 1024)),
        ({"size": "320x320"}, (768, 768)),
        ({"size": "480x320"}, (624, 944)),
        ({"first_frame_resolution": "256px"}, (192, 336)),
        ({"size": "480x320", "first_frame_resolution": "video"}, (320, 480)),
    ],
)
def test_a_first_picture_has_a_size_of_upstreams_table(
    options: dict[str, Any], size: tuple[int, int]
) -> None:
    assert first_frame_size(resolved(first_frame="flux", **options)[0]) == size


def test_texts_are_what_each_branch_needs() -> None:
    assert [text.words for text in texts_of(resolved()[0])] == [
        "a red circle. 24 FPS. 4 motion score.", "",
    ]  # fmt: skip
    asked = {"guidance_scale": 1, "motion_score": 0, "fps": 12}
    assert [text.words for text in texts_of(resolved(**asked)[0])] == ["a red circle. 12 FPS."]
    # The picture's guidance alone needs the negative prompt too.
    guided = resolved(guidance_scale=1, image=PICTURE)[0]
    assert len(texts_of(guided)) == 2
    first = texts_of(resolved(first_frame="flux")[0])
    assert [text.words for text in first][2:] == ["a red circle"]


def test_a_length_in_seconds_is_the_nearest_that_can_be() -> None:
    settings, notes = resolved(seconds=2)
    assert settings.num_frames == 49
    assert "2 s become 49 frames" in notes[0]
    assert resolved(DEEP, seconds=2)[0].num_frames == 48
    _, notes = resolved(num_frames=133)
    assert "at most 129 frames" in notes[0]


@pytest.mark.parametrize(
    ("config", "given", "text"),
    [
        (VIDEO, {"prompt": None}, "draws what a prompt says; give one"),
        (VIDEO, {"prompt": "  "}, "the prompt is empty"),
        (VIDEO, {"num_frames": 128}, "num_frames must be .* got 128; try 125 or 129"),
        (DEEP, {"num_frames": 129}, "num_frames must be .* got 129; try 128 or 132"),
        (DEEP, {"num_frames": 4}, "try 1 or 8"),
        (VIDEO, {"size": "500x320"}, "width must be a multiple of 16, got 500; try 496 or 512"),
        (DEEP, {"size": "512x300"}, "height must be a multiple of 32, got 300; try 288 or 320"),
        (VIDEO, {"resolution": "720p"}, "resolution must be one of 256px, 768px, got '720p'"),
        (VIDEO, {"resolution": "256px", "aspect": "21:9"}, "the nearest is 2.39:1"),
        (VIDEO, {"chain": 2}, "chain"),
        (VIDEO, {"edit_strength": 0.5, "image": PICTURE}, "edit_strength has no effect"),
        (VIDEO, {"negative_prompt": "x", "guidance_scale": 1}, "no effect with guidance_scale 1"),
        (VIDEO, {"image": PICTURE, "num_frames": 1}, "ask for more frames, for example 5"),
        (VIDEO, {"image": PICTURE, "last_image": PICTURE, "num_frames": 5}, "for example 9"),
        (VIDEO, {"extend": CLIP, "num_frames": 33}, "for example"),
        (VIDEO, {"extend": CLIP, "last_image": PICTURE}, "can't be combined"),
        (VIDEO, {"extend": CLIP, "clip_at": "middle"}, "clip_at must be head or tail"),
        (VIDEO, {"extend": CLIP, "clip_frames": 32}, "try 29 or 33"),
        (VIDEO, {"clip_at": "tail"}, "clip_at has no effect without extend"),
        (VIDEO, {"image_guidance_scale": 2}, "image_guidance_scale has no effect without given"),
        (DEEP, {"image_fading": False}, "image_fading has no effect without given frames"),
        (VIDEO, {"image_oscillation": False}, "image_oscillation has no effect without given"),
        (VIDEO, {"image_fading": False, "extend": CLIP}, "image_fading is for given pictures"),
        (PLAIN, {"image": PICTURE}, "can't be given frames, .*; leave out image"),
        (PLAIN, {"first_frame": "flux"}, "leave out first_frame"),
        (VIDEO, {"first_frame": "sdxl"}, "first_frame must be flux, got 'sdxl'"),
        (VIDEO, {"first_frame": "flux", "image": PICTURE}, "image gives one; drop one"),
        (VIDEO, {"flux": "x/y"}, "flux has no effect without --first-frame flux"),
        (VIDEO, {"first_frame_resolution": "video"}, "no effect without --first-frame flux"),
        (
            VIDEO,
            {"first_frame": "flux", "first_frame_resolution": "720p"},
            "first_frame_resolution must be one of 256px, 768px, got '720p'.*, or video",
        ),
        (VIDEO, {"latents": np.zeros((1, 16, 2, 24, 42))}, r"shape \(1, 16, 33, 24, 42\)"),
    ],
)
def test_what_cannot_be_is_refused(
    config: OpenSora2Config, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        resolved(config, **given)


def test_a_clip_is_noted_as_untrained() -> None:
    settings, notes = resolved(extend=CLIP)
    assert settings.option("given_clip") == 33
    assert "published training of Open-Sora 2.0 left out" in notes[0]
    assert resolved(DEEP, extend=CLIP)[0].option("given_clip") == 32


@pytest.mark.parametrize(
    ("config", "there", "read"),
    [
        (VIDEO, 40, 33), (VIDEO, 33, 33), (VIDEO, 32, 29), (VIDEO, 5, 5), (VIDEO, 4, 1),
        (DEEP, 40, 32), (DEEP, 31, 28), (DEEP, 8, 8), (DEEP, 7, 1),
    ],
)  # fmt: skip
def test_as_many_frames_are_read_as_can_be_coded(
    config: OpenSora2Config, there: int, read: int
) -> None:
    settings, notes = resolved(config, extend=np.zeros((there, 8, 8, 3), np.uint8))
    assert settings.option("given_clip") == read
    config.vae.latent_frames(read)
    is_short = read < resolved(config, extend=CLIP)[0].option("given_clip")
    assert (f"has {there} frames, of which {read} are read" in notes[0]) == is_short


def test_a_short_clip_takes_no_more_room_than_it_has() -> None:
    short = np.zeros((7, 8, 8, 3), np.uint8)
    assert resolved(extend=short, num_frames=9)[0].num_frames == 9
    with pytest.raises(InputError, match=r"take 2 of them; .*for example 9"):
        resolved(extend=short, num_frames=5)
    with pytest.raises(InputError, match="extend must be a path, an array of frames"):
        resolved(extend=5)


@pytest.mark.parametrize("config", [VIDEO, DEEP])
def test_smaller_videos_can_be(config: OpenSora2Config) -> None:
    found = list(smaller_settings(config, resolved(config)[0]))
    assert len(found) > 5
    for each in found:
        latent_shape(config, each)
        assert each.height % config.size_step == each.width % config.size_step == 0
    pixels = [each.num_frames * each.height * each.width for each in found]
    assert pixels == sorted(pixels, reverse=True)
