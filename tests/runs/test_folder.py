"""Whose a run is, where files can't be locked, and where nothing can be written."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import everyframe
from everyframe.core.errors import CorruptRunError, InputError, RunLockedError
from everyframe.core.events import Event, Note
from everyframe.engine.resumption import resume
from everyframe.runs.checksummed_json import checksum
from everyframe.runs.folder import RunFolder, all_runs, find_run, list_runs, new_run
from helpers.interrupted_runs import OPEN_SORA, begun, same


def no_locks(*_: Any) -> None:
    """What Lustre answers without ``-o flock``."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_where_no_file_can_be_locked_a_run_is_made_and_reported_as_not_saved(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[Event] = list(begun(tmp_path / "a", model=model, **OPEN_SORA))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    events = list(begun(tmp_path / "b", model=model, **OPEN_SORA))
    same(whole, events)
    (note,) = [e.text for e in events if isinstance(e, Note) and "can't be saved" in e.text]
    assert "no file can be locked there: Function not implemented" in note
    assert "EVERYFRAME_RUNS" in note
    assert not list((tmp_path / "b").iterdir())


def test_a_run_that_lies_where_no_file_can_be_locked_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_run(tmp_path)
    folder.write_run({"began": 1.0})
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert not folder.is_busy()
    with pytest.raises(InputError, match=r"Function not implemented\); copy its folder"):
        list(resume.resume_run(folder))


def test_asking_whether_a_run_is_busy_writes_nothing_and_is_in_nobodys_way(tmp_path: Path) -> None:
    folder = new_run(tmp_path)
    folder.write_run({"began": 1.0})
    assert not folder.is_busy()
    assert not (folder.path / "lock").exists()
    lock = folder.lock()
    assert folder.is_busy()
    with pytest.raises(RunLockedError):
        folder.lock()
    # Whoever asks has it for a moment.
    timer = threading.Timer(0.05, lock.release)
    timer.start()
    began = time.monotonic()
    folder.lock().release()
    assert time.monotonic() - began < 5
    timer.join()


def test_a_run_that_ends_while_runs_are_listed_is_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files go while they are looked at."""
    first, ended = new_run(tmp_path), new_run(tmp_path)
    record = {"model": {"name": "some"}, "settings": {"prompt": "a cat", "seed": 1, "chain": 1}}
    for run in (first, ended):
        run.write_run({"began": 1.0, "record": record})
    seen, num_answers = list[str](), RunFolder.num_answers

    def end(self: RunFolder) -> int:
        if self == ended:
            self.remove()
            seen.append(self.name)
        return num_answers(self)

    monkeypatch.setattr(RunFolder, "num_answers", end)
    assert [each.run for each in list_runs(tmp_path)] == [first.name]
    assert seen == [ended.name]
    assert ended.began() == ended.last_written() == ended.num_bytes() == 0


def test_runs_that_can_only_be_read_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as root, whom permissions don't stop: nothing is opened for writing."""
    folder = new_run(tmp_path)
    folder.write_run({"began": 1.0})
    folder.lock().release()
    real = Path.open

    def reading(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if set(mode) & set("wax+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, mode, *rest, **named)

    monkeypatch.setattr(Path, "open", reading)
    (listed,) = list_runs(tmp_path)
    assert (listed.run, listed.is_busy) == (folder.name, False)
    assert find_run(None, tmp_path) == RunFolder(folder.path)
    assert list(all_runs(tmp_path)) == [folder]


@pytest.mark.parametrize("rest", ["no json", '"a": ' + "[" * 100_000])
def test_a_run_of_another_program_is_unreadable_in_one_line(rest: str, tmp_path: Path) -> None:
    """Whoever writes a folder can write its checksum."""
    run, data = new_run(tmp_path), f"{rest}}}\n".encode()
    first = f'{{"checksum": "{checksum(data)}",'.encode()
    (run.path / "run.json").write_bytes(first + data)
    assert not run.is_readable()
    (listed,) = list_runs(tmp_path)
    assert listed.progress.startswith("can't be read: ")
    with pytest.raises(CorruptRunError, match="holds no JSON"):
        everyframe.resume(run.path)
    run.write_run({"began": 10**400})
    assert run.began() == run.last_written()


def test_a_state_of_somebody_elses_name_is_no_part_of_a_run(tmp_path: Path) -> None:
    for name in ("state-1.json", "state-².json", "state-x.json"):
        (tmp_path / name).touch()
    assert [part.part for part in RunFolder(tmp_path).parts()] == [0, 1]
