"""Every value of a request resolved, and what can't be had refused with what can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from everyframe.core.errors import InputError
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.families.opensora.config import OpenSoraConfig, STDiT3Config, STDiTConfig
from everyframe.families.opensora.denoiser import timesteps_of
from everyframe.families.opensora.options import OpenSoraOptions
from everyframe.families.opensora.settings import (
    known_frames,
    resolutions,
    resolve_settings,
    smaller_settings,
)
from everyframe.families.opensora.vae_config import ImageVAEConfig, VideoVAEConfig
from everyframe.samplers import rectified_flow

V1_2 = OpenSoraConfig("1.2", STDiT3Config(), VideoVAEConfig(), {}, has_scores=True)
V1_0 = OpenSoraConfig("1.0", STDiTConfig(), ImageVAEConfig(), {}, square=256)
EMBEDDED = replace(
    V1_2, defaults={"height": 64, "width": 64, "num_frames": 17, "fps": 12}, has_scores=False
)
OWN = set(OpenSoraOptions.model_fields)
PICTURE = np.zeros((8, 8, 3), np.uint8)


def resolved(config: OpenSoraConfig = V1_2, **options: Any) -> tuple[Settings, tuple[str, ...]]:
    own = {name: options.pop(name) for name in list(options) if name in OWN}
    request = Request(**{"prompt": "a cat", **options})
    title = f"Open-Sora {config.version}"
    return resolve_settings(config, title, request, OpenSoraOptions(**own), seed=4)


def settings(config: OpenSoraConfig = V1_2, **options: Any) -> Settings:
    return resolved(config, **options)[0]


def test_upstreams_defaults() -> None:
    found, notes = resolved()
    assert (found.height, found.width, found.num_frames, found.fps) == (240, 424, 51, 24.0)
    assert (found.num_inference_steps, found.guidance_scale, found.seed) == (30, 7.0, 4)
    assert found.option("aesthetic") == 6.5
    # The model is given the size that its weights were trained on, not the one that is decoded.
    assert found.nominal_size == found.conditioned_size == (240, 426)
    assert notes == ("426x240 becomes 424x240: the autoencoder works in steps of 8 pixels",)
    older = settings(V1_0)
    assert (older.height, older.width, older.num_frames, older.fps) == (256, 256, 16, 8.0)
    assert (older.num_inference_steps, older.option("aesthetic")) == (100, None)


def test_a_checkpoints_own_defaults_come_first_and_the_rest_is_upstreams() -> None:
    found = settings(EMBEDDED)
    assert (found.height, found.width, found.num_frames, found.fps) == (64, 64, 17, 12.0)
    assert (found.num_inference_steps, found.option("aesthetic")) == (30, None)


def test_timesteps_are_moved_by_the_size_and_by_the_checkpoints_own_shift() -> None:
    """To the size that the model is given, and only where a checkpoint asks for that or is one of
    upstream's; a shift of its own is on top."""
    upstream = rectified_flow.schedule(30, resolution=(240, 426), num_frames=51)
    assert torch.equal(timesteps_of(settings(), V1_2), upstream)
    assert torch.equal(timesteps_of(settings(EMBEDDED), EMBEDDED), rectified_flow.schedule(30))
    for own, expected in (
        ({"timestep_shift": 4.0}, {"shift": 4.0}),
        (
            {"timestep_shift": 14.0, "use_timestep_transform": True},
            {"shift": 14.0, "resolution": (64, 64), "num_frames": 17},
        ),
    ):
        config = replace(EMBEDDED, defaults={**EMBEDDED.defaults, **own})
        assert torch.equal(
            timesteps_of(settings(config), config), rectified_flow.schedule(30, **expected)
        )


@pytest.mark.parametrize(
    ("resolution", "aspect", "size"),
    [
        ("720p", "16:9", (720, 1280)), ("720p", "9:16", (1280, 720)), ("360p", None, (360, 640)),
        ("480P", "1:1", (640, 640)), ("144p", "32:18", (144, 256)), ("240p", "4:3", (272, 368)),
    ],
)  # fmt: skip
def test_named_sizes_are_width_to_height(
    resolution: str, aspect: str | None, size: tuple[int, int]
) -> None:
    options = {"resolution": resolution} | ({"aspect": aspect} if aspect else {})
    found = settings(**options)
    assert (found.height, found.width) == size


