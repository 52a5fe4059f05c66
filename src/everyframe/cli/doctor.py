"""``everyframe doctor``: find problems of this machine or a machine profile, and their fixes.

Prints one line per check with one of four marks, details where needed, and the verdict last. Exit
code 1 if there are errors. The checks are in `everyframe.doctor`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

from everyframe.cli.options import command, flag, run_flag, several
from everyframe.cli.tables import console, json_line, printable
from everyframe.core.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from everyframe.doctor.report import Check, Finding, Mark, Report

#: Mark -> (symbol, replacement in limited encodings, colour).
_MARKS: dict[Mark, tuple[str, str, str]] = {
    "fine": ("✓", "ok", "green"),
    "note": ("!", "!", "yellow"),
    "error": ("✗", "x", "red"),
    "broke": ("☠", "?", "magenta"),
}

_HELP = """Check this machine: versions, libraries, known issues, and whether it computes correctly.

Give names of checks to run only those. Exit code 1 if there are errors.
"""


def doctor(
    checks: tuple[str, ...] = (),
    *,
    model: str | None = None,
    smoke: bool = False,
    json: bool = False,
    everything: bool = False,
    share: bool = False,
    profile: str | None = None,
) -> int:
    """Print the report; the exit code."""
    from everyframe.doctor.diagnose import diagnose
    from everyframe.doctor.report import shareable

    quiet = json or share
    on_check = None if quiet else _check_printer(sys.stdout, everything=everything)
    report = diagnose(checks, profile=profile, model=model, smoke=smoke, on_check=on_check)
    if json:
        data = report.model_dump(mode="json")
        print(json_line(shareable(data) if share else data))
    elif share:
        print(printable(_as_markdown(report)))
    else:
        console(sys.stdout).print(report.message, style=_MARKS[report.verdict][2])
    return int(ExitCode.TROUBLE if report.has_errors else ExitCode.DONE)


def _check_printer(file: IO[str], *, everything: bool) -> Callable[[Check], None]:
    """Callback that prints each check as soon as it is done."""
    out = console(file)

    def print_check(check: Check) -> None:
        _print_wrapped(out, 16, f"{_letter(check.mark, file)} {check.name:<13} ", check.message)
        for finding in check.findings:
            _print_finding(out, finding, _letter(finding.mark, file), everything=everything)
        if everything:
            for line in check.details:
                _print_wrapped(out, 6, "      ", line, "dim")

    return print_check


def _print_wrapped(out: Console, indent: int, start: str, text: str, style: str = "") -> None:
    """Print text after `start`, wrapped to the width, with later lines indented."""
    import textwrap

    lines = textwrap.wrap(
        text,
        max(40, out.width),
        initial_indent=start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    out.print("\n".join(lines) or start.rstrip(), style=style, soft_wrap=True)


def _print_finding(out: Console, finding: Finding, letter: str, *, everything: bool) -> None:
    _print_wrapped(out, 6, f"    {letter} ", finding.message, _MARKS[finding.mark][2])
    if finding.cause:
        _print_wrapped(out, 6, "      ", finding.cause)
    for fix in finding.fix:
        _print_wrapped(out, 10, "      fix: ", fix.do)
        if fix.command:
            # Never wrapped, so that it can be copied.
            out.print(f"          {fix.command}", style="bold", soft_wrap=True)
    if everything and finding.sources:
        _print_wrapped(out, 6, "      reported: ", ", ".join(finding.sources), "dim")


def _letter(mark: Mark, file: IO[str]) -> str:
    letter, plain, _ = _MARKS[mark]
    try:
        letter.encode(getattr(file, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return plain
    return letter


def _as_markdown(report: Report) -> str:
    """The report as Markdown to paste, without home paths, host names and user names."""
    from everyframe.doctor.report import shareable

    lines = [f"everyframe {report.everyframe} doctor: {report.message}", ""]
    for check in report.checks:
        lines.append(f"- {_MARKS[check.mark][0]} {check.name}: {check.message}")
        for finding in check.findings:
            lines.append(f"  - {_MARKS[finding.mark][0]} {finding.message}")
            lines += [f"    {finding.cause}"] if finding.cause else []
    machine = report.machine
    software: dict[str, Any] = machine.get("software") or {}
    for name in ("packages", "libraries", "environment"):
        for key, value in shareable(software.get(name, {})).items():
            lines.append(f"- {name}: {key} {value}")
    text: str = shareable("\n".join(lines))
    return text


COMMAND = command(
    doctor,
    (
        several("checks", "Names of checks, for example known-issues or products."),
        flag("model", str, "Can this machine run that model? Its plan is a check too."),
        flag(
            "smoke", bool, "Make a small video in each precision and by each path, against the CPU."
        ),
        flag("json", bool, "The report as a line of JSON on standard output."),
        flag(
            "everything", bool, "Show all details, and where issues were reported.", alias="--all"
        ),
        flag("share", bool, "A report to paste, without names and paths of this machine."),
        flag("profile", str, "A machine that is not here: a name, or a file.", alias="--as"),
        run_flag("log_level"),
    ),
    _HELP,
)
