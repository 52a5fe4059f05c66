"""Canny edge detection for ControlNets that were trained on its output.

Canny 1986, "A Computational Approach to Edge Detection", as in OpenCV, whose edges these
ControlNets saw in training (`cv2.Canny` with its 3x3 Sobel filter and no blur): L1 gradient of the
channel where it is largest; non-maximum suppression in integer arithmetic; hysteresis, where weak
edges stay only if connected to strong ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from everyframe.media.pixels import Frames

#: Thresholds used in diffusers' documentation and by the ControlNets' authors.
LOW, HIGH = 100.0, 200.0

#: tan(22.5°) as fixed point with 15 fractional bits.
_TAN_22 = 13573
_SHIFT = 15

Grey = npt.NDArray[np.uint8]


def canny(picture: Frames, low: float = LOW, high: float = HIGH) -> Grey:
    """Canny edges (H, W) of an image (H, W, 3): 255 on an edge, 0 elsewhere.

    A gradient above `high` is an edge; one above `low` is an edge if connected to one.
    """
    low, high = np.floor(min(low, high)), np.floor(max(low, high))
    dx, dy, strength = _gradient(picture)
    candidates = _thin(dx, dy, strength) & (strength > low)
    return _hysteresis(candidates, candidates & (strength > high)).astype(np.uint8) * 255


def _gradient(picture: Frames) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Sobel derivatives along x and y, and their L1 norm, (H, W) each."""
    padded = np.pad(picture.astype(np.int64), ((1, 1), (1, 1), (0, 0)), mode="edge")
    across = padded[:, 2:] - padded[:, :-2]
    dx = across[:-2] + 2 * across[1:-1] + across[2:]
    down = padded[2:] - padded[:-2]
    dy = down[:, :-2] + 2 * down[:, 1:-1] + down[:, 2:]
    norm = np.abs(dx) + np.abs(dy)
    best = norm.argmax(axis=-1)[..., None]
    chosen = (np.take_along_axis(each, best, axis=-1)[..., 0] for each in (dx, dy, norm))
    return tuple(chosen)  # type: ignore[return-value]


def _thin(
    dx: npt.NDArray[Any], dy: npt.NDArray[Any], strength: npt.NDArray[Any]
) -> npt.NDArray[np.bool_]:
    """Non-maximum suppression along the gradient, in four directions.

    Of two equal neighbours, the left or upper one remains; along diagonals neither does.
    """
    around = np.pad(strength, 1)
    rows, columns = strength.shape

    def at(row: int, column: int) -> npt.NDArray[Any]:
        return around[1 + row : 1 + row + rows, 1 + column : 1 + column + columns]

    x, y = np.abs(dx), np.abs(dy) << _SHIFT
    flat = x * _TAN_22
    steep = flat + (x << (_SHIFT + 1))
    is_flat, is_steep = y < flat, y > steep
    same_sign = (dx ^ dy) >= 0
    along_x = (strength > at(0, -1)) & (strength >= at(0, 1))
    along_y = (strength > at(-1, 0)) & (strength >= at(1, 0))
    falling = (strength > at(-1, -1)) & (strength > at(1, 1))
    rising = (strength > at(-1, 1)) & (strength > at(1, -1))
    diagonal = np.where(same_sign, falling, rising)
    maximum: npt.NDArray[np.bool_] = np.where(
        is_flat, along_x, np.where(is_steep, along_y, diagonal)
    )
    return maximum


def _hysteresis(
    weak: npt.NDArray[np.bool_], strong: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Pixels of `weak` that are connected to `strong`, diagonally too."""
    found, front = strong.copy(), np.argwhere(strong)
    rows, columns = weak.shape
    steps = np.array([(r, c) for r in (-1, 0, 1) for c in (-1, 0, 1) if r or c])
    while len(front):
        near = (front[:, None] + steps).reshape(-1, 2)
        inside = ((near >= 0) & (near < (rows, columns))).all(axis=1)
        near = near[inside]
        fresh = weak[near[:, 0], near[:, 1]] & ~found[near[:, 0], near[:, 1]]
        front = np.unique(near[fresh], axis=0)
        found[front[:, 0], front[:, 1]] = True
    whole: npt.NDArray[np.bool_] = found
    return whole
