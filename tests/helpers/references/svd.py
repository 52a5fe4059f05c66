"""Diffusers' own `StableVideoDiffusionPipeline`, called as its documentation says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableVideoDiffusionPipeline
from PIL import Image

SIZES: dict[str, Any] = {"height": 32, "width": 48, "num_frames": 3, "num_inference_steps": 3}


def start_noise(options: dict[str, Any], seed: int = 3) -> torch.Tensor:
    """Start latents of these sizes."""
    shape = (1, options["num_frames"], 4, options["height"] // 8, options["width"] // 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def load_pipeline(folder: Path) -> Any:
    """The pipeline of a folder."""
    loaded = StableVideoDiffusionPipeline.from_pretrained(folder)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def frames_of(pipe: Any, image: np.ndarray[Any, Any], **options: Any) -> np.ndarray[Any, Any]:
    """Float frames (T, H, W, 3) of that picture."""
    seed = options.pop("seed", 0)
    frames: np.ndarray[Any, Any] = pipe(
        Image.fromarray(image),
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        **options,
    ).frames[0]
    return frames
