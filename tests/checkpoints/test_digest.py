"""The digest: sha256 of the bytes, whatever the path, and not computed twice."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from everyframe.checkpoints.digest import digest, file_digest, known_digest
from everyframe.checkpoints.folder import cache_folder
from everyframe.core.errors import CheckpointError
from everyframe.fast_paths.computing_time import add_computing_time


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("EVERYFRAME_CACHE", str(folder))
    return folder


def test_one_file_is_its_sha256(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"weights")
    assert digest([path]) == hashlib.sha256(b"weights").hexdigest()


def test_several_depend_on_bytes_and_order_alone(tmp_path: Path) -> None:
    for folder, names in (("one", "ab"), ("two", "xy")):
        (tmp_path / folder).mkdir()
        for name, data in zip(names, (b"1", b"2"), strict=True):
            (tmp_path / folder / name).write_bytes(data)
    first = digest([tmp_path / "one" / "a", tmp_path / "one" / "b"])
    assert first == digest([tmp_path / "two" / "x", tmp_path / "two" / "y"])
    assert first != digest([tmp_path / "one" / "b", tmp_path / "one" / "a"])


def test_remembered_until_the_file_changes(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    file_digest(path)
    # Answered from memory, which shows that the bytes are not read again.
    memory = own_cache / "digests.json"
    table = json.loads(memory.read_text())
    (entry,) = table.values()
    entry[-1] = "remembered"
    memory.write_text(json.dumps(table))
    assert file_digest(path) == known_digest([path]) == "remembered"
    os.utime(path, ns=(2, 2))
    assert known_digest([path]) is None
    assert file_digest(path) == hashlib.sha256(b"old").hexdigest()


@pytest.mark.parametrize("how", ["in place", "another file"])
def test_a_file_that_was_changed_and_given_its_old_time_is_read_again(
    tmp_path: Path, how: str
) -> None:
    """As tools do that copy times along; size and time alone would say that it is the same."""
    path = tmp_path / "a"
    path.write_bytes(b"old")
    before = path.stat()
    file_digest(path)
    time.sleep(0.02)  # the system's clock for files ticks a hundred times a second
    if how == "in place":
        path.write_bytes(b"new")
    else:
        (tmp_path / "b").write_bytes(b"new")
        os.replace(tmp_path / "b", path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert known_digest([path]) is None
    assert file_digest(path) == hashlib.sha256(b"new").hexdigest()


def test_a_broken_memory_is_no_trouble(tmp_path: Path, own_cache: Path) -> None:
    own_cache.mkdir()
    (own_cache / "digests.json").write_text("{")
    (tmp_path / "a").write_bytes(b"x")
    assert file_digest(tmp_path / "a") == hashlib.sha256(b"x").hexdigest()
    assert [path.name for path in own_cache.iterdir()] == ["digests.json"]


def test_an_unwritable_cache_is_reported_once_and_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a home folder without writing is; a run has several digests and times."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "below"
    monkeypatch.setenv("EVERYFRAME_CACHE", str(folder))
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        assert file_digest(tmp_path / name) == hashlib.sha256(name.encode()).hexdigest()
    add_computing_time("cpu", "plan", 1)
    (line,) = caplog.messages
    assert line.startswith(f"the cache in {folder} can't be used (Not a directory)")
    assert "EVERYFRAME_CACHE" in line


def test_faults(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No such file"):
        digest([tmp_path / "none"])
    with pytest.raises(ValueError, match=r"at least one"):
        digest([])


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("EVERYFRAME_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "everyframe"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "xdg")  # relative: the specification says to ignore it
    assert cache_folder() == tmp_path / ".cache" / "everyframe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "everyframe"
