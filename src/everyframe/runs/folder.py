"""Run folders on disk: where they are, what each contains, and which process has locked it.

A run folder is named after its start time. It contains:

- ``run.json``: request, plan and record, written once; arrays of the request are in ``given/``.
- ``state.json``: progress, with the tensors that it names in ``tensors/``. ``state-1.json`` and so
  on are those of other video groups, which make other videos of the same run.
- ``oom_events.json``: out-of-memory events.
- ``answers/``: results of a pipeline's components.
- ``lock``: locked by the running process until it exits.

Imports no torch.
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
from everyframe.core.paths import check_path, expand_path, facts_in, size_of, state_folder
from everyframe.runs.checksummed_json import UNREADABLE, read_json, write_json
from everyframe.runs.signature import SIGNATURE, check_files, is_signed, sign

#: Schema of a run folder; another number belongs to another version.
SCHEMA = "everyframe.run/4"
_RUN, _STATE, _LOCK, _DONE = "run.json", "state", "lock", "done-"
#: Seconds between attempts to lock a run.
_PAUSES = (0.02, 0.08, 0.2)
#: Value that disables saving.
OFF = "off"


def runs_folder() -> Path | None:
    """Default folder of runs: ``EVERYFRAME_RUNS``, else ``runs`` in the state folder.

    None if ``EVERYFRAME_RUNS`` is ``off``.
    """
    own = os.environ.get("EVERYFRAME_RUNS")
    if own:
        return None if own == OFF else expand_path(own, "EVERYFRAME_RUNS")
    return state_folder() / "runs"


def root_of(given: str | Path | None) -> Path | None:
    """The given folder of runs, else that of `runs_folder`; None for ``off``."""
    if given is None:
        return runs_folder()
    return None if str(given) == OFF else expand_path(given, "run_dir").absolute()


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run; `part` selects the video group whose state is read and written."""

    path: Path
    part: int = 0

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_saved(self) -> bool:
        """Whether it can be resumed: not before it was written, nor after it was removed."""
        return (self.path / _RUN).is_file()

    @property
    def tensors(self) -> Path:
        return self.path / f"tensors{self._of_part}"

    @property
    def _of_part(self) -> str:
        return f"-{self.part}" if self.part else ""

    @property
    def _state(self) -> Path:
        return self.path / f"{_STATE}{self._of_part}.json"

    @property
    def _oom_events(self) -> Path:
        return self.path / f"oom_events{self._of_part}.json"

    @property
    def given(self) -> Path:
        """Folder of tensors and images that came with the request."""
        return self.path / "given"

    @property
    def answers(self) -> Path:
        """Folder of results of a pipeline's components."""
        return self.path / "answers"

    def num_answers(self) -> int:
        return sum(1 for _ in self.answers.glob("*/*.safetensors"))

    def write_run(self, values: Mapping[str, Any], *, is_own: bool = True) -> None:
        """Write the constant data, signed if it is this user's own. Raises `OSError`."""
        values = {name: value for name, value in values.items() if name != SIGNATURE}
        values = {"schema": SCHEMA, **values}
        write_json(self.path / _RUN, sign(values) if is_own else values)

    def write_state(self, values: Mapping[str, Any]) -> None:
        write_json(self._state, values)

    def write_oom_events(self, values: Sequence[Any]) -> None:
        write_json(self._oom_events, {"events": values})

    def oom_events(self) -> list[Any]:
        values = read_json(self._oom_events) or {}
        return list(values.get("events", ()))

    def run(self) -> dict[str, Any]:
        """Read the constant data. Raises `CorruptRunError` if missing or of another version."""
        values = read_json(self.path / _RUN)
        found = None if values is None else values.get("schema")
        if values is None or found != SCHEMA:
            if str(found).startswith(f"{SCHEMA.partition('/')[0]}/"):
                raise CorruptRunError(
                    f"{self.path / _RUN} is by another version of Everyframe ({found!r}, this one "
                    f"has {SCHEMA!r}); finish the run with that version, or make its video again"
                )
            raise CorruptRunError(f"{self.path / _RUN} holds no run of {SCHEMA!r}, but {found!r}")
        return values

    def is_own(self) -> bool:
        """Whether this user's Everyframe wrote the constant data. Raises `CorruptRunError`."""
        return is_signed(self.run())

    def is_readable(self) -> bool:
        try:
            self.run()
        except CorruptRunError:
            return False
        return True

    def began(self) -> float:
        """Start time in seconds since 1970; names have whole seconds and are reused.

        For an unreadable run: when it last changed.
        """
        try:
            return float(self.run()["began"])
        except (CorruptRunError, *UNREADABLE):
            return self.last_written()

    def state(self) -> dict[str, Any] | None:
        return read_json(self._state)

    def parts(self) -> tuple[RunFolder, ...]:
        """This folder for each video group with a state."""
        found = [replace(self, part=0)]
        for path in self.path.glob(f"{_STATE}-*.json"):
            number = path.stem.removeprefix(f"{_STATE}-")
            found += [replace(self, part=int(number))] if number.isdecimal() else []
        return tuple(sorted(found, key=lambda each: each.part))

    def mark_done(self, seed: int) -> None:
        """Mark the video of this seed as delivered; it need not be made again."""
        (self.path / f"{_DONE}{seed}").touch()

    def done(self) -> tuple[int, ...]:
        """The seeds of `mark_done`."""
        return tuple(int(each.name.removeprefix(_DONE)) for each in self.path.glob(f"{_DONE}*"))

    def lock(self) -> Lock:
        """Lock the run for this process.

        Raises:
            CorruptRunError: the folder holds links.
            RunLockedError: another process has it.
            OSError: the file system has no locks.
        """
        check_files(self.path)
        return Lock(self.path / _LOCK)

    def is_busy(self) -> bool:
        """Whether a process is working on it; false without file locks. Writes nothing."""
        try:
            file = (self.path / _LOCK).open("rb")
        except OSError:
            return False  # no lock was ever taken, or it can't be read
        with file:
            try:
                _lock(file, is_shared=True)
            except OSError as error:
                return _is_of_another(error)
        return False

    def last_written(self) -> float:
        """Time of the last write in seconds since 1970; 0 for a run that is removed."""
        facts = (facts for path, facts in facts_in(self.path) if path.name != _LOCK)
        return max((each.st_mtime for each in facts), default=0.0)

    def num_bytes(self) -> int:
        return size_of(self.path)

    def remove(self) -> None:
        """Delete the folder, ``run.json`` first, so that half of it never passes for a run."""
        (self.path / _RUN).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)


