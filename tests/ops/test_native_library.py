"""The library of kernels is compiled once, and never loaded from what others could have written."""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import subprocess
from pathlib import Path

import pytest

from everyframe.ops.native import library

pytestmark = pytest.mark.skipif(bool(missing := library.why_not()), reason=str(missing))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; where the library will lie."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    return tmp_path / "native"


@pytest.fixture(scope="module")
def made() -> Path:
    """The library that was compiled for all tests; with it, or as a copy with its modes."""
    library._load()
    (path,) = Path(os.environ["EVERYFRAME_CACHE"], "native").glob("*.so")
    return path


def copy(made: Path, folder: Path, content: bytes | None = None) -> Path:
    """The library as an earlier process has left it, or with other bytes under its name."""
    folder.mkdir(mode=0o700)
    path = folder / made.name
    path.write_bytes(made.read_bytes() if content is None else content)
    path.chmod(0o600)
    return path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders in which something was compiled, by a stand-in for the compiler."""
    seen: list[Path] = []

    def _compiled(compiler: str, folder: Path, key: str) -> ctypes.CDLL:
        seen.append(folder)
        return ctypes.CDLL(None)

    monkeypatch.setattr(library, "_compile", _compiled)
    return seen


def test_it_is_compiled_for_this_user_alone(made: Path) -> None:
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert [*made.parent.iterdir()] == [made], "nothing unfinished is left"


def test_it_is_compiled_once(made: Path, folder: Path, compiled: list[Path]) -> None:
    copy(made, folder)
    assert library._load().geglu
    assert not compiled


def test_a_file_of_other_bytes_is_compiled_again(
    made: Path, folder: Path, compiled: list[Path]
) -> None:
    path = copy(made, folder, made.read_bytes()[:-100])
    library._load()
    assert compiled == [folder]
    assert not path.exists()


def test_a_file_that_others_can_write_is_compiled_again(
    made: Path, folder: Path, compiled: list[Path]
) -> None:
    copy(made, folder).chmod(0o666)
    library._load()
    assert compiled == [folder]


def test_a_link_is_compiled_again(made: Path, folder: Path, compiled: list[Path]) -> None:
    path = copy(made, folder)
    path.unlink()
    path.symlink_to(made)
    library._load()
    assert compiled == [folder]
    assert made.exists(), "the link is removed, and not what it leads to"


def test_a_folder_that_was_open_to_others_is_emptied(
    made: Path, folder: Path, compiled: list[Path]
) -> None:
    copy(made, folder)
    folder.chmod(0o777)
    library._load()
    assert compiled == [folder]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not [*folder.iterdir()]


def test_a_folder_that_is_a_link_is_refused(
    made: Path, folder: Path, compiled: list[Path], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    copy(made, elsewhere)
    folder.symlink_to(elsewhere)
    with pytest.raises(library.NoLibraryError, match="is not a folder of this user's"):
        library._load()


def test_a_folder_of_another_user_is_refused(
    made: Path, folder: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy(made, folder)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(library.NoLibraryError, match="is not a folder of this user's"):
        library._load()


def test_another_processor_or_compiler_has_a_library_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = library.find_compiler()
    assert compiler is not None
    before = library._key(compiler)
    assert library._key(compiler) == before
    monkeypatch.setattr(library, "processor_flags", lambda: frozenset({"sse2"}))
    assert library._key(compiler) != before


def test_without_a_compiler_there_is_a_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert library.why_not() == "no C compiler 'no-such-compiler', which CC names"
    library.load.cache_clear()
    library._found.cache_clear()
    try:
        with caplog.at_level("WARNING"):
            assert library.find() is None
        assert "plain torch computes instead" in caplog.text
    finally:
        library.load.cache_clear()
        library._found.cache_clear()


def test_a_compiler_that_fails_is_named(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 1\n")
    broken.chmod(0o755)
    folder.mkdir(mode=0o700)
    with pytest.raises(library.NoLibraryError, match="can't compile the kernels: no such flag"):
        library._compile(str(broken), folder, "key")
    assert not [*folder.iterdir()]


def test_what_a_killed_process_has_left_is_removed(folder: Path) -> None:
    (old := folder / "making-old").mkdir(parents=True)
    (new := folder / "making-new").mkdir()
    (old / "0.so.o").touch()
    os.utime(old, (0, 0))
    library._remove_abandoned(folder)
    assert [*folder.iterdir()] == [new], "which another process may be making"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512"])
def test_no_vector_is_wider_than_a_register(processor: str, tmp_path: Path) -> None:
    """GCC keeps wider ones in memory: products were twelve times as slow with 256 bits."""
    compiler = library.find_compiler()
    assert compiler is not None
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True
    ).stdout
    if "Free Software Foundation" not in version:
        pytest.skip("GCC alone reports it")
    made = subprocess.run(
        [compiler, "-std=gnu11", "-O0", f"-march={processor}", "-Wvector-operation-performance",
         "-c", str(library._SOURCES / library._MAIN), "-o", str(tmp_path / "kernels.o")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert made.stderr == ""
