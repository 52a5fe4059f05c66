"""Where runs lie, what there is of each, and whose it is at the moment. No torch here.

A run's folder is called by the time at which it began. In it: ``run.json``, written once (what was
asked, the plan, the record, with arrays that were given in ``given/``), ``state.json`` (how far it
came, with ``tensors/`` that it names; ``state-1.json`` and so on for other groups of ranks, which
make other videos of the same run), ``shortages.json`` (when memory ran out), ``answers/``, and
``lock``, which is the running process's for as long as it lives. Read next: `run_state.py`.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from everyframe.core.errors import CorruptRunError, InputError, RunLockedError, did_you_mean
from everyframe.core.paths import check_path, expand_path, home_folder
from everyframe.runs.atomic_write import UNREADABLE, read_json, write_json

#: What a run folder says that it is; another number is another version's.
SCHEMA = "everyframe.run/2"
_RUN, _STATE, _LOCK, _DONE = "run.json", "state", "lock", "done-"
#: Seconds between attempts to lock a run.
_PAUSES = (0.02, 0.08, 0.2)
#: The value that turns keeping off.
OFF = "off"


def runs_folder() -> Path | None:
    """``EVERYFRAME_RUNS`` (None for ``off``), else ``everyframe/runs`` in the place for states:
    ``XDG_STATE_HOME``, else ``~/.local/state``."""
    own = os.environ.get("EVERYFRAME_RUNS")
    if own:
        return None if own == OFF else expand_path(own, "EVERYFRAME_RUNS")
    shared = os.environ.get("XDG_STATE_HOME")
    base = expand_path(shared, "XDG_STATE_HOME") if shared else home_folder() / ".local" / "state"
    return base / "everyframe" / "runs"


def root_of(given: str | Path | None) -> Path | None:
    """The folder of runs that was given, else that of `runs_folder`; None for ``off``."""
    if given is None:
        return runs_folder()
    return None if str(given) == OFF else expand_path(given, "run_dir").absolute()


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run; `part` is the group of ranks whose state it is asked for."""

    path: Path
    part: int = 0

    @property
    def name(self) -> str:
        """What it is called."""
        return self.path.name

    @property
    def tensors(self) -> Path:
        """Where its tensors lie."""
        return self.path / f"tensors{self._of_part}"

    @property
    def _of_part(self) -> str:
        return f"-{self.part}" if self.part else ""

    @property
    def _state(self) -> Path:
        return self.path / f"{_STATE}{self._of_part}.json"

    @property
    def _shortages(self) -> Path:
        return self.path / f"shortages{self._of_part}.json"

    @property
    def given(self) -> Path:
        """Where tensors and pictures lie that came with the request."""
        return self.path / "given"

    @property
    def answers(self) -> Path:
        """Where the answers of a foreign pipeline's models lie."""
        return self.path / "answers"

    def num_answers(self) -> int:
        """How many answers of a foreign pipeline's models there are."""
        return sum(1 for _ in self.answers.glob("*/*.safetensors"))

    def write_run(self, values: Mapping[str, Any]) -> None:
        """Write what does not change. Raises `OSError`."""
        write_json(self.path / _RUN, {"schema": SCHEMA, **values})

    def write_state(self, values: Mapping[str, Any]) -> None:
        """Put this in the place of the state. Raises `OSError`; the old one holds then."""
        write_json(self._state, values)

    def write_shortages(self, values: Sequence[Any]) -> None:
        """Put this in the place of the shortages of memory. Raises `OSError`."""
        write_json(self._shortages, {"shortages": values})

    def shortages(self) -> list[Any]:
        """What `write_shortages` wrote last. Raises `CorruptRunError`."""
        values = read_json(self._shortages) or {}
        return list(values.get("shortages", ()))

    def run(self) -> dict[str, Any]:
        """What `write_run` wrote. Raises `CorruptRunError` for no run, or another version's."""
        values = read_json(self.path / _RUN)
        if values is None or values.get("schema") != SCHEMA:
            found = "nothing" if values is None else repr(values.get("schema"))
            raise CorruptRunError(f"{self.path} holds no run of {SCHEMA!r}, but {found}")
        return values

    def is_readable(self) -> bool:
        """Whether it is as it was written, as far as what does not change goes."""
        try:
            self.run()
        except CorruptRunError:
            return False
        return True

    def began(self) -> float:
        """When it was begun, in seconds since 1970; names tell it to the second and are used again.

        Of one that can't be read: when its folder was changed last.
        """
        try:
            return float(self.run()["began"])
        except (CorruptRunError, KeyError, TypeError, ValueError):
            return self.path.stat().st_mtime

    def state(self) -> dict[str, Any] | None:
        """What `write_state` wrote last; None before the first time."""
        return read_json(self._state)

    def parts(self) -> tuple[RunFolder, ...]:
        """This folder for each group of which there is a state."""
        found = [replace(self, part=0)]
        for path in self.path.glob(f"{_STATE}-*.json"):
            number = path.stem.removeprefix(f"{_STATE}-")
            found += [replace(self, part=int(number))] if number.isdigit() else []
        return tuple(sorted(found, key=lambda each: each.part))

    def mark_done(self, seed: int) -> None:
        """Note that the video of this seed is where it belongs, and need not be made again."""
        (self.path / f"{_DONE}{seed}").touch()

    def done(self) -> tuple[int, ...]:
        """The seeds of `mark_done`."""
        return tuple(int(each.name.removeprefix(_DONE)) for each in self.path.glob(f"{_DONE}*"))

    def locked(self) -> Lock:
        """The run for this process alone.

        Raises:
            BusyError: another process has it. OSError: nothing can be locked there.
        """
        return Lock(self.path / _LOCK)

    def is_busy(self) -> bool:
        """Whether a process is working on it; no, where nothing can be locked. Writes nothing."""
        try:
            file = (self.path / _LOCK).open("rb")
        except OSError:
            return False  # none was ever taken, or it is nobody's whom we could ask
        with file:
            try:
                _lock(file, is_shared=True)
            except OSError as error:
                return _is_of_another(error)
        return False

    def last_written(self) -> float:
        """When anything of it was written last, in seconds since 1970."""
        places = [self.path, *self.path.rglob("*")]
        return max(place.stat().st_mtime for place in places if place.name != _LOCK)

    def num_bytes(self) -> int:
        """What it takes on the disk."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def remove(self) -> None:
        """Remove it all: first what makes it a run, so that half of it is never taken for one."""
        (self.path / _RUN).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)


class Lock:
    """A run that is this process's own until `release`, or until it ends, however it does."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] | None = None
        file = path.open("ab")
        try:
            _lock_patiently(file)
        except OSError as error:
            file.close()
            if not _is_of_another(error):
                raise OSError(
                    error.errno, f"no file can be locked there: {error.strerror}"
                ) from error
            raise RunLockedError(
                f"the run {path.parent.name} is being worked on by another process; wait for it, "
                "or end it first"
            ) from error
        self._file = file

    def release(self) -> None:
        """Let others have it."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _lock_patiently(file: IO[bytes]) -> None:
    """Take the file; whoever only asks whether a run is busy has it for less than a moment."""
    for pause in _PAUSES:
        try:
            _lock(file)
        except OSError as error:
            if not _is_of_another(error):
                raise
            time.sleep(pause)
        else:
            return
    _lock(file)


def _is_of_another(error: OSError) -> bool:
    """Whether a lock is another process's; else there are none on that file system."""
    return error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


