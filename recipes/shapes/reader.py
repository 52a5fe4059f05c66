"""Read a scene back from frames by plain image arithmetic, without a model.

The background is the colour of the frame's border, the object is what differs from it. The object's
coverage of each pixel gives position, area and outline. The outline is compared with rendered
templates; position, area and angle over time give the motion. A clip that is not one flat shape on
a flat background in every frame is read as `None`, so noise and empty frames never count.

Thresholds tolerate an autoencoder's changes of edges and colours; `tests/recipes` checks them on
rendered clips, shuffled captions, noise and constant frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from everyframe.checkpoints.shapes_prompts import BACKGROUNDS, COLOURS, SHAPES, Scene
from recipes.shapes.world import PALETTE, Floats, shape_cover

_COLOUR_REACH = 0.26  # how far (RGB 0..1) a colour may be from its name's
_SEEN = 0.20  # a pixel this far from the background belongs to the object
_SIDES = {"circle": 1, "square": 4, "triangle": 3, "star": 5}
_NUM_ANGLES = 12
_LEAST_FIT = 0.72  # overlap (intersection over union) with the best template


@dataclass(frozen=True)
class Reading:
    """Attributes read from a clip; None for one that is missing or unknown."""

    colour: str | None = None
    background: str | None = None
    shape: str | None = None
    motion: str | None = None

    def right(self, scene: Scene) -> dict[str, bool]:
        """For each attribute of the scene, whether the reading agrees."""
        names = ("colour", "background", "shape", "motion")
        return {name: getattr(self, name) == getattr(scene, name) for name in names}


@dataclass(frozen=True)
class Track:
    """The object in each of T frames: centre and area in pixels, angle in radians (unwrapped)."""

    x: Floats
    y: Floats
    area: Floats
    angle: Floats


def read(frames: Floats) -> Reading:
    """Read the scene of square frames (T, H, W, 3), float 0..1 or uint8."""
    if frames.dtype == np.uint8:
        frames = frames.astype(np.float32) / 255
    ground = _ground(frames)
    if ground is None:
        return Reading()
    background = _nearest(ground, tuple(BACKGROUNDS))
    colour_rgb = _object_colour(frames, ground)
    if colour_rgb is None:
        return Reading()
    cover = _cover(frames, ground, colour_rgb)
    if cover is None:
        return Reading()
    colour = _nearest(colour_rgb, tuple(COLOURS))
    shape = _shape(cover)
    if shape is None:
        return Reading(colour, background)
    return Reading(colour, background, shape, _motion(_track(cover, shape), shape))


def _ground(frames: Floats) -> Floats | None:
    """The colour of the border, if it is uniform and constant; else None."""
    rim = np.concatenate(
        [frames[:, 0], frames[:, -1], frames[:, :, 0], frames[:, :, -1]], axis=1
    ).reshape(-1, 3)
    ground: Floats = np.median(rim, axis=0).astype(np.float32)
    alike = np.linalg.norm(rim - ground, axis=1) < 0.12
    return ground if alike.mean() > 0.95 else None


def _nearest(rgb: Floats, names: tuple[str, ...]) -> str | None:
    away = {name: float(np.linalg.norm(rgb - np.array(PALETTE[name]) / 255)) for name in names}
    best = min(names, key=lambda name: away[name])
    return best if away[best] < _COLOUR_REACH else None


def _object_colour(frames: Floats, ground: Floats) -> Floats | None:
    """The median of the pixels that differ most from the background, which excludes mixed edges."""
    away = np.linalg.norm(frames - ground, axis=-1)
    seen = away > _SEEN
    if not (seen.mean(axis=(1, 2)) > 0.004).all() or seen.mean() > 0.45:
        return None
    inside = seen.copy()  # all four neighbours are seen too
    for axis in (1, 2):
        inside &= np.roll(seen, 1, axis) & np.roll(seen, -1, axis)
    chosen = frames[inside] if inside.sum() > 8 * len(frames) else frames[seen]
    colour: Floats = np.median(chosen, axis=0).astype(np.float32)
    return colour


def _cover(frames: Floats, ground: Floats, colour: Floats) -> Floats | None:
    """How much of each pixel is the object's (T, H, W); None if frames are no such mixture."""
    way = colour - ground
    length = float(way @ way)
    if length < 0.03:
        return None
    cover: Floats = np.clip((frames - ground) @ way / length, 0, 1).astype(np.float32)
    rest = np.abs(frames - (ground + cover[..., None] * way)).mean(axis=(1, 2, 3))
    cover[cover < 0.15] = 0
    covered = cover.mean(axis=(1, 2))
    if (rest > 0.04).any() or (covered < 0.004).any() or (covered > 0.45).any():
        return None
    return cover


