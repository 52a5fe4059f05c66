"""Words for a command line that can't be parsed: one line, and what was most likely meant.

Read next: `main.py`, which prints it and exits with 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from cyclopts import (
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from everyframe.core.errors import InputError, did_you_mean


def complain(error: CycloptsError, words: Sequence[str], commands: Sequence[str]) -> NoReturn:
    """Raise `InputError` that says what is wrong with `words` and how to see what is allowed."""
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
