"""Two columns of help: the flag, which is never broken inside of its name, and what it does.

Else a long flag would be cut at a third of a narrow terminal, where nobody can copy it from.
Read next: `main.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

from cyclopts.help import DefaultFormatter
from cyclopts.help.specs import (
    AsteriskColumn,
    ColumnSpec,
    DescriptionColumn,
    NameRenderer,
    get_default_command_columns,
)

#: Shares of the terminal that flags get as a rule, and at most.
_SHARE, _MOST = 0.35, 0.6


def _columns(console: Any, options: Any, entries: Sequence[Any]) -> tuple[ColumnSpec, ...]:
    """Commands as cyclopts has them; flags as wide as the longest word among them."""
    if not any(label.startswith("--") for each in entries for label in each.display_labels):
        return get_default_command_columns(console, options, list(entries))
    words = [
        word for each in entries for word in " ".join(each.display_labels_with_metavar).split()
    ]
    usual, most = ceil(console.width * _SHARE), int(console.width * _MOST)
    width = min(max(usual, *(len(word) for word in words)), most)
    names = ColumnSpec(
        renderer=NameRenderer(max_width=width),
        header="Option",
        justify="left",
        style="cyclopts.name",
        max_width=width,
    )
    marks = (AsteriskColumn,) if any(each.required for each in entries) else ()
    return (*marks, names, DescriptionColumn)


def formatter() -> DefaultFormatter:
    """How the command line's help is laid out."""
    return DefaultFormatter(column_specs=_columns)
