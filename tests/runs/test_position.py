"""The position of a run grows with each save, over all video groups."""

from __future__ import annotations

from pathlib import Path

from everyframe.runs.folder import RunFolder
from everyframe.runs.position import NOWHERE, saved_position


def save(run: RunFolder, clip: int, stage: int, *steps: int) -> None:
    takes = [{"seed": seed, "step": step} for seed, step in enumerate(steps)]
    run.write_state({"clip": clip, "stage": stage, "takes": takes})


def test_it_grows_as_the_state_goes_on(tmp_path: Path) -> None:
    run, second = RunFolder(tmp_path), RunFolder(tmp_path, 1)
    seen = [saved_position(run)]
    assert seen == [NOWHERE]
    for part, clip, stage, steps in (
        (run, 0, 1, (0, 0)), (run, 0, 1, (3, 0)), (run, 0, 1, (9, 1)), (second, 0, 0, (2,)),
        (second, 0, 1, (0,)), (run, 0, 2, (0, 0)), (second, 0, 1, (5,)), (run, 1, 0, (0, 0)),
    ):  # fmt: skip
        save(part, clip, stage, *steps)
        seen.append(saved_position(run))
    folder = run.answers / "3"
    folder.mkdir(parents=True)
    (folder / "1.safetensors").write_bytes(b"")
    seen.append(saved_position(run))
    assert seen == sorted(set(seen))


def test_what_can_not_be_read_counts_as_nothing(tmp_path: Path) -> None:
    run, second = RunFolder(tmp_path), RunFolder(tmp_path, 1)
    save(run, 0, 1, 4)
    second.write_state({"clip": 0})
    assert saved_position(run) == (0, 1, 4, 0)
    (tmp_path / "state.json").write_text("cut off")
    assert saved_position(run) == NOWHERE
