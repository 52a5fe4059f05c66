"""PSNR between two videos, frame by frame."""

from __future__ import annotations

from typing import Any

import numpy as np

#: PSNR of equal frames, which is infinite.
HIGHEST_DB = 100.0


def frame_psnr(a_THWC: Any, b_THWC: Any) -> Any:
    """PSNR (T,) in dB of each frame of floats in 0..1, (T, H, W, 3); at most `HIGHEST_DB`."""
    difference = np.asarray(a_THWC, np.float64) - np.asarray(b_THWC, np.float64)
    error = (difference**2).mean(axis=(1, 2, 3))
    return -10 * np.log10(np.maximum(error, 10 ** (-HIGHEST_DB / 10)))
