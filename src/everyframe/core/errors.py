"""Every error that a user can meet, and its exit code on the command line.

The text of an error is for the user: what was given, what is allowed, what to do. Broken invariants
of our own are `assert`s and never one of these. `everyframe.cli.main` turns an error into one line
and an exit code.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """The one table of exit codes (``128 + signal`` is left to the shell)."""

    DONE = 0
    TROUBLE = 1
    WRONG_INPUT = 2
    CANNOT_RUN_HERE = 3
    NUMERICS = 4
    WORKER_DIED = 5
    INTERRUPTED = 130


class EveryframeError(Exception):
    """Base of all errors that a user can meet.

    Attributes:
        repeats: whether a resumed run would fail in the same way, so that nothing is kept for it.
    """

    exit_code = ExitCode.TROUBLE
    repeats = False

    def reworded(self, text: str) -> EveryframeError:
        """Copy of the error with another text."""
        return type(self)(text)


class EveryframeWarning(UserWarning):
    """A note or a repair, for Python callers; the video is made.

    The command line prints it as a line that begins with ``note:`` or ``repaired:``.
    """


class InputError(EveryframeError, ValueError):
    """The input is invalid on every machine: a bad size, an unknown option, an empty prompt."""

    exit_code = ExitCode.WRONG_INPUT
    repeats = True


class CheckpointError(InputError):
    """A folder or file is no checkpoint, is damaged or lacks a tensor; the text names it."""


class MediaError(InputError):
    """An image or video can't be read, or an output can't be written."""

    repeats = False  # another path may be written


class MissingPackageError(EveryframeError):
    """An optional package is not installed; the message has the install command."""

    exit_code = ExitCode.WRONG_INPUT


class CannotRunError(EveryframeError):
    """This machine can't run the request; the text says what it could run instead."""

    exit_code = ExitCode.CANNOT_RUN_HERE


@dataclass(frozen=True)
class OutOfMemoryInfo:
    """Where memory ran out.

    Attributes:
        stage: name of the stage.
        step: number of the step, from 1.
        components: one of these ran out of memory.
        where: the step, for a message.
        message: the allocator's.
        rank: the rank that ran out of memory.
    """

    stage: str
    step: int
    components: tuple[str, ...]
    where: str
    message: str
    rank: int = 0


class DistributedOutOfMemoryError(CannotRunError):
    """Memory ran out while several ranks computed together.

    No rank can use less memory alone; the launcher can restart all of them.
    """

    def __init__(self, text: str, out_of_memory: OutOfMemoryInfo) -> None:
        super().__init__(text)
        self.out_of_memory = out_of_memory

    def reworded(self, text: str) -> DistributedOutOfMemoryError:
        """Copy of the error with another text."""
        return DistributedOutOfMemoryError(text, self.out_of_memory)


class DevicesBusyError(EveryframeError):
    """Others use the devices of a cluster; the same job can run later. Nothing saved is lost."""

    exit_code = ExitCode.CANNOT_RUN_HERE


class NumericsError(EveryframeError):
    """Values are not finite and can't be repaired; the text names step, module and operation."""

    exit_code = ExitCode.NUMERICS
    repeats = True


class WorkerDiedError(EveryframeError):
    """A worker process exited or was killed by a signal."""

    exit_code = ExitCode.WORKER_DIED


@dataclass(frozen=True)
class DeviceLoss:
    """A lost device, one line a field.

    Attributes:
        likely: the likely cause.
        fix: what to do.
        is_of_the_card: whether no kernel is to blame, because any would have failed.
        message: the driver's.
        what: what was lost, and when.
    """

    likely: str
    fix: str
    is_of_the_card: bool = False
    message: str = ""
    what: str = "a device was lost"

    def __str__(self) -> str:
        return f"({self.message}): {self.likely}; {self.fix}"


class DeviceLostError(WorkerDiedError):
    """A device failed, and this process can't use it any more; a new process may.

    `loss` is set if the process that lost it reports the details.
    """

    def __init__(self, text: str, loss: DeviceLoss | None = None) -> None:
        super().__init__(text)
        self.loss = loss

    def reworded(self, text: str) -> DeviceLostError:
        """Copy of the error with another text."""
        return DeviceLostError(text, self.loss)


class RunLockedError(EveryframeError):
    """Another process works on this run, or in this data folder."""


class StoreError(EveryframeError):
    """The server's queue can't be read or written: a full or damaged disk, or a read-only one."""


class NoSuchVideoError(EveryframeError, LookupError):
    """The server has no job of that id, or none any more."""

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__(f"there is no video {id!r}")


class VideoStatusError(InputError):
    """The server's job has a status in which this can't be done with it."""


class QueueFullError(EveryframeError):
    """The server's queue takes no more jobs for now."""


class RunStoppedError(EveryframeError):
    """A run was stopped on purpose, by a `StopSwitch`; its saved state is left."""


class LeftBatchError(EveryframeError):
    """A run of a batch needs what would change the other runs; it is resumed alone."""


class NotSerializableError(EveryframeError):
    """A value can't be saved: it is an object of another library."""


class CorruptRunError(EveryframeError):
    """A saved file is missing, damaged or not what Everyframe writes."""

    exit_code = ExitCode.WRONG_INPUT


class PeerLostError(WorkerDiedError):
    """Another rank ended or does not answer; this rank does not know which one, or why."""


def first_line(error: BaseException) -> str:
    """First line of an error's text; the name of its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()


def closest_names(given: str, allowed: Iterable[str], count: int = 1) -> list[str]:
    """Names in `allowed` closest to the misspelt `given`, best first; may be empty."""
    by_folded: dict[str, str] = {name.casefold(): name for name in allowed}
    close = difflib.get_close_matches(given.casefold(), list(by_folded), n=count, cutoff=0.5)
    return [by_folded[name] for name in close]


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Clause to append to an error, such as ``"; did you mean 'shapes'?"``, or an empty string."""
    close = closest_names(given, allowed)
    return f"; did you mean {close[0]!r}?" if close else ""
