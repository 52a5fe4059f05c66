"""Whole runs against diffusers' own `StableVideoDiffusionPipeline`, in process and in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import everyframe
from everyframe.core.events import ComponentLoaded, StageDone, Step
from everyframe.core.request import Request
from everyframe.media.pixels import fit_image
from helpers.pictures import smooth_picture as picture
from helpers.references.svd import SIZES, load_pipeline
from helpers.references.svd import frames_of as theirs
from helpers.references.svd import start_noise as latents_of
from helpers.slow_rows import slow_unless
from helpers.tiny_checkpoints import svd as tiny_svd

#: Largest difference of a float frame; 1e-4 is what we promise. Sums are made in diffusers' order,
#: so nearly all bits are the same; one step from sigma 700 to 0 enlarges a last bit by 700 (4e-5
#: measured; 5e-6 with more steps).
CLOSE = 5e-5


@pytest.fixture(scope="module")
def folder(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("svd")


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    return load_pipeline(folder)


def ours(folder: Path, image: Any, **options: Any) -> np.ndarray[Any, Any]:
    video = everyframe.generate(model=str(folder), image=image, output="float", **options)
    assert isinstance(video, everyframe.Video)
    return video.frames


@pytest.mark.parametrize(
    "changed",
    [
        {"height": 24, "width": 40, "num_frames": 5},
        # With min_guidance_scale 1, one frame alone is something that diffusers trips over.
        {"height": 64, "width": 32, "num_frames": 1, "min_guidance_scale": 2.0},
        pytest.param({"num_frames": 4, "decode_chunk_size": 1}, marks=pytest.mark.slow),
        {"num_frames": 5, "decode_chunk_size": 2},
        {"min_guidance_scale": 1.0, "max_guidance_scale": 1.0},
        pytest.param(
            {"min_guidance_scale": 0.5, "max_guidance_scale": 0.5}, marks=pytest.mark.slow
        ),
        {"min_guidance_scale": 2.5, "max_guidance_scale": 1.5},
        {"motion_bucket_id": 20, "noise_aug_strength": 0.3, "fps": 12},
        {"noise_aug_strength": 0.0, "num_inference_steps": 1},
        pytest.param({"num_inference_steps": 12}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_frames_are_those_of_diffusers(folder: Path, pipe: Any, changed: dict[str, Any]) -> None:
    options = {**SIZES, **changed}
    image = picture(options["height"], options["width"])
    latents = latents_of(options)
    made = ours(folder, image, latents=latents, seed=7, **options)
    wanted = theirs(pipe, image, latents=latents, seed=7, **options)
    assert made.shape == wanted.shape
    assert np.abs(made - wanted).max() < CLOSE
    # The comparison means something: the frames are neither flat nor clipped away.
    assert wanted.std() > 0.05


@pytest.mark.parametrize("size", [(50, 70), (500, 260)])
def test_a_stretched_picture_of_any_size_is_diffusers_too(
    folder: Path, pipe: Any, size: tuple[int, int]
) -> None:
    image, latents = picture(*size), latents_of(SIZES)
    made = ours(folder, Image.fromarray(image), latents=latents, seed=1, fit="stretch", **SIZES)
    wanted = theirs(pipe, image, latents=latents, seed=1, **SIZES)
    assert np.abs(made - wanted).max() < CLOSE


@pytest.mark.parametrize("fit", slow_unless(["pad"], ["crop", "pad"]))
def test_another_fit_is_that_of_the_fitted_picture(folder: Path, fit: str) -> None:
    image, latents = picture(50, 40), latents_of(SIZES)
    made = ours(folder, image, latents=latents, seed=1, fit=fit, **SIZES)
    fitted = fit_image(image, SIZES["height"], SIZES["width"], fit)
    assert np.array_equal(made, ours(folder, fitted, latents=latents, seed=1, **SIZES))


def test_a_decoder_of_single_pictures(tmp_path: Path) -> None:
    """Against the autoencoder itself: diffusers' pipeline takes it, too, and decodes in chunks."""
    folder = tiny_svd.svd(tmp_path / "image-decoder", image_vae=True)
    pipe = load_pipeline(folder)
    image, latents = picture(SIZES["height"], SIZES["width"]), latents_of(SIZES)
    options = {**SIZES, "decode_chunk_size": 2}
    made = ours(folder, image, latents=latents, seed=2, **options)
    wanted = theirs(pipe, image, latents=latents, seed=2, **options)
    assert np.abs(made - wanted).max() < CLOSE


def test_stages_and_steps_are_events(folder: Path) -> None:
    image = picture(SIZES["height"], SIZES["width"])
    request = Request(model=str(folder), image=image, seed=1, decode_chunk_size=2, **SIZES)
    seen = list(everyframe.stream(request))
    loaded = [event.component for event in seen if isinstance(event, ComponentLoaded)]
    assert loaded == ["image_encoder", "vae", "unet", "vae"]
    stages = [event.stage for event in seen if isinstance(event, StageDone)]
    assert stages == ["image", "given frames", "denoise", "decode"]
    steps = [
        (event.stage, event.step, event.num_steps) for event in seen if isinstance(event, Step)
    ]
    denoise = [("denoise", step, 3) for step in (1, 2, 3)]
    assert steps == [
        ("image", 1, 1), ("given frames", 1, 1), *denoise, ("decode", 1, 2), ("decode", 2, 2),
    ]  # fmt: skip
