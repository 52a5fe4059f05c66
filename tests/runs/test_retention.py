"""Runs that nobody resumes: which are removed, which stay, and the note about it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from everyframe.cli.main import main
from everyframe.core.errors import InputError
from everyframe.core.events import Note
from everyframe.runs import retention
from everyframe.runs.folder import Lock, RunFolder, all_runs, new_run
from everyframe.runs.retention import remove_old_runs
from helpers.interrupted_runs import OPEN_SORA, begun
from helpers.tiny_checkpoints import opensora as tiny_opensora

DAY = 86_400.0


def make_run(root: Path, days: float, size: int = 10) -> RunFolder:
    """A run of which something was written so many days ago for the last time."""
    run = new_run(root)
    run.write_run({"began": time.time() - days * DAY})
    run.tensors.mkdir()
    (run.tensors / "some").write_bytes(bytes(size))
    for place in (run.path / "run.json", run.tensors / "some", run.tensors, run.path):
        os.utime(place, (time.time() - days * DAY,) * 2)
    return run


def test_what_is_old_goes_and_what_is_worked_on_stays(tmp_path: Path) -> None:
    old, busy, young = make_run(tmp_path, 31), make_run(tmp_path, 40), make_run(tmp_path, 29)
    used = make_run(tmp_path, 50)
    (used.path / "answers").mkdir()  # resumed yesterday
    lock = busy.lock()
    assert [each.run for each in remove_old_runs(tmp_path)] == [old.name]
    assert {run.name for run in all_runs(tmp_path)} == {busy.name, young.name, used.name}
    lock.release()


def test_an_old_run_that_is_resumed_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes of many runs take a while, and one of them may be taken up then."""
    old, num_bytes, locks = make_run(tmp_path, 31), RunFolder.num_bytes, list[Lock]()

    def resume(self: RunFolder) -> int:
        if not locks:
            locks.append(self.lock())
        return num_bytes(self)

    monkeypatch.setattr(RunFolder, "num_bytes", resume)
    assert not list(remove_old_runs(tmp_path))
    assert old.is_saved
    locks[0].release()
    os.utime(old.path, (time.time() - 31 * DAY,) * 2)  # which the lock's file has changed
    assert [each.run for each in remove_old_runs(tmp_path)] == [old.name]


def test_the_oldest_go_when_all_take_too_much_but_none_of_the_last_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MOST_BYTES", 2_500)
    runs = [make_run(tmp_path, days, 1_000) for days in (0.1, 5, 0.5, 3, 2)]
    removed = list(remove_old_runs(tmp_path))
    assert [each.run for each in removed] == [runs[1].name, runs[3].name, runs[4].name]
    assert removed[0].num_bytes > 1_000
    assert {run.name for run in all_runs(tmp_path)} == {runs[0].name, runs[2].name}


def test_days_are_asked_for_and_none_is_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, 8)
    assert not list(remove_old_runs(tmp_path))
    monkeypatch.setenv(retention.DAYS, "0")
    assert not list(remove_old_runs(tmp_path, now=time.time() + 9_999 * DAY))
    monkeypatch.setenv(retention.DAYS, "7")
    assert [each.run for each in remove_old_runs(tmp_path)] == [run.name]
    for wrong in ("a week", "-1", "nan"):
        monkeypatch.setenv(retention.DAYS, wrong)
        with pytest.raises(InputError, match="must be a number of days, 0 to keep"):
            list(remove_old_runs(tmp_path))


def test_a_new_run_tells_what_it_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, young = make_run(tmp_path / "runs", 100, 2_000_000), make_run(tmp_path / "runs", 2)
    options = {**OPEN_SORA, "model": str(tiny_opensora.opensora_1_2(tmp_path / "model"))}
    events = list(begun(tmp_path / "runs", **options))
    (note,) = [e.text for e in events if isinstance(e, Note) and "is removed" in e.text]
    assert old.name in note
    assert "nothing was written for 30 days; it took 2.0 MB" in note
    assert list(all_runs(tmp_path / "runs")) == [young]
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))
    assert main(["resume", "--list"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 days" in shown
    assert "a run is removed after 30 days without a write" in shown
