"""Generate from the code: reference pages, pictures, type stub for editors.

Run it as ``python docs/generate.py`` (or ``make docs``); a test fails if a generated file is out of
date.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import diagrams
import machine_pages
import terminal
from annotated_types import Ge, Gt, Le, Lt
from api_pages import NOTE, api_page, events_page
from gallery_page import gallery_page
from man_page import man_page
from pydantic.fields import FieldInfo

import everyframe
from everyframe.core.errors import EveryframeError, ExitCode
from everyframe.core.options import GROUPS, Options, facts_of
from everyframe.core.request import Request
from everyframe.doctor.report import Report
from everyframe.families.registry import all_options
from everyframe.hardware.known_issues import Condition, Issue, known_issues

REFERENCE = Path(__file__).parent / "reference"
PICTURES = Path(__file__).parent / "pictures"
MAN = Path(__file__).parent / "man" / "everyframe.1"
STUB = Path(__file__).parent.parent / "src" / "everyframe" / "__init__.pyi"
_VALUES: dict[object, str] = {int: "N", float: "X", str: "TEXT", typing.Any: "FILE"}


def options_page() -> str:
    """Every option, by group, as a table for each."""
    lines = [
        "# Options",
        "",
        NOTE,
        "",
        "The same options on the command line (`--num-frames 17`), from Python",
        "(`everyframe.generate(..., num_frames=17)`) and in a `Request`. What has no default here",
        "depends on the model; `everyframe plan` shows every value.",
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
        NOTE,
        "",
        "| code | name | errors (`everyframe.core.errors`) |",
        "|---|---|---|",
    ]
    # A room's own error is one of these by its code; it is known only where it was imported.
    errors: list[type[EveryframeError]] = [EveryframeError, *_descendants(EveryframeError)]
    kinds = [kind for kind in errors if kind.__module__ == EveryframeError.__module__]
    for code in ExitCode:
        names = [f"`{kind.__name__}`" for kind in kinds if kind.exit_code is code]
        words = code.name.lower().replace("_", " ")
        lines.append(f"| {code.value} | {words} | {', '.join(names)} |")
    return "\n".join(lines) + "\n"


def known_issues_page() -> str:
    """Every known issue, by what it does to a run."""
    issues = known_issues()
    lines = [
        "# Known issues",
        "",
        NOTE,
        "",
        f"{len(issues)} known issues of hardware, libraries and precision in image and video",
        "diffusion, from public reports. `everyframe doctor` checks which of them apply to a",
        "machine. The data is `src/everyframe/hardware/known_issues.yaml`.",
    ]
    for severity, title in _SEVERITIES.items():
        lines += ["", f"## {title}"]
        for issue in issues:
            if issue.severity == severity:
                lines += _issue(issue)
    return "\n".join(lines) + "\n"


#: Severity -> the heading of its issues.
_SEVERITIES = {
    "crash": "The process ends",
    "hang": "It hangs",
    "wrong": "The result is wrong, and nothing says so",
    "error": "An error stops it",
    "memory": "It takes more memory",
    "slow": "It is slow",
    "differs": "It differs, as it may",
}


def _issue(issue: Issue) -> list[str]:
    conditions = [*_conditions(issue.where), *(f"using `{tag}`" for tag in issue.uses)]
    lines = ["", f"### {issue.title}", "", f"`{issue.id}`: {'; '.join(conditions)}."]
    lines += ["", f"{issue.symptom} {issue.cause}", ""]
    for fix in issue.fix:
        command = f": `{fix.command}`" if fix.command else ""
        lines.append(f"- {fix.do[:1].upper()}{fix.do[1:]}{command}")
    said = ", ".join(_source(source) for source in issue.sources)
    lines += ["", f"*Here:* {issue.here}", "", f"Certainty {issue.certainty}; {said}."]
    return lines


def _conditions(where: Condition) -> Iterator[str]:
    """The conditions of a place, each in a few words."""
    words = {
        "vendor": "on {}",
        "capability": "capability {}",
        "name": "devices called `{}`",
        "devices": "{} devices",
        "devices_not_dividing": "a number of devices that does not divide {}",
        "cuda": "CUDA {}",
        "cublas": "cuBLAS {}",
        "cudnn": "cuDNN {}",
        "driver": "driver {}",
        "macos": "macOS {}",
    }
    for name, text in words.items():
        value = getattr(where, name)
        if value is not None:
            yield text.format(_PROPER.get(value, value))
    yield from (f"{name} {versions}" for name, versions in where.packages.items())
    yield from (f"`{name}` set to `{value}`" for name, value in where.set.items())
    if where.unless_set:
        yield "unless " + " or ".join(f"`{n}` is `{v}`" for n, v in where.unless_set.items())
    for name in ("arch", "system"):
        if getattr(where, name):
            yield " or ".join(getattr(where, name))
    if where.cpu_lacks:
        yield f"without {', '.join(where.cpu_lacks)}"
    if where.any:
        yield " or ".join(f"({', '.join(_conditions(part))})" for part in where.any)


_PROPER = {"nvidia": "NVIDIA", "amd": "AMD", "apple": "Apple", "intel": "Intel", "cpu": "the CPU"}


def _source(source: str) -> str:
    if "#" not in source or source.startswith("https://"):
        return f"<{source}>"
    repository, number = source.split("#")
    return f"[{source}](https://github.com/{repository}/issues/{number})"


def doctor_schema() -> str:
    """The JSON schema of `everyframe doctor --json`."""
    return json.dumps(Report.model_json_schema(), indent=1) + "\n"


_STUB_HEAD = '''\
"""What `import everyframe` offers, with each option's type and default: for editors and checkers.

