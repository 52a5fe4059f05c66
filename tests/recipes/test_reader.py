"""The reader reads true clips and nothing else; each planted change is seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from recipes.shapes import evaluate, reader, world
from recipes.shapes.world import LARGE, SMALL, Format

from everyframe.checkpoints.shapes_prompts import Scene


def _frames(clips: world.Clips, form: Format = SMALL) -> world.Floats:
    return world.pictures(world.draw_whole(clips, form))


def _clip(scene: Scene, seed: int = 0) -> world.Floats:
    return _frames(world.random_clips([scene], np.random.default_rng(seed)))[0]


@pytest.mark.parametrize(
    ("form", "count"),
    [
        pytest.param(SMALL, 60, id="small"),
        pytest.param(LARGE, 12, id="large", marks=pytest.mark.slow),
    ],
)
def test_the_reader_meets_its_bars(form: Format, count: int) -> None:
    rows = evaluate.measure_reader(count, form)
    assert [row for row in rows if not row.met] == []


def test_blur_and_noise_as_of_an_autoencoder_do_not_matter() -> None:
    rng = np.random.default_rng(3)
    clips = world.random_clips(world.random_scenes(world.all_scenes(), 30, rng), rng)
    frames = _frames(clips)
    for axis in (2, 3):
        frames = (np.roll(frames, 1, axis) + np.roll(frames, -1, axis) + 2 * frames) / 4
    frames = np.clip(frames + rng.normal(0, 0.02, frames.shape), 0, 1).astype(np.float32)
    right = [reader.read(f).right(s) for f, s in zip(frames, clips.scenes, strict=True)]
    assert sum(all(row.values()) for row in right) >= 29


def test_uint8_is_read_as_floats_are() -> None:
    frames = _clip(Scene("star", "cyan", "brown", "down"))
    assert reader.read(np.round(frames * 255).astype(np.uint8)) == reader.read(frames)


def test_backwards_is_the_other_motion() -> None:
    frames = _clip(Scene("square", "red", "grey", "growing"))
    assert reader.read(frames[::-1]).motion == "shrinking"


@pytest.mark.parametrize("lost", [range(17), [8], [0, 1]])
def test_a_clip_that_loses_its_object_is_read_as_nothing(lost: object) -> None:
    frames = _clip(Scene("square", "red", "grey", "right")).copy()
    frames[lost] = frames[0, 0, 0]
    assert reader.read(frames) == reader.Reading()


def test_two_motions_at_once_are_no_motion() -> None:
    scene = Scene("square", "red", "grey", "right")
    start, end = torch.tensor([[16.0, 32.0, 6.0, 0.0]]), torch.tensor([[44.0, 32.0, 11.0, 0.0]])
    assert reader.read(_frames(world.Clips([scene], start, end))[0]).motion is None


def test_an_object_of_two_colours_is_not_flat() -> None:
    frames = _clip(Scene("square", "red", "black", "still")).copy()
    rows, columns = np.nonzero(frames[0, :, :, 0] > 0.5)
    frames[:, rows.min() : int(rows.mean()), columns.min() : columns.max()] = (0.0, 0.8, 0.9)
    assert reader.read(frames).shape is None
