"""PSNR of frames against the formula's known values."""

from __future__ import annotations

import numpy as np
import pytest

from everyframe.numerics.psnr import HIGHEST_DB, frame_psnr


def test_known_values_frame_by_frame() -> None:
    a = np.zeros((3, 2, 2, 3), np.float32)
    b = np.stack([a[0], a[1] + 0.1, a[2] + 0.01])
    assert frame_psnr(a, b) == pytest.approx([HIGHEST_DB, 20, 40], abs=1e-4)
