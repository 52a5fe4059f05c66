"""Lengths and sizes that a denoiser has no positions for are refused by the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import everyframe
from everyframe.core.errors import InputError
from helpers.tiny_checkpoints import pipelines as tiny_pipelines


def plan(folder: Path, name: str, **asked: Any) -> everyframe.Plan:
    """The plan of that tiny pipeline, which is written once."""
    place = folder / name
    if not place.exists():
        tiny_pipelines.TINY[name](place)
    given = {**tiny_pipelines.CALLS[name], **asked}
    return everyframe.plan(prompt="a fox", model=str(place), num_inference_steps=2, **given)


@pytest.mark.parametrize(
    ("name", "right", "wrong", "text"),
    [
        ("animatediff", {"num_frames": 32}, {"num_frames": 33}, "at most 32 frames"),
        ("latte", {"num_frames": 1}, {"num_frames": 3}, "makes 2 frames, .* got num_frames 3"),
        ("ltx25", {"size": "32x32"}, {"size": "64x16"}, "must be at least 32, got 64x16"),
    ],
)
def test_what_fits_no_table_is_refused(
    name: str, right: dict[str, Any], wrong: dict[str, Any], text: str, tmp_path: Path
) -> None:
    made = plan(tmp_path, name, **right)
    assert not any("no dry run can follow" in note for note in made.notes)
    with pytest.raises(InputError, match=text):
        plan(tmp_path, name, **wrong)


def test_learned_positions_are_of_one_size(tmp_path: Path) -> None:
    plan(tmp_path, "cogvideox", size="32x32")
    file = tmp_path / "cogvideox" / "transformer" / "config.json"
    config = json.loads(file.read_text())
    learned = {"use_learned_positional_embeddings": True, "use_rotary_positional_embeddings": True}
    file.write_text(json.dumps({**config, **learned}))
    with pytest.raises(InputError, match=r"learned the positions of \d+x\d+ alone, got 64x32"):
        plan(tmp_path, "cogvideox", size="64x32")
