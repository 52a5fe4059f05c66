"""What docstrings and comments of the package name in it by a dotted path is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import everyframe

PACKAGE = Path(everyframe.__file__).parent
FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
#: A path in backticks, such as `runs.folder.find_run`, with or without the package's own name.
_REFERENCE = re.compile(r"`(?:everyframe\.)?([a-z_]+(?:\.\w+)+)(?:\(\))?`")


def missing(text: str) -> Iterator[str]:
    """References of a text that lead nowhere."""
    for path in _REFERENCE.findall(text):
        folder, names = PACKAGE, path.split(".")
        if names[0] not in FOLDERS or names[-1] == "py":
            continue
        while names and (folder / names[0]).is_dir():
            folder /= names.pop(0)
        file = folder / f"{names[0]}.py" if names else folder / "__init__.py"
        names = names[1:] if file.is_file() else names
        source = (file if file.is_file() else folder / "__init__.py").read_text()
        if not all(re.search(rf"\b{name}\b", source) for name in names):
            yield path


def test_references_lead_somewhere() -> None:
    found = {
        f"{file.relative_to(PACKAGE)}: {path}"
        for file in PACKAGE.rglob("*.py")
        for path in missing(file.read_text())
    }
    assert not found


def test_a_stale_reference_is_found() -> None:
    text = "`runs.folder.find_run` and `everyframe.runs.folder.lost`, `fast_paths.trials`, `x.y`"
    assert [*missing(text)] == ["runs.folder.lost", "fast_paths.trials"]
