"""Store of compiled blocks, and the rule that only what this device compiled itself is loaded.

A package holds native code: loading it runs it. So its bytes are loaded from one private folder in
the certificate store, where only this user writes, and after a digest of what was compiled. A
folder that a person saved or was sent is compared with that store: a package without an entry
there, or with other bytes, is refused. Packages are found by a key of torch's version, the
instruction set or compute capability, the platform, the block's source, structure and dtypes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import re
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from everyframe._version import __version__
from everyframe.core.errors import InputError
from everyframe.core.paths import expand_path, open_no_link, replace_file
from everyframe.fast_paths.certificates import Verdict, folder
from everyframe.fast_paths.compilation.block_export import CallSizes
from everyframe.hardware.cpu import processor_flags, processor_name
from everyframe.hardware.software import driver_version

_log = logging.getLogger(__name__)

_SCHEMA = "everyframe.package/1"
_LIST = "everyframe-compiled.json"

#: Digests: of what was compiled, and of a library, of which a refused package has none.
_KEY, _LIBRARY = re.compile("[0-9a-f]{24}"), re.compile("([0-9a-f]{64})?")

#: Bytes of the largest description and library that are read.
_MOST_TEXT, _MOST_CODE = 1 << 20, 1 << 31


@dataclass(frozen=True)
class Package:
    """Description of a compiled block, saved as JSON beside its library.

    Attributes:
        key: digest of what was compiled; see `package_key`.
        block: class of the block.
        device: the device's facts, as `machine` gives them.
        sizes: sizes of the inputs that it takes.
        result: structure of its result.
        library: SHA-256 of the library; empty if it is refused.
        verdict: certified or refused.
        reason: why.
        error: relative error against float32.
        limit: largest error allowed.
        gain: time of the plain block over its own.
        seconds: it took to compile.
    """

    key: str
    block: str
    device: dict[str, str]
    sizes: CallSizes
    result: Any
    library: str
    verdict: Verdict
    reason: str
    error: float
    limit: float
    gain: float
    seconds: float

    def text(self) -> str:
        """As JSON."""
        return json.dumps({"schema": _SCHEMA, **asdict(self)}, sort_keys=True, indent=1)

    @property
    def digest(self) -> str:
        """SHA-256 of the description, which holds that of the library: the package's name."""
        return hashlib.sha256(self.text().encode()).hexdigest()


def _package(text: str) -> Package | None:
    """The package of a description, or None if it is not one."""
    try:
        values = json.loads(text)
        if values.pop("schema") != _SCHEMA or set(values) != {
            each.name for each in fields(Package)
        }:
            return None
        facts = values["device"].values()
        if not all(isinstance(fact, str) and fact.isprintable() for fact in facts):
            return None
        # Both become names of files.
        if not _KEY.fullmatch(values["key"]) or not _LIBRARY.fullmatch(values["library"]):
            return None
        sizes = values.pop("sizes")
        dims = tuple(
            tuple(dim if isinstance(dim, int) else (int(dim[0]), dim[1]) for dim in own)
            for own in sizes["dims"]
        )
        return Package(**values, sizes=CallSizes(dims, tuple(sizes["conditions"])))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None