class Lock:
    """Lock on a run, held until `release` or the end of the process, however it ends.

    `what` names in errors what is locked; None is the run of that folder.
    """

    def __init__(self, path: Path, what: str | None = None) -> None:
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
                f"{what or f'the run {path.parent.name}'} is in use by another process; wait for "
                "it, or end it first"
            ) from error
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _lock_patiently(file: IO[bytes]) -> None:
    """Lock the file, with retries: a check whether a run is busy locks it for an instant."""
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
    """Whether another process has the lock; otherwise the file system has none."""
    return error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


def _lock(file: IO[bytes], *, is_shared: bool = False) -> None:
    """Lock the file until the process ends; `OSError` if that fails.

    `is_shared` takes a shared lock, the only kind that network file systems give for a read-only
    file.
    """
    if os.name == "posix":
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    else:
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]


def new_run(root: Path, name: str | None = None) -> RunFolder:
    """Create an empty run folder in `root`, named `name` or after its time. Raises `OSError`."""
    root.mkdir(parents=True, exist_ok=True)
    began = name or time.strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        path = root / (f"{began}-{number}" if number else began)
        try:
            # Requests are private.
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return RunFolder(path)
    raise FileExistsError(f"there are too many runs in {root}")


def all_runs(root: Path | None = None) -> Iterator[RunFolder]:
    """The runs in a folder (None: `runs_folder`), oldest first."""
    root = runs_folder() if root is None else root
    if root is None or not root.is_dir():
        return
    found = [RunFolder(path) for path in root.iterdir() if (path / _RUN).is_file()]
    yield from sorted(found, key=lambda run: (run.began(), run.name))


def free_runs(root: Path | None = None) -> list[RunFolder]:
    """The runs that no process works on, oldest first."""
    return [run for run in all_runs(root) if not run.is_busy()]


def find_run(name: str | Path | None = None, root: Path | None = None) -> RunFolder:
    """Find a run by name or path; without either, the latest that no process works on.

    Raises:
        InputError: there is none.
    """
    if name is not None and (Path(check_path(name, "the run")) / _RUN).is_file():
        return RunFolder(Path(name).absolute())
    if name is None:
        free = free_runs(root)
        if not free:
            raise InputError("there is no interrupted run: nothing to resume")
        return free[-1]
    found = list(all_runs(root))
    for run in found:
        if run.name == str(name):
            return run
    near = did_you_mean(str(name), [run.name for run in found])
    raise InputError(f"there is no run {str(name)!r}{near}; everyframe resume --list shows all")


@dataclass(frozen=True)
class RunSummary:
    """Summary of one run.

    Attributes:
        run: its name.
        path: its folder.
        began: start time in seconds since 1970.
        model: name of the model.
        prompt: the prompt.
        seed: the first seed.
        progress: progress in words.
        num_bytes: size on disk.
        is_busy: whether a process works on it.
        written: time of the last write in seconds since 1970.
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
    """Summarize the runs in a folder (None: the default one), oldest first."""
    found = [(run, _summarize(run)) for run in all_runs(None if root is None else Path(root))]
    return [summary for run, summary in found if run.is_saved]  # others ended meanwhile


def _summarize(folder: RunFolder) -> RunSummary:
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
    steps = sum(video["step"] for video in state["takes"])
    return f"{clip}stage {state['stage'] + 1}" + (f", {steps} steps of it" if steps else "")
