"""``everyframe fast-paths``: list the fast paths of a request, and their certificates.

Prints one line per path with verdict, error, gain and reason. It accepts the options of
``generate`` and requires none. The data comes from `everyframe.planning.list_fast_paths`;
``docs/how-to/fast-paths.md`` explains it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import IO, TYPE_CHECKING, Any, TypeVar

from everyframe.cli.options import flag, make_command
from everyframe.cli.parse_request import parse_request
from everyframe.cli.table_layout import table
from everyframe.cli.tables import console, json_line
from everyframe.core.errors import CannotRunError, ExitCode, InputError
from everyframe.core.request import Request

if TYPE_CHECKING:
    from everyframe.planning.list_fast_paths import FastPathList, FastPathRow

WorkT = TypeVar("WorkT")

_HELP = """List the fast paths that a request could run by here, and what came of each.

A path is used after it was tried here: inside its error's budget, and faster. Without a prompt the
model's defaults are taken. Exit code 3 if the request can't be done on this machine.
"""

_MARKS = {"certified": "✓", "pinned": "✓", "refused": "✗", "avoided": "✗", "off": "-"}
_COLOURS = {"✓": "green", "✗": "yellow"}


def paths(
    *, from_record: str | None = None, json: bool = False, certify: bool = False, **given: Any
) -> int:
    """Print the paths of these options; the exit code."""
    found = _survey(given, from_record, certify=certify)
    if json:
        plan, rows = found.plan, [_plain(row) for row in found.rows]
        print(json_line({"type": "paths", "model": plan.model, "device": plan.device.name,
                         "paths": rows}))  # fmt: skip
    else:
        print_paths(found, sys.stdout)
    if found.plan.infeasible is not None:
        raise CannotRunError(found.plan.infeasible)
    return int(ExitCode.DONE)


def _survey(given: dict[str, Any], from_record: str | None, *, certify: bool) -> FastPathList:
    from everyframe.planning.list_fast_paths import survey

    request = parse_request(given, from_record).request
    if from_record is not None:
        return survey(request, certify=certify)
    return with_least_inputs(request, partial(survey, certify=certify))


def with_least_inputs(request: Request, work: Callable[[Request], WorkT]) -> WorkT:
    """Do `work` for a request, with the least input that its model takes if it has none."""
    if request.prompt is not None or request.has_given_frames():
        return work(request)
    from everyframe.doctor.model_check import least_asked

    refused: InputError | None = None
    for values in least_asked():
        try:
            return work(Request(**{**request.given(), **values}))
        except InputError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _plain(row: FastPathRow) -> dict[str, Any]:
    choice = row.choice
    return {
        "component": row.component, "path": choice.path, "title": row.path.title,
        "closeness": row.path.closeness, "verdict": choice.verdict, "in_use": row.in_use,
        "error": choice.error, "limit": choice.limit, "gain": choice.gain, "reason": choice.reason,
    }  # fmt: skip


def print_paths(found: FastPathList, file: IO[str]) -> None:
    """Print the rows as a table, and what to do about untried paths."""
    from rich.text import Text

    out = console(file)
    if not found.rows:
        out.print(f"{found.plan.model}: nothing here has a fast path; all is computed plainly.")
        return
    columns = ("", "path", "component", "verdict", "error", "gain", "reason")
    shown = table(*((name, "right" if name in ("error", "gain") else "left") for name in columns),
                  wraps="reason")  # fmt: skip
    for row in found.rows:
        choice = row.choice
        mark = _MARKS.get(choice.verdict, "?")
        shown.add_row(
            Text(mark, style=_COLOURS.get(mark, "dim")),
            choice.path,
            row.component,
            choice.verdict,
            "" if choice.error is None else f"{choice.error:.1e}",
            "" if choice.gain is None else f"{choice.gain:.2f}x",
            choice.reason,
        )
    out.print(f"{found.plan.model} on {found.plan.device.name}", style="bold")
    out.print(shown)
    untried = sum(
        row.choice.verdict == "expected" or row.choice.reason == "not tried yet"
        for row in found.rows
    )
    if untried:
        out.print(f"{untried} not tried here yet; --certify does it now", style="dim")


COMMAND = make_command(
    paths,
    ("from_record", "json", "log_level"),
    _HELP,
    (flag("certify", bool, "Try fast paths without a certificate, for up to 2 minutes."),),
)
