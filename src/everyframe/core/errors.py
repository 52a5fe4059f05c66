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
    """Base of all errors of Everyframe."""

    exit_code = ExitCode.TROUBLE

    def reworded(self, text: str) -> EveryframeError:
        """Copy of the error with another text."""
        return type(self)(text)


class EveryframeWarning(UserWarning):
    """A note or a repair, as a Python warning.

    The command line prints the same as a line that begins with ``note:`` or ``repaired:``.
    """


class InputError(EveryframeError, ValueError):
    """Invalid input on any machine: a bad size, an unknown option, an empty prompt."""

    exit_code = ExitCode.WRONG_INPUT


class CheckpointError(InputError):
    """A folder or file is not a checkpoint, is broken, or lacks a tensor; the message names it."""


class MediaError(InputError):
    """An image or video can't be read, or an output path can't be written."""


class MissingPackageError(EveryframeError):
    """An optional package is not installed; the message has the install command."""

    exit_code = ExitCode.WRONG_INPUT


class CannotRunError(EveryframeError):
    """This machine can't run the plan; the message says what it can run instead."""

    exit_code = ExitCode.CANNOT_RUN_HERE


@dataclass(frozen=True)
class OutOfMemoryInfo:
    """An out-of-memory fault on `rank`, in `step` of `stage`, in one of these `components`.

    `where` names the step for messages; `said` is the allocator's message.
    """

    stage: str
    step: int
    components: tuple[str, ...]
    where: str
    said: str
    rank: int = 0


class DistributedOutOfMemoryError(CannotRunError):
    """Out of memory in a step that several ranks compute together.

    No rank can apply a memory fallback alone; the launcher restarts all of them with the next one.
    """

    def __init__(self, text: str, scarcity: OutOfMemoryInfo) -> None:
        super().__init__(text)
        self.scarcity = scarcity

    def reworded(self, text: str) -> DistributedOutOfMemoryError:
        """Copy of the error with another text."""
        return DistributedOutOfMemoryError(text, self.scarcity)


class NumericsError(EveryframeError):
    """Values are not finite beyond repair; the message names step, module and operation."""

    exit_code = ExitCode.NUMERICS


class WorkerDiedError(EveryframeError):
    """A worker process exited or was killed by a signal."""

    exit_code = ExitCode.WORKER_DIED


@dataclass(frozen=True)
class DeviceLoss:
    """A lost device.

    Attributes:
        likely: the likely cause, in one line.
        fix: how to fix it.
        is_of_the_card: the card is at fault, not the kernel that ran.
        said: the driver's or library's message.
        what: which device was lost, and when.
    """

    likely: str
    fix: str
    is_of_the_card: bool = False
    said: str = ""
    what: str = "a device was lost"

    def __str__(self) -> str:
        return f"({self.said}): {self.likely}; {self.fix}"


class DeviceLostError(WorkerDiedError):
    """A device failed and this process can't use it any more; a new process may.

    `loss` has the details, in the process that lost it.
    """

    def __init__(self, text: str, loss: DeviceLoss | None = None) -> None:
        super().__init__(text)
        self.loss = loss

    def reworded(self, text: str) -> DeviceLostError:
        """Copy of the error with another text."""
        return DeviceLostError(text, self.loss)


class RunLockedError(EveryframeError):
    """A run that another process is working on."""


class NotSerializableError(EveryframeError):
    """A value that can't be kept: an object of somebody else's."""


class CorruptRunError(EveryframeError):
    """What was kept is not there as it was written."""

    exit_code = ExitCode.WRONG_INPUT


class PeerLostError(WorkerDiedError):
    """Another rank went away or does not answer; which one, and why, others may know better."""


def closest_names(given: str, allowed: Iterable[str], count: int = 1) -> list[str]:
    """Names in `allowed` closest to the misspelt `given`, best first; may be empty."""
    by_folded: dict[str, str] = {name.casefold(): name for name in allowed}
    close = difflib.get_close_matches(given.casefold(), list(by_folded), n=count, cutoff=0.5)
    return [by_folded[name] for name in close]


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Clause to append to an error, such as ``"; did you mean 'shapes'?"``, or an empty string."""
    close = closest_names(given, allowed)
    return f"; did you mean {close[0]!r}?" if close else ""
