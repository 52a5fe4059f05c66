"""The manual page ``everyframe(1)``, made from the commands; `generate.py` writes it.

Options of a request, which many commands share, are listed once.
"""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

from cyclopts import Parameter

from everyframe import __version__
from everyframe.cli.main import COMMANDS
from everyframe.core.errors import ExitCode
from everyframe.core.request import Request
from everyframe.families.registry import all_options
from everyframe.planning.config_files import FILE, SETTINGS, VARIABLE, variable_of

_REQUEST = {*Request.model_fields} | {
    name for options in all_options().values() for name in options.model_fields
}
#: A command that takes all of them.
_FULL = "generate"
_EXAMPLES = {
    "Make a video, and see how it was made:": (
        'everyframe generate "a red circle moves to the right" -o clip.mp4 --seed 7',
        "everyframe inspect clip.mp4",
    ),
    "What would run on a card with 8 GB, before anything is fetched:": (
        'everyframe plan "a fox in snow" --model opensora-1.2 --max-memory 8GB',
    ),
    "Is this machine right for it?": ("everyframe doctor --model opensora-1.2",),
}


def man_page() -> str:
    """The page in man's own macros."""
    lines = [
        '.\\" Written by docs/generate.py from the commands; change those instead.',
        f'.TH EVERYFRAME 1 "" "everyframe {__version__}" "User Commands"',
        ".SH NAME",
        "everyframe \\- video diffusion that comes out right on every device, then fast",
        ".SH SYNOPSIS",
        ".B everyframe",
        ".I COMMAND",
        "[\\fIOPTIONS\\fR]",
        ".SH DESCRIPTION",
        "Runs video diffusion models on the hardware that there is. Results go to standard output,",
        "everything else to standard error; with \\fB\\-\\-json\\fR results are lines of JSON.",
        "For help on one: \\fBeveryframe\\fR \\fICOMMAND\\fR \\fB\\-\\-help\\fR.",
        ".SH COMMANDS",
    ]
    for name in COMMANDS:
        lines += _command(name)
    lines += [".SH OPTIONS OF A REQUEST", "Options of the video and of the machine that makes it."]
    for parameter in _parameters(_FULL):
        if parameter.name in _REQUEST:
            lines += _option(parameter)
    return "\n".join([*lines, *_closing()]) + "\n"


def _command(name: str) -> Iterator[str]:
    place, _ = COMMANDS[name]
    module, attribute = place.split(":")
    about = inspect.getdoc(getattr(importlib.import_module(module), attribute)) or ""
    own = [each for each in _parameters(name) if each.name not in _REQUEST]
    takes_request = len(_parameters(name)) - len(own) > len(Request.model_fields) // 2
    places = [each for each in own if each.kind is inspect.Parameter.POSITIONAL_ONLY]
    words = " ".join(_place(each) for each in places)
    if takes_request and "prompt" in {each.name for each in _parameters(name)} and not places:
        words = "[\\fIPROMPT\\fR]"
    yield f".SS everyframe {_plain(name)} {words}".rstrip()
    yield from _paragraphs(about)
    if takes_request:
        yield ".PP"
        yield "It takes the options of a request too."
    for parameter in own:
        yield from _option(parameter)
    if not takes_request:
        for parameter in _parameters(name):
            if parameter.name in _REQUEST:
                yield from _option(parameter)


def _parameters(name: str) -> list[inspect.Parameter]:
    place, _ = COMMANDS[name]
    module, attribute = place.split(":")
    command = getattr(importlib.import_module(module), attribute)
    return [*inspect.signature(command).parameters.values()]


def _how(parameter: inspect.Parameter) -> Parameter:
    return next(
        each for each in typing.get_args(parameter.annotation) if isinstance(each, Parameter)
    )


def _place(parameter: inspect.Parameter) -> str:
    word = f"\\fI{_word(parameter)}\\fR"
    return word if parameter.default is inspect.Parameter.empty else f"[{word}]"


def _word(parameter: inspect.Parameter) -> str:
    return "MODEL" if parameter.name == "named" else parameter.name.upper()


def _option(parameter: inspect.Parameter) -> list[str]:
    how = _how(parameter)
    help_text = _plain(how.help or "")
    if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
        return [".TP", f"\\fI{_word(parameter)}\\fR", help_text]
    names = _texts(how.name) or [f"--{parameter.name.replace('_', '-')}"]
    names = [*names, *_texts(how.alias)]
    word = "" if typing.get_args(parameter.annotation)[0] is bool else _metavar(how)
    shown = ", ".join(f"\\fB{_plain(each)}\\fR" for each in names)
    return [".TP", f"{shown}{word}", help_text]


def _metavar(how: Parameter) -> str:
    return f" \\fI{_plain(str(getattr(how, 'metavar', None) or 'TEXT'))}\\fR"


def _texts(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else [*value]


def _closing() -> Iterator[str]:
    yield ".SH EXIT STATUS"
    for code in ExitCode:
        yield from _entry(str(code.value), _plain(code.name.lower().replace("_", " ")))
    yield ".SH ENVIRONMENT"
    yield "Each option of a request that belongs to more than one call has a variable, such as"
    yield f"\\fB{variable_of('num_frames')}\\fR. Others:"
    for name, variable in SETTINGS.items():
        yield from _entry(variable, f"As the setting \\fB{_plain(name)}\\fR of the user's file.")
    yield from _entry(VARIABLE, "The user's file; \\fBoff\\fR reads no file.")
    yield from _entry("EVERYFRAME_DISABLE", "Fast paths that are off, separated by commas.")
    yield ".SH FILES"
    yield from _entry(f"{FILE}, pyproject.toml", "Options of a project ([tool.everyframe]).")
    yield from _entry(f"~/.config/everyframe/{FILE}", "Options and settings of the user.")
    yield from _entry("~/.cache/everyframe", "What \\fBeveryframe cache list\\fR shows.")
    yield from _entry("~/.local/state/everyframe", "Interrupted runs, and the key that signs them.")
    yield ".SH EXAMPLES"
    for text, commands in _EXAMPLES.items():
        yield from (".PP", _plain(text), ".PP", ".RS", ".nf", *map(_plain, commands), ".fi", ".RE")


def _entry(name: str, text: str) -> tuple[str, str, str]:
    return ".TP", f"\\fB{name}\\fR", text


def _paragraphs(text: str) -> Iterator[str]:
    for number, each in enumerate(re.split(r"\n\s*\n", text.strip())):
        if number:
            yield ".PP"
        yield from (_plain(line.strip()) for line in each.splitlines())


def _plain(text: str) -> str:
    """Text with nothing in it that man would take for a command of its own."""
    safe = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga")
    safe = "".join(each if each.isascii() else f"\\[u{ord(each):04X}]" for each in safe)
    return f"\\&{safe}" if safe[:1] in (".", "'") else safe