def test_the_table_is_what_it_says() -> None:
    for name, sizes in resolutions().items():
        assert len(sizes) == 17
        for aspect, (height, width) in sizes.items():
            across, down = map(int, aspect.split(":"))
            # Upstream rounds sides to even numbers, and 144p and 12:25 loosely.
            assert abs(width / height / (across / down) - 1) < 0.08, (name, aspect)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": "500x64"}, "width must be a multiple of 8, got 500; try 496 or 504"),
        ({"size": "64x4"}, "height must be a multiple of 8, got 4; try 8"),
        ({"resolution": "350p"}, "got '350p'; did you mean '360p'"),
        ({"resolution": "360p", "aspect": "16:10.5"}, "aspect must be width:height"),
        ({"resolution": "360p", "aspect": "17:10"}, "got 17:10; the nearest is 16:9"),
        ({"aspect": "16:9"}, "aspect needs a resolution"),
        ({"size": "64x64", "resolution": "360p"}, "size and resolution both set the size"),
        ({"height": 64}, "height was given without width"),
        ({"num_frames": 17, "seconds": 1}, "both set the length"),
        ({"seconds": 1e9}, "at most 100000 can be asked for"),
        ({"seconds": 1e308}, "at most 100000 can be asked for"),
        ({"negative_prompt": "x", "guidance_scale": 1}, "negative_prompt has no effect"),
        ({"edit_strength": 0.5}, "edit_strength has no effect without given frames"),
        ({"prompt": "红色的猫"}, "Chinese characters"),
        ({"negative_prompt": "红色的猫"}, "Chinese characters"),
        ({"prompt": None}, "draws what a prompt says"),
        ({"image": PICTURE, "num_frames": 1}, "1 frames are 1 latent frames.*example 17"),
        ({"extend": PICTURE, "num_frames": 18, "last_image": PICTURE}, "take 6 .*example 34"),
        ({"chain": 2, "num_frames": 18, "last_image": PICTURE}, "take 6 of them"),
        ({"chain": 2, "num_frames": 1}, "take 1 of them"),
    ],
)  # fmt: skip
def test_what_1_2_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        resolved(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": "248x64"}, "width must be a multiple of 16, got 248; try 240 or 256"),
        ({"resolution": "360p"}, "no named resolutions.*trained at 256x256"),
        ({"aesthetic": 6.5}, "aesthetic has no effect on Open-Sora 1.0"),
        ({"motion_score": 6.5}, "motion_score has no effect"),
        ({"camera_motion": "pan"}, "camera_motion has no effect"),
        ({"image": PICTURE}, r"can't take given frames \(image\)"),
        ({"chain": 2}, "can't continue a clip"),
        ({"num_inference_steps": 1001}, "at most 1000 for Open-Sora 1.0, got 1001"),
    ],
)
def test_what_1_0_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        resolved(V1_0, **options)


def test_scores_are_for_weights_that_were_trained_with_them() -> None:
    with pytest.raises(InputError, match="aesthetic has no effect"):
        resolved(EMBEDDED, aesthetic=5)
    assert settings(aesthetic=None).option("aesthetic") is None
    assert settings(aesthetic=4, motion_score=2).option("motion_score") == 2


@pytest.mark.parametrize(
    ("seconds", "fps", "frames"), [(2, None, 51), (4.25, 24, 102), (0.01, 24, 17), (1, 12, 17)]
)
def test_seconds_become_whole_pieces(seconds: float, fps: float | None, frames: int) -> None:
    found, notes = resolved(size="64x64", seconds=seconds, **({"fps": fps} if fps else {}))
    assert found.num_frames == frames
    exact = round(seconds * (fps or 24)) == frames
    assert any("pieces of 17" in note for note in notes) is not exact


def test_seconds_of_1_0_are_exact() -> None:
    assert settings(V1_0, seconds=2.5).num_frames == 20


def test_untrained_lengths_are_reported() -> None:
    assert any("not on 34" in note for note in resolved(num_frames=34)[1])
    assert not any("trained on" in note for note in resolved(num_frames=68)[1])


@pytest.mark.parametrize("given", [(4, 5, 8, 8), (1, 4, 17, 8, 8), (1, 4, 5, 64, 64)])
def test_start_noise_of_another_shape_is_refused(given: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"shape \(1, 4, 5, 8, 8\) for 17 frames of 64x64, got \("):
        resolved(size="64x64", num_frames=17, latents=np.zeros(given, np.float32))
    with pytest.raises(InputError, match="got str"):
        resolved(size="64x64", num_frames=17, latents="noise")
    resolved(size="64x64", num_frames=17, latents=np.zeros((1, 4, 5, 8, 8), np.float32))


def test_going_on_needs_a_piece_or_a_picture() -> None:
    assert known_frames(V1_2, settings(num_frames=34)) == (17, 5)
    assert known_frames(V1_2, settings(num_frames=17)) == (1, 1)


def test_smaller_settings_are_valid_requests_and_grow_smaller() -> None:
    first = settings(resolution="720p", num_frames=102)
    pixels = first.height * first.width * first.num_frames
    found = list(smaller_settings(V1_2, first))
    assert len(found) > 5
    for each in found:
        size = each.height * each.width * each.num_frames
        assert size <= pixels
        pixels = size
        options = {"size": f"{each.width}x{each.height}", "num_frames": each.num_frames}
        again = settings(**options)
        assert (again.height, again.width, again.options) == (each.height, each.width, each.options)
