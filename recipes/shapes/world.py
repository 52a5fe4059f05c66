"""The world that `shapes` learns: one flat shape on a flat background, moving in one way.

A `Scene` (what a caption says) plus random place, size and speed is a `Clip`; `draw` renders clips
with numpy alone. Edges are antialiased analytically: a pixel's cover is its distance to the edge,
clipped. Captions are in `captions.py`, reading scenes back from frames in `reader.py`.

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
from numpy.typing import NDArray

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

SIDE = 64
NUM_FRAMES = 17
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
class Clip:
    """A scene with everything that its caption leaves open. Pixels, at 64 x 64; radians.

    Values go in a straight line from the first frame's to the last one's.
    """

    scene: Scene
    centre: tuple[float, float]
    centre_end: tuple[float, float]
    size: float
    size_end: float
    angle_end: float = 0.0


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


def random_clip(scene: Scene, rng: np.random.Generator) -> Clip:
    """A clip of `scene` at a random place, size and speed that stays inside the frame."""
    size = size_end = float(rng.uniform(7.0, 10.5))
    if scene.motion in ("growing", "shrinking"):
        size = float(rng.uniform(5.5, 7.0))
        size_end = size * float(rng.uniform(1.7, 2.0))
        if scene.motion == "shrinking":
            size, size_end = size_end, size
    reach = _MARGIN + max(size, size_end) * _RADIUS[scene.shape]
    low, high = reach, SIDE - reach
    x, y = (float(value) for value in rng.uniform(low, high, 2))
    end = (x, y)
    if scene.motion in ("right", "left", "up", "down"):
        way = float(rng.uniform(15.0, min(30.0, high - low)))
        near = float(rng.uniform(low, high - way))
        far = near + way
        if scene.motion in ("left", "up"):
            near, far = far, near
        sideways = scene.motion in ("right", "left")
        (x, y), end = ((near, y), (far, y)) if sideways else ((x, near), (x, far))
    angle = float(rng.uniform(0.9, 1.4)) if scene.motion == "turning" else 0.0
    return Clip(scene, (x, y), end, size, size_end, angle)


def random_clips(scenes: Sequence[Scene], count: int, rng: np.random.Generator) -> list[Clip]:
    """`count` clips, each of a random one of `scenes`."""
    return [random_clip(scenes[i], rng) for i in rng.integers(len(scenes), size=count)]


def draw(clips: Sequence[Clip], times: Floats | None = None, side: int = SIDE) -> Floats:
    """Clips -> frames (B, T, side, side, 3), float32 in 0..1.

    `times` (B, T) says when in each clip, 0 the first frame and 1 the last; by default all 17.
    """
    if times is None:
        line = np.linspace(0.0, 1.0, NUM_FRAMES, dtype=np.float32)
        times = np.broadcast_to(line, (len(clips), NUM_FRAMES))
    cover = np.empty((*times.shape, side, side), np.float32)
    for shape in SHAPES:
        rows = [i for i, clip in enumerate(clips) if clip.scene.shape == shape]
        if rows:
            cover[rows] = _cover(shape, [clips[i] for i in rows], times[rows], side)
    colour = np.array([PALETTE[clip.scene.colour] for clip in clips], np.float32) / 255
    ground = np.array([PALETTE[clip.scene.background] for clip in clips], np.float32) / 255
    colour, ground = colour[:, None, None, None, :], ground[:, None, None, None, :]
    frames: Floats = ground + cover[..., None] * (colour - ground)
    return frames


def _cover(shape: str, clips: Sequence[Clip], times: Floats, side: int) -> Floats:
    def along(start: list[float], end: list[float]) -> Floats:
        first, last = np.array(start, np.float32)[:, None], np.array(end, np.float32)[:, None]
        values: Floats = first + (last - first) * times
        return values[..., None, None]

    unit = side / SIDE
    x = along([c.centre[0] for c in clips], [c.centre_end[0] for c in clips]) * unit
    y = along([c.centre[1] for c in clips], [c.centre_end[1] for c in clips]) * unit
    size = along([c.size for c in clips], [c.size_end for c in clips]) * unit
    angle = along([0.0 for _ in clips], [c.angle_end for c in clips])
    # Only a window around the object is computed; it is the same for all, and inside the frame.
    window = min(side, 2 * math.ceil(float(size.max()) * _RADIUS[shape] + 1.5))
    left = np.clip(np.floor(x) - window // 2, 0, side - window)
    top = np.clip(np.floor(y) - window // 2, 0, side - window)
    part = shape_cover(shape, x - left, y - top, size, angle, window)
    cover = np.zeros((*times.shape, side, side), np.float32)
    steps = np.arange(window)
    rows = top.astype(np.int64) + steps[:, None]
    columns = left.astype(np.int64) + steps
    clip, frame = np.ogrid[: len(clips), : times.shape[1]]
    cover[clip[..., None, None], frame[..., None, None], rows, columns] = part
    return cover


def shape_cover(
    shape: str, x: Floats, y: Floats, size: Floats, angle: Floats, side: int = SIDE
) -> Floats:
    """How much of each pixel the shape covers, 0..1: parameters (..., 1, 1) -> (..., side, side).

    `x`, `y` is the centre in pixels, `angle` turns clockwise (rows go down) from upright.
    """
    grid = np.arange(side, dtype=np.float32) + np.float32(0.5)
    dx, dy = grid - x, grid[:, None] - y
    radius = size * np.float32(_RADIUS[shape])
    if shape == "circle":
        disc: Floats = np.clip(0.5 + radius - np.sqrt(dx * dx + dy * dy), 0, 1)
        return disc.astype(np.float32)
    # Every other shape is made of lines: how far a pixel is beyond each of them.
    corners = {"square": 4, "triangle": 3, "star": 5}[shape]
    # A line's distance from the centre, in radii; a star's lines join every second corner.
    inner = np.float32(np.cos(np.pi / corners) if shape != "star" else np.cos(2 * np.pi / 5))
    first = np.pi / 3 if shape == "triangle" else 0.0  # the direction of a line's outer side
    beyond = []
    for k in range(corners):
        normal = angle + np.float32(first + 2 * np.pi * k / corners)
        beyond.append(dx * np.sin(normal) - dy * np.cos(normal) - inner * radius)
    if shape == "star":  # inside at least four of a pentagram's five lines
        largest, distance = np.maximum(beyond[0], beyond[1]), np.minimum(beyond[0], beyond[1])
        for other in beyond[2:]:
            distance = np.maximum(distance, np.minimum(largest, other))
            largest = np.maximum(largest, other)
    else:
        distance = np.max(np.stack(beyond), axis=0)
    cover: Floats = np.clip(0.5 - distance, 0, 1)
    return cover.astype(np.float32)
