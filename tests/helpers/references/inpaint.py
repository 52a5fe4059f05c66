"""Diffusers' own `StableDiffusionControlNetInpaintPipeline`, called as its documentation says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import ControlNetModel, StableDiffusionControlNetInpaintPipeline
from PIL import Image

PROMPT = "a red ball"
STEPS = 3

Array = np.ndarray[Any, Any]


def soft_mask(height: int, width: int) -> Array:
    """A white square with a rim of two greys, one to each side of the middle."""
    mask = np.zeros((height, width), np.uint8)
    mask[5:23, 3:21] = 90
    mask[6:22, 4:20] = 150
    mask[8:20, 6:18] = 255
    return mask


def start_noise(height: int, width: int, seed: int = 3) -> torch.Tensor:
    """Start latents of a picture of that size."""
    shape = (1, 4, height // 8, width // 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def load_pipeline(folder: Path) -> Any:
    """The pipeline of a folder with the ControlNet in it."""
    net = ControlNetModel.from_pretrained(folder / "controlnet")
    made = StableDiffusionControlNetInpaintPipeline.from_pretrained(
        folder, controlnet=net, safety_checker=None
    )
    made.set_progress_bar_config(disable=True)
    return made


def frames_of(pipe: Any, source: Array, mask: Array, control: Any, **options: Any) -> Array:
    """One float frame (1, H, W, 3)."""
    nets = control if isinstance(control, list) else [control]
    shown = [Image.fromarray(each) if isinstance(each, np.ndarray) else each for each in nets]
    frames: Array = pipe(
        PROMPT,
        image=Image.fromarray(source),
        mask_image=Image.fromarray(mask),
        control_image=shown if isinstance(control, list) else shown[0],
        generator=torch.Generator().manual_seed(7),
        output_type="np",
        **{"num_inference_steps": STEPS, **options},
    ).images
    return frames
