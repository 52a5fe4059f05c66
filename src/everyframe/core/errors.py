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
    """Root of the tree: something went wrong that a person should read about."""

    exit_code = ExitCode.TROUBLE

    def reworded(self, text: str) -> EveryframeError:
        """Copy of the error with another text."""
        return type(self)(text)


class EveryframeWarning(UserWarning):
    """What a Python caller should read though the video was made: a note, or what was repaired.

    On the command line the same is a line that begins with ``note:`` or ``repaired:``.
    """


class InputError(EveryframeError, ValueError):
    """What was asked can't be done by anybody: a bad size, an unknown option, an empty prompt."""

    exit_code = ExitCode.WRONG_INPUT


class CheckpointError(InputError):
    """A folder or file that is no checkpoint, is broken, or lacks a tensor. Names the culprit."""


class MediaError(InputError):
    """A picture or video that can't be read, or a place that can't be written."""


class MissingPackageError(EveryframeError):
    """An optional package is not installed; the text holds the command that installs it."""

    exit_code = ExitCode.WRONG_INPUT


class CannotRunError(EveryframeError):
    """The plan says that this machine can't do it, and what it could do instead."""

    exit_code = ExitCode.CANNOT_RUN_HERE


@dataclass(frozen=True)
class OutOfMemoryInfo:
    """That memory ran out on `rank`, in step `step` of `stage`, in one of those `components`.

    `where` is the step as a person reads it, `said` what the allocator said.
    """

    stage: str
    step: int
    components: tuple[str, ...]
    where: str
    said: str
    rank: int = 0


class DistributedOutOfMemoryError(CannotRunError):
    """Memory ran out in the middle of what several ranks compute together.

    None of them can do with less by itself; whoever started them can start all of them again.
    """

    def __init__(self, text: str, scarcity: OutOfMemoryInfo) -> None:
        super().__init__(text)
        self.scarcity = scarcity

    def reworded(self, text: str) -> DistributedOutOfMemoryError:
        """Copy of the error with another text."""
        return DistributedOutOfMemoryError(text, self.scarcity)


class NumericsError(EveryframeError):
    """Values went bad beyond repair; the text names step, module and operation."""

    exit_code = ExitCode.NUMERICS


class WorkerDiedError(EveryframeError):
    """A worker process ended by itself or by a signal."""

    exit_code = ExitCode.WORKER_DIED


@dataclass(frozen=True)
class DeviceLoss:
    """A device that was lost: `what` was lost when, what was `said` of it, in one line each.

    Besides what is `likely` and how to `fix` it. `is_of_the_card` where no kernel is to blame: the
    same would have happened to any.
    """

    likely: str
    fix: str
    is_of_the_card: bool = False
    said: str = ""
    what: str = "a device was lost"

    def __str__(self) -> str:
        return f"({self.said}): {self.likely}; {self.fix}"


class DeviceLostError(WorkerDiedError):
    """A device failed under a process, which can't use it any more; a new one may.

    `loss` has the parts of it where the process that lost it tells.
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
