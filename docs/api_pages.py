"""Pages of the Python API and of the events, from signatures, fields and docstrings.

`generate.py` writes what these functions return.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import everyframe
from everyframe.core import events
from everyframe.core.events import Event

NOTE = "<!-- Written by docs/generate.py; change the code instead. -->"

#: A section of a docstring, whose entries become a list.
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
_ENTRY = re.compile(r"(\*{0,2}[\w., ]+):(?: (.*))?")
_WIDTH = 88


def api_page() -> str:
    """Every public name of the package, with signature and docstring."""
    public = {name: getattr(everyframe, name) for name in everyframe.__all__ if name[0] != "_"}
    kinds: dict[str, Callable[[object], bool]] = {
        "Functions": inspect.isfunction,
        "Classes": lambda value: inspect.isclass(value) and not issubclass(value, BaseException),
        "Errors and warnings": lambda value: (
            inspect.isclass(value) and issubclass(value, BaseException)
        ),
    }
    lines = [
        "# Python API",
        "",
        NOTE,
        "",
        "All public names are in `everyframe`. Options of `Request` are keywords of `generate`,",
        "`run` and `plan`; [the options page](options.md) lists them. `stream` yields",
        "[events](events.md). `everyframe.__version__` is the version.",
    ]
    for title, belongs in kinds.items():
        lines += ["", f"## {title}"]
        for name, value in public.items():
            if belongs(value):
                lines += ["", f"### `{name}`", *_described(name, value)]
    return "\n".join(lines) + "\n"


def events_page() -> str:
    """Every event, with its fields."""
    kinds = [
        each
        for each in vars(events).values()
        if inspect.isclass(each) and issubclass(each, Event) and each is not Event
    ]
    lines = [
        "# Events",
        "",
        NOTE,
        "",
        "`everyframe.stream` yields these frozen dataclasses of `everyframe.core.events` in the",
        "order in which things happen. With `--json` the command line prints each as a line of",
        "JSON, whose `type` is the name in brackets. Fields marked *Python only* are left out of",
        "the JSON. [How to follow a run](../how-to/events.md) shows both.",
    ]
    for kind in kinds:
        lines += ["", f"## `{kind.__name__}` (`{kind.type}`)", "", *_prose(kind)]
        lines += ["", "| field | type | default | |", "|---|---|---|---|"]
        for part in dataclasses.fields(kind):
            default = "" if part.default is dataclasses.MISSING else f"`{part.default!r}`"
            marked = "Python only" if part.metadata.get("bulky") else ""
            annotation = str(part.type).replace("|", "\\|")
            lines.append(f"| `{part.name}` | `{annotation}` | {default} | {marked} |")
    return "\n".join(lines) + "\n"


def _described(name: str, value: Any) -> Iterator[str]:
    """Signature, docstring and public methods."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        signature = [f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"]
    elif value is everyframe.Request:
        signature = ["Request(**options)"]
    else:
        signature = _signature(name, value)
    yield from ["", "```text", *signature, "```"]
    yield from ["", *_prose(value)]
    if not inspect.isclass(value):
        return
    for method, member in vars(value).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if method.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        if hasattr(member, "decorator_info"):  # a validator of pydantic's
            continue
        start = ["```text", *_signature(method, function), "```", ""]
        is_property = isinstance(member, property)
        yield from ["", f"#### `{name}.{method}`", "", *([] if is_property else start)]
        yield from _prose(function)


def _signature(name: str, function: Any) -> list[str]:
    """The signature, on a line for each parameter where it is long."""
    signature = inspect.signature(function)
    parts, is_keyword = [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            parts.append("*")
            is_keyword = True
        parts.append(_parameter(parameter))
    returned = signature.return_annotation
    ending = ")" if returned in (None, inspect.Signature.empty, "None") else f") -> {returned}"
    line = f"{name}({', '.join(parts)}{ending}"
    if len(line) <= _WIDTH:
        return [line]
    return [f"{name}(", *(f"    {part}," for part in parts), ending]


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
    text = f"{stars}{parameter.name}: {parameter.annotation}"
    if parameter.default is parameter.empty:
        return text
    is_factory = type(parameter.default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS"
    return f"{text} = {'...' if is_factory else repr(parameter.default)}"


def _prose(value: Any) -> list[str]:
    """The docstring as Markdown: sections become lists."""
    lines: list[str] = []
    section, indent = "", 0
    for line in inspect.cleandoc(value.__doc__ or "").replace("``", "`").splitlines():
        if _SECTION.fullmatch(line):
            section, indent = line, len(line) - len(line.lstrip())
            lines += [f"**{line[:-1]}**", ""]
        elif section and line and len(line) - len(line.lstrip()) <= indent:
            section = ""
            lines.append(line)
        elif section and line:
            lines.append(_entry(line))
        else:
            lines.append(line)
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _entry(line: str) -> str:
    """One line of a section: the start of an entry, or more of the one before."""
    is_start = len(line) - len(line.lstrip()) == 4
    entry = _ENTRY.fullmatch(line.strip())
    if is_start and entry is not None:
        return f"- `{entry[1]}`: {entry[2] or ''}".rstrip()
    return f"- {line.strip()}" if is_start else f"  {line.strip()}"