@functools.lru_cache(maxsize=16)
def machine(device: torch.device) -> dict[str, str]:
    """Facts of this machine and device that native code depends on."""
    facts = {
        "everyframe": __version__,
        "torch": str(torch.__version__),
        "platform": f"{sys.platform} {platform.machine()}",
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return {
            **facts,
            "device": torch.cuda.get_device_name(device),
            "instructions": f"compute capability {major}.{minor}",
            "driver": f"CUDA {torch.version.cuda}, driver {driver_version()}",
        }
    flags = hashlib.sha256(" ".join(sorted(processor_flags())).encode()).hexdigest()[:12]
    capability = torch.backends.cpu.get_cpu_capability()
    return {**facts, "device": processor_name(), "instructions": f"{capability} {flags}"}


def packages_folder() -> Path:
    """The private folder, made if it isn't there.

    Raises:
        InputError: somebody else owns it or can enter it.
    """
    path = folder() / "compiled"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = path.lstat()
    if os.name == "posix" and (
        not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077
    ):
        # Closed, not only to writers: folders in it are made with this user's mask.
        raise InputError(
            f"{path} holds native code and others can come in; remove it, or chmod 700 it"
        )
    return path


def find(key: str) -> Iterator[Package]:
    """Packages of that key, in the order of their names."""
    for path in sorted((packages_folder() / key).glob("*.json")):
        found = _package(_text(path))
        if found is not None and found.key == key and found.digest == path.stem:
            yield found
        else:
            _log.warning("%s is damaged; that block is compiled again", path)


def keep(package: Package, library: Path | None = None) -> None:
    """Save a package that was compiled in this process, with the file of its library."""
    if library is not None:
        replace_file(_library(package), library.read_bytes())
    # After its library: what is listed is whole.
    replace_file(packages_folder() / package.key / f"{package.digest}.json", package.text())


def library_of(package: Package) -> Path | None:
    """The library of a package, compared with its digest; None if it is gone or damaged."""
    path = _library(package)
    try:
        code = _read(path, _MOST_CODE)
    except OSError:
        return None
    return path if hashlib.sha256(code).hexdigest() == package.library else None


def digest_of(library: Path) -> str:
    """SHA-256 of a library."""
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _library(package: Package) -> Path:
    return packages_folder() / package.key / f"{package.library}.pt2"


def listed(files: Iterable[str]) -> list[Package]:
    """The packages among these files, which are named as `files_of` does."""
    found = (_package(_text(folder() / name)) for name in files if name.endswith(".json"))
    return [each for each in found if each is not None]


def files_of(package: Package) -> list[str]:
    """Files of a package, relative to the certificates' folder."""
    own = packages_folder() / package.key
    paths = [own / f"{package.digest}.json", *([_library(package)] if package.library else [])]
    return [str(path.relative_to(folder())) for path in paths]


def check_target(target: str | Path) -> Path:
    """The folder that `save` may write.

    Raises:
        InputError: there is something else in it, or a file in its place.
    """
    path = expand_path(target, "the folder of compiled blocks")
    first = next(each for each in (path, *path.parents) if each.exists())
    is_taken = first == path and first.is_dir() and any(path.iterdir())
    if not first.is_dir() or (is_taken and not (path / _LIST).exists()):
        raise InputError(f"{path} is no folder of compiled blocks; name a new one")
    return path


def save(packages: Iterable[Package], target: str | Path, *, title: str) -> Path:
    """Copy packages to a folder, with a list of them; returns the folder.

    Raises:
        InputError: there is something else in it.
    """
    path = check_target(target)
    names = []
    for each in packages:
        library = library_of(each) if each.library else None
        if each.library and library is None:
            raise InputError(f"{_library(each)} is gone or damaged; compile it again")
        if library is not None:
            replace_file(path / library.name, library.read_bytes())
        replace_file(path / f"{each.digest}.json", each.text())
        names.append(each.digest)
    whole = {"schema": _SCHEMA, "title": title, "packages": sorted(set(names))}
    replace_file(path / _LIST, json.dumps(whole, indent=1))
    return path


def check(target: str | Path, device: torch.device | str) -> list[Package]:
    """Packages of a folder, each compared with what this device compiled, and ready to be loaded.

    Raises:
        InputError: it is no such folder, or was compiled elsewhere, for another torch, or changed.
    """
    path = expand_path(target, "the folder of compiled blocks")
    again = f"compile it here: everyframe compile MODEL -o {shlex.quote(str(path))}"
    try:
        whole = json.loads(_read(path / _LIST, _MOST_TEXT))
        names = [str(name) for name in whole["packages"]] if whole["schema"] == _SCHEMA else []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        names = []
    if not names or not all(len(name) == 64 and name.isalnum() for name in names):
        raise InputError(f"{path} is no folder of compiled blocks; {again}")
    return [_check(path, name, torch.device(device), again) for name in names]


def _check(path: Path, name: str, device: torch.device, again: str) -> Package:
    try:
        text = _read(path / f"{name}.json", _MOST_TEXT).decode()
        found = _package(text)
        code = _read(path / f"{found.library}.pt2", _MOST_CODE) if found and found.library else b""
    except (OSError, UnicodeDecodeError) as error:
        message = getattr(error, "strerror", None) or "no text"
        raise InputError(f"{path}: {name[:12]} can't be read ({message}); {again}") from error
    if found is None:
        raise InputError(f"{path}: {name[:12]} is damaged; {again}")
    for fact, here in machine(device).items():
        there = found.device.get(fact)
        if there != here:
            raise InputError(f"{path} was compiled for {fact} {there}, and here is {here}; {again}")
    own = packages_folder() / found.key / f"{name}.json"
    if found.digest != name or not own.is_file():
        raise InputError(
            f"{path}: this device didn't compile {name[:12]}, so its native code isn't loaded; "
            f"{again}"
        )
    if found.library and hashlib.sha256(code).hexdigest() != found.library:
        raise InputError(f"{path}: the code of {name[:12]} was changed or cut short; {again}")
    if found.library and library_of(found) is None:
        replace_file(_library(found), code)
    return found


def _text(path: Path) -> str:
    """A description in the store; empty if it is gone or damaged."""
    try:
        return _read(path, _MOST_TEXT).decode()
    except (OSError, UnicodeDecodeError):
        return ""


def _read(path: Path, most: int) -> bytes:
    """Bytes of a plain file, never through a link."""
    with open(path, "rb", opener=open_no_link) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > most:
            raise OSError(0, "no plain file", str(path))
        return file.read()
