"""Input pictures for tests."""

from __future__ import annotations

from typing import Any

import numpy as np


def smooth_picture(height: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Smooth colours with a little noise on them, uint8 (H, W, 3)."""
    rows, columns = np.mgrid[0:height, 0:width]
    smooth = np.stack([rows * 255 / height, columns * 255 / width, 255 - rows * 255 / height], -1)
    noise = np.random.default_rng(seed).normal(0, 20, smooth.shape)
    return np.clip(smooth + noise, 0, 255).astype(np.uint8)
