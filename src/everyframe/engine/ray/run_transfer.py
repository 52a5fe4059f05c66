"""Copy the run folder of one machine to another while the run is at work, and back to resume it.

`RunChanges` is what changed in a folder since the last look. It is consistent: a state comes with
all tensors that it names. `write_changes` writes it elsewhere, tensors before the state, so that a
crash at any moment leaves the old state or the new one. Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from everyframe.core.errors import CorruptRunError
from everyframe.core.paths import replace_file
from everyframe.core.serialization import from_jsonable, to_jsonable
from everyframe.runs.folder import RunFolder

#: Files of a run, and no others: a name never leads out of the folder.
_NAMES = re.compile(
    r"(state|oom_events)(-\d+)?\.json"
    r"|(given|tensors(-\d+)?)/[0-9a-f]+\.safetensors"
    r"|answers/\d+/[0-9a-f-]+\.safetensors"
)
_STATE = re.compile(r"state(-\d+)?\.json")
_RUN = "run.json"
#: Attempts to read a state that is being replaced.
_ATTEMPTS = 20

_Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class RunChanges:
    """Changes of a run folder.

    Attributes:
        run: the constant data, if it changed.
        files: contents of new files by name, as uint8 (n,).
        removed: names of files that are gone.
        is_own: whether the constant data is the user's own, for the copy's signature.
    """

    run: Mapping[str, Any] | None
    files: Mapping[str, Any]
    removed: tuple[str, ...] = ()
    is_own: bool = True

    def with_texts(self, texts: Mapping[str, str]) -> RunChanges:
        """The changes with `texts`, such as paths, replaced in the request and the plan."""
        if self.run is None:
            return self
        parts = {name: replace_texts(self.run[name], texts) for name in ("request", "plan")}
        return replace(self, run={**self.run, **parts})


class RunReader:
    """Reads what changed in a run folder, which another process writes.

    With `is_lead` the folder has the constant data, or is gone; the folders of other ranks have
    states alone. With `is_copy` what is there now is known to the other side.
    """

    def __init__(self, folder: RunFolder, *, is_lead: bool, is_copy: bool = False) -> None:
        self.folder = folder
        self._is_lead = is_lead
        self._known = self._stamps() if is_copy else {}
        self._run = _stamp(folder.path / _RUN) if is_copy else None

    def changes(self) -> RunChanges | None:
        """What changed since the last call; None if nothing did, or if the folder is gone."""
        for _ in range(_ATTEMPTS):
            found = self._stamps()
            new = [name for name, stamp in found.items() if self._known.get(name) != stamp]
            # The state first: the files it names were written before it.
            new.sort(key=lambda name: (not _STATE.fullmatch(name), name))
            files = {name: data for name in new if (data := self._read(name)) is not None}
            if _states(found) == _states(self._stamps()):
                break
        else:
            return None
        stamp = _stamp(self.folder.path / _RUN)
        # This file is deleted first when a run is removed.
        if stamp is None and (self._is_lead or self._run is not None):
            return None
        run = self.folder.run() if self._is_lead and stamp != self._run else None
        removed = tuple(sorted(set(self._known) - set(found)))
        if run is None and not files and not removed:
            return None
        self._known = {k: stamp for k, stamp in found.items() if k not in new or k in files}
        self._run = stamp
        return RunChanges(run, files, removed, run is None or self.folder.is_own())

    def _stamps(self) -> dict[str, _Stamp]:
        found: dict[str, _Stamp] = {}
        root = self.folder.path
        for place, _, names in os.walk(root):
            for name in names:
                path = Path(place, name)
                inside, stamp = path.relative_to(root).as_posix(), _stamp(path)
                if stamp is not None and _NAMES.fullmatch(inside):
                    found[inside] = stamp
        return found

    def _read(self, name: str) -> Any:
        try:
            return np.frombuffer((self.folder.path / name).read_bytes(), np.uint8)
        except FileNotFoundError:
            return None  # swept: no newer state names it


def _stamp(path: Path) -> _Stamp | None:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


def _states(stamps: Mapping[str, _Stamp]) -> dict[str, _Stamp]:
    return {name: stamp for name, stamp in stamps.items() if _STATE.fullmatch(name)}


def write_changes(
    folder: RunFolder, changes: RunChanges, place: Path, texts: Mapping[str, str]
) -> None:
    """Write the changes into `folder`, which exists.

    The copy's working folder is `place`; `texts` are paths to replace in its request and plan.

    Raises:
        CorruptRunError: a name is none of a run's files.
        OSError: the folder can't be written; its state is the old one.
    """
    for name in (*changes.files, *changes.removed):
        if not _NAMES.fullmatch(name):
            raise CorruptRunError(f"{name!r} is no file of a run")
    run = changes.with_texts(texts).run
    if run is not None:
        folder.write_run({**run, "place": str(place)}, is_own=changes.is_own)
    for name in sorted(changes.files, key=lambda name: (bool(_STATE.fullmatch(name)), name)):
        path = folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, bytes(changes.files[name]), is_durable=True)
    for name in changes.removed:
        (folder.path / name).unlink(missing_ok=True)


def with_texts(value: Any, texts: Mapping[str, str]) -> Any:
    """A value of ours with each text that is a key of `texts` replaced; prompts never are."""
    held: list[Any] = []

    def keep(each: Any) -> dict[str, Any]:
        held.append(each)
        return {"as": "held", "at": len(held) - 1}

    plain = replace_texts(to_jsonable(value, keep), texts)
    return from_jsonable(plain, lambda mark: held[mark["at"]])


def replace_texts(plain: Any, texts: Mapping[str, str]) -> Any:
    """The same for JSON data."""
    if isinstance(plain, Mapping):
        return {
            name: each if "prompt" in name else replace_texts(each, texts)
            for name, each in plain.items()
        }
    if isinstance(plain, (list, tuple)):
        return [replace_texts(each, texts) for each in plain]
    return texts.get(plain, plain) if isinstance(plain, str) else plain
