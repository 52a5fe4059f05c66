"""Errors between processes: plain data of an error, and the error from that data. Imports no torch.

Nothing is unpickled: only classes of `everyframe.core.errors` and Python's own are rebuilt.
"""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everyframe.core import errors
from everyframe.core.errors import DistributedOutOfMemoryError, EveryframeError
from everyframe.core.torch_import import explain_import
from everyframe.runs.folder import RunFolder
from everyframe.runs.resume_hint import resume_hint


def error_data(error: Exception) -> dict[str, Any]:
    """What another process needs to raise this error again; see `error_from`."""
    error = explain_import(error)
    data: dict[str, Any] = {"class": type(error).__name__, "text": str(error)}
    if isinstance(error, DistributedOutOfMemoryError):
        data["out_of_memory"] = error.out_of_memory
    if isinstance(error, OSError):
        data |= _system_data(error)
    elif (cause := _system_cause(error)) is not None:
        data["cause"] = _system_data(cause)
    if not isinstance(error, EveryframeError):
        data["trace"] = "".join(traceback.format_exception(error))
    return data


def _system_data(error: OSError) -> dict[str, Any]:
    file = None if error.filename is None else str(error.filename)
    return {"errno": error.errno, "strerror": error.strerror, "file": file}


def _system_cause(error: BaseException) -> OSError | None:
    """The system's error behind this one, such as a full disk; None without one."""
    cause = error.__cause__
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    return cause


def _system_error(data: Mapping[str, Any]) -> OSError:
    return OSError(data["errno"], data["strerror"], data["file"])


def error_from(data: Mapping[str, Any], rank: int) -> Exception:
    """Rebuild the error that `rank` reported, in its own class if that is ours or Python's.

    The system's error behind it is behind this one too: a full disk passes, a damaged file doesn't.
    """
    name, text = data["class"], data["text"]
    cause: Exception | None = _system_error(data["cause"]) if "cause" in data else None
    if "out_of_memory" in data:
        return DistributedOutOfMemoryError(text, replace(data["out_of_memory"], rank=rank))
    own = getattr(errors, name, None)
    if isinstance(own, type) and issubclass(own, EveryframeError):
        found = own(text)
        found.__cause__ = cause
        return found
    pythons = getattr(builtins, name, None)
    error: Exception
    if data.get("strerror"):
        error = _system_error(data)
    elif isinstance(pythons, type) and issubclass(pythons, Exception):
        error = _of_class(pythons, text)
    else:
        error = EveryframeError(text) if "trace" not in data else RuntimeError(f"{name}: {text}")
    if "trace" in data:
        error.__cause__ = _InWorkerError(data["trace"])
        error.__cause__.__cause__ = cause
    return error


def with_resume_hint(error: Exception, run: RunFolder | None) -> Exception:
    """The error with the command that resumes `run`, where a resumed run may end otherwise.

    Of several ranks only the first one's errors have it, and any rank's may be the one that counts.
    """
    if not isinstance(error, EveryframeError) or error.repeats:
        return error
    if run is None or run.name in str(error) or not (hint := resume_hint(run)):
        return error
    return error.reworded(f"{error}; {hint}")


class _InWorkerError(Exception):
    """Wrapper that shows the worker's traceback above ours."""

    def __str__(self) -> str:
        return "in the worker:\n" + "".join(self.args)


def _of_class(kind: type[Exception], text: str) -> Exception:
    """Build a Python error of that class; some can't be built and are named in the text."""
    try:
        return kind(text)
    except TypeError:
        return RuntimeError(f"{kind.__name__}: {text}")