def _centres(cover: Floats) -> tuple[Floats, Floats, Floats]:
    grid = np.arange(cover.shape[1], dtype=np.float32) + 0.5
    area = cover.sum(axis=(1, 2))
    x = (cover.sum(axis=1) @ grid) / area
    y = (cover.sum(axis=2) @ grid) / area
    return x, y, area


def _unit_areas() -> dict[str, float]:
    """Area of each shape at size 1."""
    x = y = torch.tensor(32.0)
    return {
        shape: float(shape_cover(shape, x, y, torch.tensor(20.0), torch.tensor(0.0)).sum() / 20**2)
        for shape in SHAPES
    }


_AREAS = _unit_areas()


def _overlap(cover: Floats, shape: str, x: float, y: float, area: float) -> float:
    """Best overlap of one frame's cover with the shape of that area there, at any angle."""
    turns = 1 if shape == "circle" else _NUM_ANGLES
    angles = torch.arange(turns) * (2 * math.pi / _SIDES[shape] / turns)
    places = (x, y, np.sqrt(area / _AREAS[shape]))
    at_x, at_y, size = (torch.tensor(float(value)) for value in places)
    drawn = shape_cover(shape, at_x, at_y, size, angles[:, None, None], cover.shape[1]).numpy()
    both = np.minimum(drawn, cover).sum(axis=(-1, -2))
    either = np.maximum(drawn, cover).sum(axis=(-1, -2))
    return float((both / either).max())


def _shape(cover: Floats) -> str | None:
    """The shape that fits best over every second frame."""
    x, y, area = _centres(cover)
    fits = {
        shape: float(
            np.mean([_overlap(cover[t], shape, x[t], y[t], area[t]) for t in range(0, len(x), 2)])
        )
        for shape in SHAPES
    }
    best = max(fits, key=lambda name: fits[name])
    return best if fits[best] > _LEAST_FIT else None


def _track(cover: Floats, shape: str) -> Track:
    x, y, area = _centres(cover)
    sides = _SIDES[shape]
    grid = np.arange(cover.shape[1], dtype=np.float32) + 0.5
    across = grid[None, None, :] - x[:, None, None]
    down = grid[None, :, None] - y[:, None, None]
    # The outline's n-th harmonic turns n times as fast as an n-sided shape.
    weight = cover * (across**2 + down**2)
    phase = np.angle((weight * np.exp(1j * sides * np.arctan2(down, across))).sum(axis=(1, 2)))
    return Track(x, y, area, (np.unwrap(phase) / sides).astype(np.float32))


def _slope(values: Floats) -> float:
    """Change from the first frame to the last one, by a straight line through all of them."""
    time = np.linspace(-0.5, 0.5, len(values))
    return float((values * time).sum() / (time * time).sum())


def _motion(track: Track, shape: str) -> str | None:
    """The one thing that changes; None if two do, or a little of everything."""
    right, down = _slope(track.x), _slope(track.y)
    growth = _slope(np.log(track.area) / 2)
    turn = _slope(track.angle) if shape != "circle" else 0.0
    changes = {
        "place": float(np.hypot(right, down)) / 9.0,
        "size": abs(growth) / 0.28,
        "angle": abs(turn) / 0.6,
    }
    strong = [name for name, amount in changes.items() if amount > 1.0]
    if not strong:
        return "still" if max(changes.values()) < 0.8 else None
    if len(strong) > 1:
        return None
    if strong == ["size"]:
        return "growing" if growth > 0 else "shrinking"
    if strong == ["angle"]:
        return "turning" if turn > 0 else None
    if min(abs(right), abs(down)) > 0.5 * max(abs(right), abs(down)):
        return None
    if abs(right) > abs(down):
        return "right" if right > 0 else "left"
    return "down" if down > 0 else "up"
