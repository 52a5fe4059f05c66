"""Compile the C sources beside this file once, and load the library.

The library is in the cache folder under ``native/``. Its name has a digest of sources, compiler and
instruction set, and a digest of its own bytes. As it is code, folder and file must belong to this
user and be writable by no other; a file whose bytes do not match its name is compiled again. It is
written under another name first, so a killed compiler leaves no partial library.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path

from everyframe.checkpoints.folder import cache_folder
from everyframe.hardware.cpu import processor_flags, processor_name

_log = logging.getLogger(__name__)

#: Folder of the sources, and the one that includes all others.
_SOURCES, _MAIN = Path(__file__).parent, "kernels.c"

#: No -ffast-math: it may drop NaN, which the guard looks for.
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math",
          "-fvisibility=hidden", "-fPIC")  # fmt: skip
#: Flags that not every compiler or processor knows; each group is tried in this order.
_WIDE = "-mprefer-vector-width=512"
#: Compile and link flags, best first. OpenMP resolves to the library that torch loaded, if any: a
#: second thread pool would compete with the first.
_THREADS: Sequence[tuple[Sequence[str], Sequence[str]]] = (
    (("-fopenmp",), ()), (("-fopenmp",), ("-fopenmp",)), ((), ()),
)  # fmt: skip

#: Seconds for one compilation; it takes some.
PATIENCE = 120.0
#: Seconds after which what an ended process has not finished is deleted.
_ABANDONED = 3600.0
_UNFINISHED = "making-"


class NoLibraryError(Exception):
    """The kernels can't be used here; the message says why."""


def find_compiler() -> str | None:
    """The C compiler: ``CC`` if set, else gcc, clang or cc."""
    wanted = os.environ.get("CC")
    names = (wanted,) if wanted else ("gcc", "clang", "cc")
    return next((path for name in names if (path := shutil.which(name))), None)


def why_not() -> str | None:
    """What is missing for the kernels, with its install command; None if nothing."""
    if os.name != "posix":
        return "kernels in C are compiled on Linux and macOS only"
    if find_compiler() is not None:
        return None
    wanted = os.environ.get("CC")
    if wanted:
        return f"no C compiler {wanted!r}, which CC names"
    return "no C compiler: " + ("xcode-select --install" if sys.platform == "darwin" else
                                "apt install gcc, or name another one in CC")  # fmt: skip


@cache
def load() -> ctypes.CDLL:
    """The library, compiled if it isn't yet; one attempt a process.

    Raises:
        NoLibraryError: there is no compiler, it fails, or the cache folder can't be trusted.
    """
    try:
        return _load()
    except (OSError, subprocess.SubprocessError) as error:
        raise NoLibraryError(f"kernels in C can't be made here: {error}") from error


def find() -> ctypes.CDLL | None:
    """The library, or None if it can't be loaded; the reason is logged once."""
    return _found()


@cache
def _found() -> ctypes.CDLL | None:
    try:
        return load()
    except NoLibraryError as error:
        _log.warning("%s; plain torch computes instead", error)
        return None


def _load() -> ctypes.CDLL:
    missing = why_not()
    if missing is not None:
        raise NoLibraryError(missing)
    compiler = find_compiler()
    assert compiler is not None
    folder = _private_folder(cache_folder() / "native")
    key = _key(compiler)
    for path in sorted(folder.glob(f"{key}-*.so")):
        if _is_ours(path) and path.stem == f"{key}-{_digest(path.read_bytes())}":
            return ctypes.CDLL(str(path))
        path.unlink(missing_ok=True)
    return _compile(compiler, folder, key)


def _private_folder(folder: Path) -> Path:
    """Create the folder for this user alone.

    Raises:
        NoLibraryError: somebody else owns it, or it is a link.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise NoLibraryError(f"{folder} is not a folder of this user's; remove it")
    if stat.S_IMODE(found.st_mode) != 0o700:
        # Others may have written into it: never load what is there.
        folder.chmod(0o700)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return folder


def _is_ours(path: Path) -> bool:
    """Whether it is a plain file of this user's, which nobody else can write."""
    found = path.lstat()
    is_closed = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and is_closed


def _digest(*parts: bytes) -> str:
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.hexdigest()


def _key(compiler: str) -> str:
    """Digest of everything that the library depends on."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=PATIENCE
    ).stdout
    # With torch's version: the library may be linked with its threads.
    isa = " ".join((version_of("torch"), processor_name(), *sorted(processor_flags())))
    flags = shlex.join((*_FLAGS, _WIDE, *(flag for pair in _THREADS for part in pair
                                          for flag in part)))  # fmt: skip
    return _digest(compiler.encode(), version, isa.encode(), flags.encode(), *_read_sources())


@cache
def sources_digest() -> str:
    """Digest of the kernels' sources: trials of earlier ones say nothing of these."""
    return _digest(*_read_sources())


def _read_sources() -> list[bytes]:
    return [path.read_bytes() for path in sorted(_SOURCES.glob("*.[ch]"))]


def _compile(compiler: str, folder: Path, key: str) -> ctypes.CDLL:
    """Compile, load and store the library by the first set of flags that works here."""
    message = ""
    _remove_abandoned(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_UNFINISHED) as place:
        for to_compile, to_link in _attempts():
            made = Path(place, f"{len(list(Path(place).iterdir()))}.so")
            try:
                _run([compiler, *_FLAGS, *to_compile, "-c", str(_SOURCES / _MAIN)], f"{made}.o")
                _run([compiler, "-shared", f"{made}.o", *to_link, "-lm"], str(made))
                ctypes.CDLL(str(made))
            except (OSError, subprocess.CalledProcessError) as error:
                message = message or str(getattr(error, "stderr", None) or error).strip()
                continue
            stored = folder / f"{key}-{_digest(made.read_bytes())}.so"
            made.chmod(0o600)
            os.replace(made, stored)
            return ctypes.CDLL(str(stored))
    raise NoLibraryError(f"{compiler} can't compile the kernels: {message.splitlines()[0][:200]}")


def _remove_abandoned(folder: Path) -> None:
    """Delete what killed processes have left unfinished."""
    for place in folder.glob(f"{_UNFINISHED}*"):
        with suppress(FileNotFoundError):  # its own process has ended well just now
            if place.stat().st_mtime < time.time() - _ABANDONED:
                shutil.rmtree(place, ignore_errors=True)


def _attempts() -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Flags to compile and to link, the fastest first."""
    for wide in ((_WIDE,), ()):
        for to_compile, to_link in _THREADS:
            yield (*wide, *to_compile), to_link


def _run(command: list[str], output: str) -> None:
    subprocess.run(
        [*command, "-o", output], check=True, capture_output=True, text=True, timeout=PATIENCE
    )