def _lock(file: IO[bytes], *, is_shared: bool = False) -> None:
    """Take the file, which the system gives back when the process ends; `OSError` if it can't.

    With `is_shared` others may ask for the same; a file that is only read can be had no other way
    on a network's file system.
    """
    if os.name == "posix":
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    else:
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]


def new_run(root: Path) -> RunFolder:
    """A new, empty run folder in `root`. Raises `OSError`."""
    root.mkdir(parents=True, exist_ok=True)
    began = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        path = root / (f"{began}-{number}" if number else began)
        try:
            # What was asked is nobody else's business.
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return RunFolder(path)
    raise FileExistsError(f"there are too many runs in {root}")


def all_runs(root: Path | None = None) -> Iterator[RunFolder]:
    """The runs in a folder (that of `runs_folder` if None), oldest first."""
    root = runs_folder() if root is None else root
    if root is None or not root.is_dir():
        return
    found = [RunFolder(path) for path in root.iterdir() if (path / _RUN).is_file()]
    yield from sorted(found, key=lambda run: (run.began(), run.name))


def free_runs(root: Path | None = None) -> list[RunFolder]:
    """The runs that nobody works on, oldest first."""
    return [run for run in all_runs(root) if not run.is_busy()]


def find_run(name: str | Path | None = None, root: Path | None = None) -> RunFolder:
    """The run of that name or at that path; without a name the last one that nobody works on.

    Raises:
        InputError: there is none.
    """
    if name is not None and (Path(check_path(name, "the run")) / _RUN).is_file():
        return RunFolder(Path(name).absolute())
    if name is None:
        free = free_runs(root)
        if not free:
            raise InputError("no run was broken off: there is nothing to go on with")
        return free[-1]
    found = list(all_runs(root))
    for run in found:
        if run.name == str(name):
            return run
    near = did_you_mean(str(name), [run.name for run in found])
    raise InputError(f"there is no run {str(name)!r}{near}; everyframe resume --list shows all")


@dataclass(frozen=True)
class RunSummary:
    """One run: `progress` is how far it came, in words.

    `began` and `written`, when anything of it was written last, are in seconds since 1970.
    """

    run: str
    path: str
    began: float
    model: str
    prompt: str
    seed: int
    progress: str
    num_bytes: int
    is_busy: bool
    written: float


def list_runs(root: str | Path | None = None) -> list[RunSummary]:
    """The runs in a folder (None: where they lie by default), oldest first."""
    return [_listed(folder) for folder in all_runs(None if root is None else Path(root))]


def _listed(folder: RunFolder) -> RunSummary:
    try:
        written = folder.run()
        settings: Mapping[str, Any] = written["record"]["settings"]
        model, prompt = str(written["record"]["model"]["name"]), str(settings["prompt"])
        seed = int(settings["seed"])
        progress = _progress(folder, settings)
    except (CorruptRunError, *UNREADABLE) as error:
        model, prompt, seed = "?", "", 0
        progress = f"can't be read: {error}"
    return RunSummary(
        run=folder.name,
        path=str(folder.path),
        began=folder.began(),
        model=model,
        prompt=prompt,
        seed=seed,
        progress=progress,
        num_bytes=folder.num_bytes(),
        is_busy=folder.is_busy(),
        written=folder.last_written(),
    )


def _progress(folder: RunFolder, settings: Mapping[str, Any]) -> str:
    num_answers = folder.num_answers()
    if num_answers:
        return f"{num_answers} calls of its models"
    state = folder.state()
    if state is None:
        return "at its beginning"
    clip = f"clip {state['clip'] + 1} of {settings['chain']}, " if settings["chain"] > 1 else ""
    steps = sum(take["step"] for take in state["takes"])
    return f"{clip}stage {state['stage'] + 1}" + (f", {steps} steps of it" if steps else "")
