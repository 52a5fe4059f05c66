"""Floats to 8 bits, and fitting pictures to a size."""

from __future__ import annotations

import numpy as np
import pytest

from everyframe.core.errors import InputError, NumericsError
from everyframe.media.pixels import fit_image, to_uint8


def test_rounds_and_clips_and_never_wraps() -> None:
    values = np.array([-0.2, 0.0, 0.5 / 255 + 1e-4, 0.999, 1.0, 1.2, 100 / 255], np.float32)
    frames = np.broadcast_to(values[:, None, None, None], (7, 2, 2, 3))
    # 0.999 x 255 = 254.7 is 255 rounded and 254 truncated; 1.2 would wrap to 50.
    assert to_uint8(frames)[:, 0, 0, 0].tolist() == [0, 0, 1, 255, 255, 255, 100]


def test_every_level_survives_each_float_type() -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=-1)
    for dtype in (np.float16, np.float32, np.float64):
        assert np.array_equal(to_uint8((levels / 255).astype(dtype)), levels)
    assert to_uint8(levels) is levels


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_names_the_frame(value: float) -> None:
    frames = np.full((5, 4, 4, 3), 0.5, np.float32)
    frames[3, 1, 2, 0] = value
    with pytest.raises(NumericsError, match="frame 19 has 1 values"):
        to_uint8(frames, first_index=16)


def test_other_integers_are_refused() -> None:
    with pytest.raises(InputError, match="int64"):
        to_uint8(np.zeros((1, 2, 2, 3), np.int64))


def _halves(height: int, width: int) -> np.ndarray:
    """Left half red, right half blue, with a green frame of 1/8 on the left and right edges."""
    image = np.zeros((height, width, 3), np.uint8)
    image[:, : width // 2, 0] = 255
    image[:, width // 2 :, 2] = 255
    image[:, : width // 8] = image[:, -(width // 8) :] = (0, 255, 0)
    return image


def test_crop_keeps_the_middle_and_its_proportions() -> None:
    fitted = fit_image(_halves(64, 128), 32, 32)
    assert fitted.shape == (32, 32, 3)
    assert fitted[:, 2].tolist() == [[255, 0, 0]] * 32  # the green edges are cut off
    assert fitted[:, 29].tolist() == [[0, 0, 255]] * 32


def test_pad_adds_black_bars_evenly() -> None:
    fitted = fit_image(_halves(64, 128), 32, 32, "pad")
    assert not fitted[:8].any()
    assert not fitted[24:].any()
    assert fitted[8:24].any(axis=-1).all()
    # Lanczos' weights are rounded to fixed point, so a flat colour may be off by a level.
    assert np.abs(fitted[16, 1].astype(int) - (0, 255, 0)).max() <= 1


def test_stretch_keeps_everything() -> None:
    fitted = fit_image(_halves(64, 128), 32, 32, "stretch")
    # Lanczos' weights are rounded to fixed point, so a flat colour may be off by a level.
    assert np.abs(fitted[16, 1].astype(int) - (0, 255, 0)).max() <= 1
    assert fitted[16, 8].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    ("size", "row", "wanted"),
    [
        ((3, 4), 1, [152, 104, 86, 114]),
        ((4, 9), 3, [177, 247, 135, 97, 133, 243, 171, 173, 249]),
        ((7, 8), 6, [69, 213, 208, 210, 242, 139, 60, 30]),
    ],
)
def test_cover_is_open_soras(size: tuple[int, int], row: int, wanted: list[int]) -> None:
    """Numbers of `resize_crop_to_fill` (opensora/datasets/utils.py of v1.2.0, and of 2.0) itself.

    It halves to the even number where it cuts an odd row or column: 4 of 9 begins at round(0.5).
    """
    y, x = np.mgrid[:5, :9]
    grey = ((37 * x * x + 59 * y + 11 * x * y) % 256).astype(np.uint8)
    fitted = fit_image(grey[..., None].repeat(3, axis=-1), *size, "cover")
    assert fitted.shape == (*size, 3)
    assert fitted[row, :, 0].tolist() == wanted


def test_fit_takes_videos_and_leaves_what_fits_alone() -> None:
    frames = np.stack([_halves(64, 128)] * 2)
    fitted = fit_image(frames, 32, 32)
    assert np.array_equal(fitted[1], fit_image(frames[1], 32, 32))
    assert fit_image(frames, 64, 128) is frames
    with pytest.raises(InputError, match="did you mean 'crop'"):
        fit_image(frames, 64, 64, "crob")
