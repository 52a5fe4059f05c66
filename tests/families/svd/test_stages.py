"""Whole runs against diffusers' own `StableVideoDiffusionPipeline`, in process and in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableVideoDiffusionPipeline
from PIL import Image

import everyframe
import tiny_svd

#: Largest difference of a float frame; the bar is 1e-4. The sampler's arithmetic is the same, the
#: image encoder's input and batches are rounded elsewhere: 5e-6 was measured.
CLOSE = 2e-5
SIZES: dict[str, Any] = {"height": 32, "width": 48, "num_frames": 3, "num_inference_steps": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_svd.svd(tmp_path_factory.mktemp("models") / "tiny-svd")


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    loaded = StableVideoDiffusionPipeline.from_pretrained(folder)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def picture(height: int, width: int) -> np.ndarray[Any, Any]:
    """Smooth colours with a little noise on them, uint8 (H, W, 3)."""
    rows, columns = np.mgrid[0:height, 0:width]
    smooth = np.stack([rows * 255 / height, columns * 255 / width, 255 - rows * 255 / height], -1)
    noise = np.random.default_rng(0).normal(0, 20, smooth.shape)
    return np.clip(smooth + noise, 0, 255).astype(np.uint8)


def latents_of(options: dict[str, Any], seed: int = 3) -> torch.Tensor:
    shape = (1, options["num_frames"], 4, options["height"] // 8, options["width"] // 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ours(folder: Path, image: Any, **options: Any) -> np.ndarray[Any, Any]:
    video = everyframe.generate(model=str(folder), image=image, output="float", **options)
    assert isinstance(video, everyframe.Video)
    return video.frames


def theirs(pipe: Any, image: np.ndarray[Any, Any], **options: Any) -> np.ndarray[Any, Any]:
    seed = options.pop("seed", 0)
    frames: np.ndarray[Any, Any] = pipe(
        Image.fromarray(image),
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        **options,
    ).frames[0]
    return frames


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"height": 24, "width": 40, "num_frames": 5},
        {"height": 64, "width": 32, "num_frames": 1},
        {"num_frames": 4, "decode_chunk_size": 1},
        {"num_frames": 5, "decode_chunk_size": 2},
        {"min_guidance_scale": 1.0, "max_guidance_scale": 1.0},
        {"min_guidance_scale": 0.5, "max_guidance_scale": 0.5},
        {"min_guidance_scale": 2.5, "max_guidance_scale": 1.5},
        {"motion_bucket_id": 20, "noise_aug_strength": 0.3, "fps": 12},
        {"noise_aug_strength": 0.0, "num_inference_steps": 1},
        {"num_inference_steps": 12},
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
