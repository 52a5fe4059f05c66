"""The world that `shapes` learns: one flat shape on a flat background, moving in one way.

A clip is a `Scene` (the content of a caption) with random position, size and speed. `draw` renders
clips with torch on any device, fast enough to render new ones at every training step. Edges are
antialiased analytically: a pixel's coverage is its clipped distance to the edge. Captions are in
`captions.py`; `reader.py` reads scenes back from frames.

Shapes of arrays: B clips, T frames, H rows, W columns, 3 colours.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everyframe.checkpoints.shapes_prompts import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    SHAPES,
    Scene,
    why_not,
)

Floats = NDArray[Any]
"""Float32 arrays; numpy's own types lose that at every step of arithmetic."""


@dataclass(frozen=True)
class Format:
    """Side in pixels and number of frames of a clip."""

    side: int
    num_frames: int

    def __str__(self) -> str:
        return f"{self.side}x{self.side}, {self.num_frames} frames"


SMALL, LARGE = Format(64, 17), Format(128, 34)
FORMATS = (SMALL, LARGE)


def batch_sizes(batch: int, share: int = 4) -> tuple[int, int]:
    """Clips of each of `FORMATS` in a step: `batch` small ones, a large one for each `share`."""
    return batch, max(1, batch // share)


UNIT = 64  # pixels of a side that places and sizes refer to, whatever size is drawn
FPS = 12

PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (30, 170, 60),
    "blue": (40, 80, 235),
    "yellow": (250, 220, 30),
    "purple": (150, 50, 200),
    "orange": (255, 135, 0),
    "white": (250, 250, 250),
    "cyan": (0, 210, 230),
    "black": (8, 8, 8),
    "grey": (128, 128, 128),
    "navy": (10, 15, 80),
    "brown": (105, 62, 30),
}
"""sRGB 0..255. Blue is one colour, whether it is the object's or the background's."""

# Circumscribed radius of each shape at size 1, so that all of them look about equally large.
_RADIUS = {"circle": 1.0, "square": 1.25, "triangle": 1.4, "star": 1.6}
_MARGIN = 3.0  # pixels between the object and the frame's edge, so that the rim is background


@dataclass(frozen=True)
class Clips:
    """Scenes with everything that their captions leave open.

    `start` and `end` (B, 4) are x, y, size (pixels of a frame of 64 x 64) and angle (radians) in
    the first and the last frame; between them values go in a straight line.
    """

    scenes: list[Scene]
    start: Tensor
    end: Tensor

    def __len__(self) -> int:
        return len(self.scenes)

    def rows(self, index: Sequence[int]) -> Clips:
        """Some of them."""
        chosen = torch.tensor(list(index))
        return Clips([self.scenes[i] for i in index], self.start[chosen], self.end[chosen])


def drawable(scene: Scene) -> bool:
    """Not a turning circle (nobody could see it), not an object in its background's colour."""

    return why_not(scene) is None


def held_out(scene: Scene) -> bool:
    """Whether this combination is never trained on: one in ten, by a hash of its words."""
    text = " ".join((scene.shape, scene.colour, scene.background, scene.motion))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 10 == 0


def all_scenes() -> list[Scene]:
    """Every drawable scene, in a fixed order."""
    every = (Scene(*words) for words in product(SHAPES, COLOURS, BACKGROUNDS, MOTIONS))
    return [scene for scene in every if drawable(scene)]


@lru_cache
def train_scenes() -> tuple[Scene, ...]:
    return tuple(scene for scene in all_scenes() if not held_out(scene))


@lru_cache
def held_out_scenes() -> tuple[Scene, ...]:
    return tuple(scene for scene in all_scenes() if held_out(scene))


def random_clips(scenes: Sequence[Scene], rng: np.random.Generator) -> Clips:
    """A clip of each scene at a random place, size and speed that stays inside the frame."""
    count, motions = len(scenes), np.array([scene.motion for scene in scenes])
    size = rng.uniform(7.0, 10.5, count)
    grows, shrinks = motions == "growing", motions == "shrinking"
    smaller = rng.uniform(5.5, 7.0, count)
    larger = smaller * rng.uniform(1.7, 2.0, count)
    size_end = np.select([grows, shrinks], [larger, smaller], size)
    size = np.select([grows, shrinks], [smaller, larger], size)
    radius = np.array([_RADIUS[scene.shape] for scene in scenes])
    low = _MARGIN + np.maximum(size, size_end) * radius
    high = UNIT - low
    x, y = rng.uniform(low, high), rng.uniform(low, high)
    x_end, y_end = x, y
    # What grows may have less way than this; only what moves takes it.
    way = rng.uniform(15.0, np.clip(high - low, 15.0, 30.0))
    near = rng.uniform(low, np.maximum(low, high - way))
    for motion, sign in (("right", 1), ("left", -1), ("down", 1), ("up", -1)):
        moves = motions == motion
        first, last = (near, near + way) if sign > 0 else (near + way, near)
        if motion in ("right", "left"):
            x, x_end = np.where(moves, first, x), np.where(moves, last, x_end)
        else:
            y, y_end = np.where(moves, first, y), np.where(moves, last, y_end)
    angle_end = np.where(motions == "turning", rng.uniform(0.9, 1.4, count), 0.0)
    start = np.stack([x, y, size, np.zeros(count)], axis=1)
    end = np.stack([x_end, y_end, size_end, angle_end], axis=1)
    return Clips(list(scenes), torch.from_numpy(start).float(), torch.from_numpy(end).float())


