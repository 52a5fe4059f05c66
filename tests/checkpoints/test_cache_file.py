"""A cache file is whole, of what was asked for, or nothing: whoever wrote into its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everyframe.checkpoints import cache_file
from everyframe.checkpoints.cache_file import CacheFile
from everyframe.checkpoints.folder import cache_folder

pytestmark = pytest.mark.usefixtures("own_cache")

VALUE = {"a": [1, 2.5, "b", True, None]}


def file(key: str = "key") -> CacheFile:
    return CacheFile("tests", key)


def test_what_was_written_is_read_by_its_key_alone() -> None:
    assert file().read() is None
    file().write(VALUE)
    assert file().read() == VALUE
    assert file("another").read() is None
    assert CacheFile("others", "key").read() is None
    file().remove()
    file().remove()
    assert file().read() is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text.replace("2.5", "2.6"),
        lambda text: text.replace("sha256", "sha512"),
        lambda text: "\n" + text,
        lambda text: "[" * 100_000,
        lambda text: "{}\n{}",
        lambda text: "null\nnull",
        lambda text: text.split("\n")[0] + "\n" + "[" * 100_000,
    ],
)
def test_a_damaged_file_is_nothing_and_is_made_again(spoil: Any) -> None:
    file().write(VALUE)
    file().path.write_text(spoil(file().path.read_text()))
    assert file().read() is None
    file().write(VALUE)
    assert file().read() == VALUE


def test_bytes_that_are_no_text_are_nothing() -> None:
    file().write(VALUE)
    file().path.write_bytes(b"\xff\xfe" * 100)
    assert file().read() is None


def test_a_file_in_the_place_of_another_is_nothing() -> None:
    file("one").write(VALUE)
    file("two").path.write_bytes(file("one").path.read_bytes())
    assert file("two").read() is None


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_not_opened(make: Any) -> None:
    file().path.parent.mkdir(parents=True)
    make(file().path)
    assert file().read() is None


def test_too_much_is_neither_read_nor_written(monkeypatch: pytest.MonkeyPatch) -> None:
    file().write(VALUE)
    monkeypatch.setattr(cache_file, "MAX_BYTES", 20)
    assert file().read() is None
    file("large").write(VALUE)
    assert not file("large").path.exists()


def test_the_oldest_of_too_many_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_file, "MAX_FILES", 3)
    for number in range(6):
        file(str(number)).write(number)
        os.utime(file(str(number)).path, ns=(number, number))
    found = [file(str(number)).read() for number in range(6)]
    assert found == [None, None, None, 3, 4, 5]


def test_another_version_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version is a package's number, its first file, or any file of ours."""
    seen = set()

    def key() -> str:
        cache_file.software_key.cache_clear()
        return cache_file.software_key()

    def changed() -> None:
        assert key() not in seen
        seen.add(key())

    own = tmp_path / "own" / "core"
    own.mkdir(parents=True)
    (own / "facts.py").write_text("a = 1")
    monkeypatch.setattr(cache_file, "package_folder", lambda relative: own.parent)
    changed()
    (own / "facts.py").write_text("a = 12")
    changed()
    os.utime(own / "facts.py", ns=(1, 1))
    changed()
    monkeypatch.setattr(cache_file, "_version", lambda package: "9.9")
    changed()
    monkeypatch.setattr(cache_file, "_stamp_of", lambda package: (1, 2))
    changed()
    monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", "flash")
    changed()
    monkeypatch.undo()
    cache_file.software_key.cache_clear()


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the folder's place")
    file().write(VALUE)
    assert file().read() is None


def test_two_that_write_at_once_leave_a_whole_file() -> None:
    """Whoever reads meanwhile has one of both, or nothing before the first."""
    program = (
        "import sys\n"
        "from everyframe.checkpoints.cache_file import CacheFile\n"
        "for _ in range(60): CacheFile('tests', 'key').write([sys.argv[1]] * 20000)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, name]) for name in ("a", "b")]
    seen: set[str | None] = set()
    while any(writer.poll() is None for writer in writers):
        value = file().read()
        assert value is None or (len(value) == 20000 and len(set(value)) == 1)
        assert value is not None or seen <= {None}, "a file that was there is gone"
        seen.add(None if value is None else value[0])
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen & {"a", "b"}
    assert not list(cache_folder().rglob("*.unfinished"))
    json.loads(file().path.read_text().split("\n")[1])
