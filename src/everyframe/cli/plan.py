"""``everyframe plan``: show what would run, where and in which precision, without loading weights.

Nothing is fetched. It takes the same options as ``generate``. `everyframe.planning.resolve` makes
the plan.
"""

from __future__ import annotations

import sys
from typing import IO, Any

from everyframe.cli.options import RUN_FLAGS, make_command
from everyframe.cli.parse_request import parse_request
from everyframe.cli.tables import json_line, print_plan
from everyframe.core.errors import CannotRunError, ExitCode
from everyframe.core.events import Planned
from everyframe.core.garbage_collection import collector_paused
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.planning.input_checks import check_output_of, check_output_option

_HELP = """Show what would run, in which precision, with how much memory, and about how long.

Nothing is loaded or fetched. Exit code 3 if it can't be done on this machine, or on that of --as.
"""


def plan(
    *,
    output: str | None = None,
    from_record: str | None = None,
    json: bool = False,
    as_profile: str | None = None,
    **given: Any,
) -> int:
    """Print the plan of these options; the exit code."""
    wanted = parse_request(given, from_record)
    check_output_option(wanted.request, output)
    return show(wanted.request, output, as_json=json, profile=as_profile)


def show(request: Request, output: str | None, *, as_json: bool, profile: str | None = None) -> int:
    """Print the plan of a request. Raises `CannotRunError` if it can't run.

    `profile` names another machine, or a file with its facts.
    """
    # Late import: brings torch, and a wrong option should be refused at once.
    with collector_paused():
        from everyframe.planning.resolve import resolve

        resolved = resolve(request, profile)
    if output is not None:
        check_output_of(resolved.settings, output)
    print_it(resolved, sys.stdout, as_json=as_json)
    if resolved.infeasible is not None:
        raise CannotRunError(resolved.infeasible)
    return int(ExitCode.DONE)


def print_it(resolved: Plan, file: IO[str], *, as_json: bool) -> None:
    """Print the plan as a table, or as the line of JSON that ``generate`` begins with."""
    if as_json:
        print(json_line(Planned(resolved).to_json()), file=file, flush=True)
        return
    print_plan(resolved, file)


COMMAND = make_command(
    plan, tuple(name for name in RUN_FLAGS if name not in ("dry_run", "run_dir")), _HELP
)
