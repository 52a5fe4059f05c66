"""The drawn world: against supersampled geometry of our own, and its rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from recipes.shapes import world

from everyframe.checkpoints.shapes_prompts import MOTIONS, SHAPES, Scene


def _inside(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Whether points lie in a polygon (or disc) about 0 with its first corner up: by winding."""
    if shape == "circle":
        return x * x + y * y <= radius * radius
    corners = {"square": 4, "triangle": 3, "star": 5}[shape]
    angles = 2 * np.pi * np.arange(corners) / corners + (np.pi / 4 if shape == "square" else 0)
    tips = np.stack([np.sin(angles), -np.cos(angles)], axis=1) * radius
    if shape == "star":
        inner = angles + np.pi / 5
        # Where a pentagram's lines cross: cos(72°) / cos(36°) of the radius.
        dents = np.stack([np.sin(inner), -np.cos(inner)], axis=1) * radius * 0.381966
        tips = np.stack([tips, dents], axis=1).reshape(-1, 2)
    crossings = np.zeros(x.shape, int)
    for (ax, ay), (bx, by) in zip(tips, np.roll(tips, -1, axis=0), strict=True):
        spans = (ay > y) != (by > y)
        at = ax + (y - ay) * (bx - ax) / (by - ay if by != ay else 1e-9)
        crossings += spans & (x < at)
    return crossings % 2 == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_cover_is_the_area_of_the_shape_in_each_pixel(shape: str) -> None:
    size = 9.0
    place = (torch.tensor(value) for value in (30.3, 33.6, size, 0.0))
    drawn = world.shape_cover(shape, *place).numpy()
    fine = (np.arange(64 * 8) + 0.5) / 8
    x, y = np.meshgrid(fine - 30.3, fine - 33.6)
    truth = _inside(shape, x, y, size * world._RADIUS[shape])
    truth = truth.reshape(64, 8, 64, 8).mean(axis=(1, 3))
    # Distance to a line is not area: a corner's pixel may be half of a pixel off, an edge's not.
    assert np.abs(drawn - truth).max() < 0.55
    assert abs(float(drawn.sum()) / truth.sum() - 1) < 0.03
    assert np.abs(drawn - truth).mean() < 0.003


@pytest.mark.parametrize("form", world.FORMATS, ids=str)
def test_the_window_leaves_nothing_out(form: world.Format) -> None:
    rng, unit = np.random.default_rng(0), form.side / 64
    clips = world.random_clips(world.random_scenes(world.train_scenes(), 24, rng), rng)
    times = torch.tensor([0.0, 0.5, 1.0]).expand(24, -1)
    frames = world.pictures(world.draw(clips, form.side, times))
    for index, (scene, seen) in enumerate(zip(clips.scenes, frames, strict=True)):
        for part, frame in zip((0.0, 0.5, 1.0), seen, strict=True):
            first, last = clips.start[index], clips.end[index]
            x, y, size, angle = first + (last - first) * part
            cover = world.shape_cover(
                scene.shape, x * unit, y * unit, size * unit, angle, form.side
            ).numpy()
            ground = np.array(world.PALETTE[scene.background]) / 255
            colour = np.array(world.PALETTE[scene.colour]) / 255
            whole = ground + cover[..., None] * (colour - ground)
            # Float32 rounding of positions up to 128 moves an edge by about 1e-5 pixels.
            assert np.abs(frame - whole).max() < 1e-4


def test_the_object_never_touches_the_rim() -> None:
    rng = np.random.default_rng(1)
    clips = world.random_clips(world.random_scenes(world.all_scenes(), 200, rng), rng)
    frames = world.pictures(world.draw(clips, 64, torch.tensor([0.0, 1.0]).expand(200, -1)))
    rim = frames[:, :, 0], frames[:, :, -1], frames[:, :, :, 0], frames[:, :, :, -1]
    for side in rim:
        assert np.abs(side - side[:, :, :1]).max() < 1e-6


def test_clips_move_as_their_scenes_say() -> None:
    scenes = [Scene("square", "red", "black", motion) for motion in MOTIONS]
    clips = world.random_clips(scenes, np.random.default_rng(2))
    ways = dict(zip(MOTIONS, (clips.end - clips.start).sign().tolist(), strict=True))
    assert ways == {
        "right": [1, 0, 0, 0], "left": [-1, 0, 0, 0], "up": [0, -1, 0, 0], "down": [0, 1, 0, 0],
        "still": [0, 0, 0, 0], "growing": [0, 0, 1, 0], "shrinking": [0, 0, -1, 0],
        "turning": [0, 0, 0, 1],
    }  # fmt: skip


def test_what_is_never_drawn() -> None:
    scenes = world.all_scenes()
    assert len(scenes) == 4 * 8 * 5 * 8 - 8 * 5 * 1 - 3 * 8 - 7
    assert Scene("circle", "red", "black", "turning") not in scenes
    assert Scene("star", "blue", "blue", "up") not in scenes
    assert Scene("star", "blue", "navy", "up") in scenes


def test_one_tenth_is_held_out_and_stays_so() -> None:
    held = world.held_out_scenes()
    assert abs(len(held) / len(world.all_scenes()) - 0.1) < 0.02
    assert not set(held) & set(world.train_scenes())
    # The split is by a hash of words: these two lines hold it across machines and versions.
    assert world.held_out(held[0])
    assert held[0] == Scene("circle", "red", "grey", "down")


@pytest.mark.parametrize(("batch", "share"), [(1, 4), (3, 4), (8, 16)])
def test_a_small_batch_has_a_large_clip_too(batch: int, share: int) -> None:
    """A batch of none ended in an index error, as the README's "a batch that suits it" did."""
    assert world.batch_sizes(batch, share) == (batch, 1)
    assert world.batch_sizes(128) == (128, 32)
    assert world.batch_sizes(56, 16) == (56, 3)
