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
    ColumnSpec,
    NameRenderer,
    get_default_command_columns,
    get_default_parameter_columns,
)

#: Shares of the terminal that flags get as a rule, and at most.
_SHARE, _MOST = 0.35, 0.6


def _columns(console: Any, options: Any, entries: Sequence[Any]) -> tuple[ColumnSpec, ...]:
    """cyclopts' own columns; that of flags is as wide as the longest word among them."""
    # By what cyclopts shows of a name: which of an entry's properties that is differs by version.
    show = NameRenderer()
    names = [str(show(each)).split() for each in entries]
    if not any(word.startswith("--") for words in names for word in words):
        return get_default_command_columns(console, options, list(entries))
    # What doesn't begin a line may have to begin the next one, by two spaces.
    longest = max(len(word) + 2 * (at > 0) for words in names for at, word in enumerate(words))
    width = min(max(ceil(console.width * _SHARE), longest), int(console.width * _MOST))
    return tuple(
        column.copy(renderer=NameRenderer(max_width=width), max_width=width)
        if isinstance(column.renderer, NameRenderer)
        else column
        for column in get_default_parameter_columns(console, options, list(entries))
    )


def formatter() -> DefaultFormatter:
    """How the command line's help is laid out."""
    return DefaultFormatter(column_specs=_columns)
