"""How to resume a run, at the end of messages and errors."""

from __future__ import annotations

import shlex
from pathlib import Path

from everyframe.runs.folder import RunFolder, runs_folder

_HINT = "resume it: "


def resume_command(run: RunFolder) -> str:
    """The command that resumes `run`, with its folder if that is not the default one."""
    where = "" if _is_in_default(run) else f" --run-dir {shlex.quote(str(_parent(run)))}"
    return f"everyframe resume {run.name}{where}"


def resume_hint(run: RunFolder | None, *, is_in_memory: bool = False) -> str:
    """How to resume `run`; empty if nothing is saved.

    A pipeline `is_in_memory` is given to a call in Python.
    """
    if run is None or not run.is_saved:
        return ""
    if not is_in_memory:
        return _HINT + resume_command(run)
    name = run.name if _is_in_default(run) else str(_parent(run) / run.name)
    return f"{_HINT}everyframe.resume({name!r}, pipe=pipe)"


def without_hint(message: str) -> str:
    """The message of an error without the hint at its end, for whoever resumes the run anyway."""
    return message.partition(f"; {_HINT}everyframe")[0]


def _parent(run: RunFolder) -> Path:
    return run.path.absolute().parent


def _is_in_default(run: RunFolder) -> bool:
    root = runs_folder()
    return root is not None and root.absolute() == _parent(run)
