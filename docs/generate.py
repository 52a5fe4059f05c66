"""Write the reference pages and the pictures that are made from the code.

Run it as ``python docs/generate.py`` (or ``make docs``); a test fails when a page is not what this
would write. Not here: pages that people write.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import diagrams
import terminal
from annotated_types import Ge, Gt, Le, Lt
from api_pages import NOTE, api_page, events_page
from pydantic.fields import FieldInfo

from everyframe.core.errors import EveryframeError, ExitCode
from everyframe.core.options import GROUPS, Options, facts_of
from everyframe.core.request import Request
from everyframe.doctor.report import Report
from everyframe.families.registry import all_options
from everyframe.hardware.known_issues import Condition, Issue, known_issues

REFERENCE = Path(__file__).parent / "reference"
PICTURES = Path(__file__).parent / "pictures"
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
    kinds = [
        kind
        for kind in (EveryframeError, *_descendants(EveryframeError))
        if kind.__module__ == EveryframeError.__module__
    ]
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


#: Page -> what makes it.
PAGES = {
    REFERENCE / "options.md": options_page,
    REFERENCE / "api.md": api_page,
    REFERENCE / "events.md": events_page,
    REFERENCE / "exit-codes.md": exit_codes_page,
    REFERENCE / "known-issues.md": known_issues_page,
    REFERENCE / "doctor.schema.json": doctor_schema,
    PICTURES / "packages.svg": diagrams.packages_and_imports,
    PICTURES / "request.svg": diagrams.request,
    PICTURES / "guard.svg": diagrams.guard,
    PICTURES / "tokens.svg": diagrams.tokens,
    PICTURES / "memory.svg": diagrams.memory,
    PICTURES / "plan.svg": terminal.plan,
    PICTURES / "doctor.svg": terminal.doctor,
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