Written by docs/generate.py; change the code instead.
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from everyframe._version import __version__ as __version__
'''

#: What the signatures name beside the package's own names.
_STUB_TYPES = {
    "Event": "everyframe.core.events",
    "Lora": "everyframe.core.lora",
    "Output": "everyframe.engine.results",
    "Repair": "everyframe.core.plan",
    "LossyMethod": "everyframe.core.quality",
}


def stub() -> str:
    """Type stub of the package: functions with options are written out, the rest is imported."""
    homes: dict[str, str] = dict(vars(everyframe)["HOMES"])
    functions = {n: getattr(everyframe, n) for n in homes if homes[n] == "everyframe.api"}
    functions = {n: each for n, each in functions.items() if hasattr(each, "__signature__")}
    imports = [f"from {homes[n]} import {n} as {n}" for n in homes if n not in functions]
    imports += [f"from {home} import {name}" for name, home in _STUB_TYPES.items()]
    names = "".join(f'    "{name}",\n' for name in everyframe.__all__)
    lines = [*sorted(imports), "", f"__all__ = [\n{names}]"]
    for function in functions.values():
        lines += ["", *_stub_of(function)]
    return _STUB_HEAD + "\n".join(lines) + "\n"


def _stub_of(function: typing.Any) -> Iterator[str]:
    """Signature of a function with its options, and its docstring with their help."""
    signature = inspect.signature(function)
    yield f"def {function.__name__}("
    kind: object = None
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and kind is not each.KEYWORD_ONLY:
            yield "    *,"
        kind = each.kind
        stars = "**" if kind is each.VAR_KEYWORD else ""
        quoted = json.dumps(each.default) if isinstance(each.default, str) else each.default
        default = "" if each.default is each.empty else f" = {quoted}"
        yield f"    {stars}{each.name}: {each.annotation}{default},"
    yield f") -> {signature.return_annotation}:"
    text = _docstring(function, [*signature.parameters])
    yield textwrap.indent(f'"""{text}"""', "    ")


def _docstring(function: typing.Any, parameters: list[str]) -> str:
    """The function's docstring, with the help of each option in place of its ``**options``."""
    code = function.__code__
    number = code.co_argcount + code.co_kwonlyargcount
    written, rest = code.co_varnames[: number + 1], code.co_varnames[number]
    options = "".join(_argument(name) for name in parameters if name not in written)
    entry = re.compile(rf"    {rest}: .*\n(?:     .*\n)*")
    text, found = entry.subn(
        lambda kept: options + (kept[0] if rest in parameters else ""),
        f"{inspect.getdoc(function)}\n",
    )
    assert found == 1, f"{function.__name__} doesn't describe {rest}"
    return text


def _argument(name: str) -> str:
    """An option's help, unit and limits, as an argument in a docstring."""
    models: dict[str, type[Options]] = {"": Request, **all_options()}
    owners = {family: model for family, model in models.items() if name in model.model_fields}
    family, model = next(iter(owners.items()))
    field = model.model_fields[name]
    limits = ", ".join(filter(None, [facts_of(model, name)["unit"], *_limits(field)]))
    text = f"{name}: {(field.description or '').rstrip('.')}{f' ({limits})' if limits else ''}."
    text += f" For models of {', '.join(owners)}." if family else ""
    return textwrap.fill(text, 92, initial_indent="    ", subsequent_indent="        ") + "\n"


def openapi() -> str:
    """The server's OpenAPI document."""
    from everyframe.server.http.app import routed_app

    return json.dumps(routed_app().openapi(), indent=1, sort_keys=True) + "\n"


#: Page -> what makes it.
PAGES: dict[Path, Callable[[], str]] = {
    REFERENCE / "options.md": options_page,
    REFERENCE / "api.md": api_page,
    REFERENCE / "events.md": events_page,
    REFERENCE / "exit-codes.md": exit_codes_page,
    REFERENCE / "known-issues.md": known_issues_page,
    REFERENCE / "doctor.schema.json": doctor_schema,
    REFERENCE / "openapi.json": openapi,
    PICTURES / "packages.svg": diagrams.packages_and_imports,
    PICTURES / "request.svg": diagrams.request,
    PICTURES / "guard.svg": diagrams.guard,
    PICTURES / "tokens.svg": diagrams.tokens,
    PICTURES / "memory.svg": diagrams.memory,
    PICTURES / "plan.svg": terminal.plan,
    PICTURES / "doctor.svg": terminal.doctor,
    STUB: stub,
    MAN: man_page,
    Path(__file__).parent / "gallery.md": gallery_page,
    REFERENCE / "machines.md": machine_pages.machines_page,
    REFERENCE / "cards" / "README.md": machine_pages.cards_index,
    **{
        REFERENCE / "cards" / f"{make}.md": partial(machine_pages.card_page, make)
        for make in machine_pages.MAKES
    },
}


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
        default = "" if field.default in (None, False, (), {}) else f"`{field.default}`"
        yield f"| {option} | {_value(field, facts['unit'])} | {default} | {field.description} |"


def _value(field: FieldInfo, unit: str | None) -> str:
    kinds = [kind for kind in _members(field.annotation) if kind in _VALUES]
    words = " or ".join(_VALUES[kind] for kind in kinds)
    words = f"{words} {unit}" if unit and str not in kinds else words
    return ", ".join(filter(None, [words, *_limits(field)]))


def _limits(field: FieldInfo) -> list[str]:
    signs = {Gt: (">", "gt"), Ge: ("≥", "ge"), Lt: ("<", "lt"), Le: ("≤", "le")}
    return [
        f"{sign} {getattr(limit, attribute)}"
        for limit in field.metadata
        for kind, (sign, attribute) in signs.items()
        if isinstance(limit, kind)
    ]


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
