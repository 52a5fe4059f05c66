"""Paths as people give them: impossible ones are refused before anything opens them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from everyframe.checkpoints.folder import cache_folder
from everyframe.core.errors import InputError
from everyframe.core.lora import parse_lora
from everyframe.core.paths import check_path, expand_path, facts_in, home_folder, size_of
from everyframe.media.input_checks import check_video
from everyframe.media.record import read_record
from everyframe.runs.folder import runs_folder


@pytest.mark.parametrize("given", ["clip.mp4", Path("clip.mp4"), "no such folder/x", "ü" * 99, "~"])
def test_what_a_file_may_be_called(given: Any) -> None:
    assert check_path(given) == os.fspath(given)


@pytest.mark.parametrize("given", ["a" * 300, "a/" * 3000, "a\0b", None, 5, b"x", ["x"]])
def test_what_nothing_can_be_called(given: Any) -> None:
    with pytest.raises(InputError, match=r"^report ") as raised:
        check_path(given, "report")
    assert len(str(raised.value)) < 200


def test_homes() -> None:
    assert expand_path("~/x", "model") == Path.home() / "x"
    with pytest.raises(InputError, match="model '~nobody-is-called-so/x' is in the home folder of"):
        expand_path("~nobody-is-called-so/x", "model")


@pytest.mark.parametrize("file", ["~nobody-is-called-so/x", "a" * 300, "a\0b"])
def test_a_loras_file_is_such_a_path(file: str) -> None:
    with pytest.raises(InputError, match=r"^loras "):
        _ = parse_lora(file).path


def test_a_user_without_a_home_learns_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that is run for a user whom it doesn't know."""

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    for name in ("EVERYFRAME_CACHE", "EVERYFRAME_RUNS", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for find in (home_folder, cache_folder, runs_folder):
        with pytest.raises(InputError, match="set HOME, or EVERYFRAME_CACHE and EVERYFRAME_RUNS"):
            find()
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    """Whoever opens one that nobody writes to waits for ever."""
    pipe = tmp_path / "clip.mp4"
    os.mkfifo(pipe)
    for read in (check_video, read_record):
        with pytest.raises(InputError, match="neither a file nor a folder of frames"):
            read(pipe)


def test_a_size_is_of_what_is_there_and_follows_no_link(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inside").mkdir(parents=True)
    for name in ("a", "inside/b"):
        (folder / name).write_bytes(bytes(100))
    (tmp_path / "outside").write_bytes(bytes(10_000))
    (folder / "link").symlink_to(tmp_path / "outside")
    assert 200 <= size_of(folder) < 1_000
    assert size_of(folder / "a") == 100
    assert size_of(folder / "link") < 1_000
    assert size_of(tmp_path / "nothing") == 0
    names = set()
    for path, _ in facts_in(folder):
        names.add(path.name)
        (folder / "inside" / "b").unlink(missing_ok=True)  # as by a run that is at work
    assert names == {"folder", "inside", "a", "link"}
