"""The runs that can be gone on with, as a person wants to see them. No torch here.

Read next: `folder.py`; `everyframe.cli.resume`, which prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyframe.core.errors import DamagedError
from everyframe.runs.files import UNREADABLE
from everyframe.runs.folder import RunFolder, all_runs


@dataclass(frozen=True)
class Listed:
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


def list_runs(root: str | Path | None = None) -> list[Listed]:
    """The runs in a folder (None: where they lie by default), oldest first."""
    return [_listed(folder) for folder in all_runs(None if root is None else Path(root))]


def _listed(folder: RunFolder) -> Listed:
    try:
        written = folder.run()
        settings: Mapping[str, Any] = written["record"]["settings"]
        model, prompt = str(written["record"]["model"]["name"]), str(settings["prompt"])
        seed = int(settings["seed"])
        progress = _progress(folder, settings)
    except (DamagedError, *UNREADABLE) as error:
        model, prompt, seed = "?", "", 0
        progress = f"can't be read: {error}"
    return Listed(
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
