"""Write the reference pages that are made from the code: options and exit codes.

Run it as ``python docs/generate.py`` (or ``make docs``); a test fails when a page is not what this
would write. Not here: pages that people write.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from everyframe.core.errors import EveryframeError, ExitCode
from everyframe.core.options import GROUPS, Options, facts_of
from everyframe.core.request import Request
from everyframe.families.registry import all_options

REFERENCE = Path(__file__).parent / "reference"
_NOTE = "<!-- Written by docs/generate.py; change the code instead. -->"
_VALUES: dict[object, str] = {int: "N", float: "X", str: "TEXT", typing.Any: "FILE"}


def options_page() -> str:
    """Every option, by group, as a table for each."""
    lines = [
        "# Options",
        "",
        _NOTE,
        "",
        "The same options on the command line (`--num-frames 17`), from Python",
        "(`everyframe.generate(..., num_frames=17)`) and in a `Request`. What has no default here",
        "is settled by the model; `everyframe plan` shows what each one comes to.",
    ]
    families: list[tuple[str, type[Options]]] = [("", Request), *all_options().items()]
    for group in GROUPS:
        for family, model in families:
            rows = list(_rows(model, group))
            if rows:
                title = f"{group}: `{family}`" if family else group
                head = ["| option | value | default | what it does |", "|---|---|---|---|"]
                lines += ["", f"## {title}", "", *head, *rows]
    return "\n".join(lines) + "\n"


def exit_codes_page() -> str:
    """The one table of exit codes, each with the errors that lead to it."""
    lines = [
        "# Exit codes",
        "",
        _NOTE,
        "",
        "| code | name | errors (`everyframe.core.errors`) |",
        "|---|---|---|",
    ]
    kinds: list[type[EveryframeError]] = [EveryframeError, *_descendants(EveryframeError)]
    for code in ExitCode:
        names = [f"`{kind.__name__}`" for kind in kinds if kind.exit_code is code]
        words = code.name.lower().replace("_", " ")
        lines.append(f"| {code.value} | {words} | {', '.join(names)} |")
    return "\n".join(lines) + "\n"


#: Page -> what makes it.
PAGES = {REFERENCE / "options.md": options_page, REFERENCE / "exit-codes.md": exit_codes_page}


def _rows(model: type[Options], group: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        facts = facts_of(model, name)
        if facts.get("group") != group or name == "family_options":
            continue
        if facts["python_only"]:
            option = f"`{name}=` (from Python only)"
        else:
            flags = [f"--{name.replace('_', '-')}", *facts["aliases"]]
            option = "`PROMPT`" if name == "prompt" else ", ".join(f"`{flag}`" for flag in flags)
        default = "" if field.default in (None, False) else f"`{field.default}`"
        yield f"| {option} | {_value(field, facts['unit'])} | {default} | {field.description} |"


def _value(field: FieldInfo, unit: str | None) -> str:
    kinds = [kind for kind in _members(field.annotation) if kind in _VALUES]
    words = " or ".join(_VALUES[kind] for kind in kinds)
    words = f"{words} {unit}" if unit and str not in kinds else words
    signs = {Gt: (">", "gt"), Ge: ("≥", "ge"), Lt: ("<", "lt"), Le: ("≤", "le")}
    limits = [
        f"{sign} {getattr(limit, attribute)}"
        for limit in field.metadata
        for kind, (sign, attribute) in signs.items()
        if isinstance(limit, kind)
    ]
    return ", ".join(filter(None, [words, *limits]))


def _members(annotation: object) -> tuple[object, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _descendants(kind: type[EveryframeError]) -> Iterator[type[EveryframeError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)


if __name__ == "__main__":
    for page, make in PAGES.items():
        page.write_text(make(), encoding="utf-8")
