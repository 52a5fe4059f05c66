"""Help layout in two columns: flags, never broken within a name, and their descriptions.

cyclopts would cut long flags at a third of a narrow terminal, where they can't be copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, NoReturn

from cyclopts import (
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts.help import DefaultFormatter
from cyclopts.help.specs import (
    ColumnSpec,
    NameRenderer,
    get_default_command_columns,
    get_default_parameter_columns,
)

from everyframe.core.errors import InputError, did_you_mean

#: Default and maximum share of the terminal width for flags.
_SHARE, _MOST = 0.35, 0.6


def _columns(console: Any, options: Any, entries: Sequence[Any]) -> tuple[ColumnSpec, ...]:
    """cyclopts' columns, with that of flags as wide as the longest word in it."""
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
    """Formatter of the command line's help."""
    return DefaultFormatter(column_specs=_columns)


def raise_usage_error(
    error: CycloptsError, words: Sequence[str], commands: Sequence[str]
) -> NoReturn:
    """Raise `InputError` with what is wrong in `words` and how to see what is allowed."""
    # A command may have two words.
    command = next((name for name in commands if set(name.split()) <= set(words)), None)
    raise InputError(f"{_reason(error, words, commands)} (see {_help_of(command)})") from None


def _help_of(command: str | None) -> str:
    return f"everyframe {command} --help" if command else "everyframe --help"


def _reason(error: CycloptsError, words: Sequence[str], commands: Sequence[str]) -> str:
    if isinstance(error, UnknownCommandError):
        word = (error.unused_tokens or words)[0]
        if word.startswith("-"):
            return f"unknown option {word!r}{did_you_mean(word, ('--help', '--version'))}"
        inner = [name.split()[1] for name in commands if name.split()[0] in words[:1]]
        hint = did_you_mean(word, inner or commands)
        return f"unknown command {word!r}{hint} (commands are {', '.join(inner or commands)})"
    if isinstance(error, UnknownOptionError):
        word = error.token.keyword or error.token.value
        return f"unknown option {word!r}{did_you_mean(word, _flags(error))}"
    if isinstance(error, UnusedCliTokensError):
        extra = (error.unused_tokens or ["?"])[0]
        return f"unexpected argument {extra!r}; put a prompt of several words into quotes"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.keyword or error.argument.name
        return f"{name} needs a value" if name.startswith("-") else f"{name} is missing"
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword} is given more than once; give it once"
    error.verbose = False
    text = " ".join(str(error).split())
    return text[:1].lower() + text[1:].rstrip(".")


def _flags(error: UnknownOptionError) -> list[str]:
    names = [name for argument in error.argument_collection for name in argument.names]
    return [name for name in names if name.startswith("--")] + ["--help"]