def random_scenes(scenes: Sequence[Scene], count: int, rng: np.random.Generator) -> list[Scene]:
    """`count` of `scenes`, each drawn anew."""
    return [scenes[i] for i in rng.integers(len(scenes), size=count)]


def draw(clips: Clips, side: int, times: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Clips -> frames (B, T, 3, side, side), float32 in -1..1 as models take them.

    `times` (B, T) says when in each clip, 0 the first frame and 1 the last.
    """
    at_BT4 = clips.start[:, None] + (clips.end - clips.start)[:, None] * times[..., None]
    cover = torch.zeros(*times.shape, side, side, device=device)
    for shape in SHAPES:
        rows = [i for i, scene in enumerate(clips.scenes) if scene.shape == shape]
        if rows:
            _paint(cover, torch.tensor(rows), shape, at_BT4[rows])
    colour = _rgb([scene.colour for scene in clips.scenes], device)
    ground = _rgb([scene.background for scene in clips.scenes], device)
    return (ground + cover[:, :, None] * (colour - ground)) * 2 - 1


def draw_whole(clips: Clips, form: Format, device: torch.device | str = "cpu") -> Tensor:
    """All frames of clips (B, T, 3, side, side), as `draw` gives them."""
    return draw(
        clips, form.side, torch.linspace(0, 1, form.num_frames).expand(len(clips), -1), device
    )


def sent(values: Tensor, device: torch.device | str) -> Tensor:
    """`values` on the device, without waiting for what it still computes."""
    return values.to(device, non_blocking=True)


def _rgb(names: list[str], device: torch.device | str) -> Tensor:
    """(B, 1, 3, 1, 1) of colours in 0..1."""
    values = torch.tensor([PALETTE[name] for name in names], dtype=torch.float32) / 255
    return sent(values[:, None, :, None, None], device)


def _paint(cover: Tensor, rows: Tensor, shape: str, at_BT4: Tensor) -> None:
    """Writes the cover of a shape that is so (x, y, size, angle) into `rows` of (B, T, H, W)."""
    side, device = cover.shape[-1], cover.device
    # Only a window around the object is computed; it is the same for all, and inside the frame.
    largest = float(at_BT4[..., 2].max()) * (side / UNIT)
    window = min(side, 2 * math.ceil(largest * _RADIUS[shape] + 1.5))
    rows, at_BT4 = sent(rows, device), sent(at_BT4, device)
    x, y, size = (at_BT4[..., :3] * (side / UNIT)).unbind(-1)
    left, top = ((place.floor() - window // 2).clamp(0, side - window) for place in (x, y))
    values = (x - left, y - top, size, at_BT4[..., 3])
    x, y, size, angle = (value[..., None, None] for value in values)
    part = shape_cover(shape, x, y, size, angle, window)
    steps = torch.arange(window, device=device)
    down, across = top.long()[..., None] + steps, left.long()[..., None] + steps
    frames = torch.arange(at_BT4.shape[1], device=device)[None, :, None, None]
    cover[rows[:, None, None, None], frames, down[..., None], across[..., None, :]] = part


def shape_cover(
    shape: str, x: Tensor, y: Tensor, size: Tensor, angle: Tensor, side: int = UNIT
) -> Tensor:
    """How much of each pixel the shape covers, 0..1: parameters (..., 1, 1) -> (..., side, side).

    `x`, `y` is the centre in pixels, `angle` turns clockwise (rows go down) from upright.
    """
    grid = torch.arange(side, dtype=torch.float32, device=x.device) + 0.5
    dx, dy = grid - x, grid[:, None] - y
    radius = size * _RADIUS[shape]
    if shape == "circle":
        return (0.5 + radius - (dx * dx + dy * dy).sqrt()).clamp(0, 1)
    # Every other shape is made of lines: how far a pixel is beyond each of them.
    corners = {"square": 4, "triangle": 3, "star": 5}[shape]
    # A line's distance from the centre, in radii; a star's lines join every second corner.
    inner = math.cos(math.pi / corners) if shape != "star" else math.cos(2 * math.pi / 5)
    first = math.pi / 3 if shape == "triangle" else 0.0  # the direction of a line's outer side
    beyond = []
    for k in range(corners):
        normal = angle + (first + 2 * math.pi * k / corners)
        beyond.append(dx * normal.sin() - dy * normal.cos() - inner * radius)
    largest, distance = beyond[0], beyond[0]
    if shape == "star":  # inside at least four of a pentagram's five lines
        largest, distance = torch.maximum(*beyond[:2]), torch.minimum(*beyond[:2])
        for other in beyond[2:]:
            distance = torch.maximum(distance, torch.minimum(largest, other))
            largest = torch.maximum(largest, other)
    else:
        for other in beyond[1:]:
            distance = torch.maximum(distance, other)
    return (0.5 - distance).clamp(0, 1)


def pictures(frames: Tensor) -> Floats:
    """Frames (..., 3, H, W) in -1..1 -> (..., H, W, 3) in 0..1, as people take them."""
    shown: Floats = (frames.clamp(-1, 1) / 2 + 0.5).movedim(-3, -1).float().cpu().numpy()
    return shown
