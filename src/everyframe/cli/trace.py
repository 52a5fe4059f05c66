"""``everyframe trace record`` and ``trace diff``: trace every module's output, and compare runs.

``record`` takes the options of ``generate``. ``diff`` exits with 0 if precision explains every
difference, and with 1 if a place was found. `everyframe.engine.tracing` does the work.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everyframe.cli.options import command, flag, make_command, positional, run_flag
from everyframe.cli.parse_request import parse_request
from everyframe.cli.progress import reporter
from everyframe.cli.tables import console, json_line, one_line
from everyframe.core.errors import ExitCode, InputError
from everyframe.core.paths import check_path
from everyframe.numerics.trace.output_check import check_place
from everyframe.planning.input_checks import check_input_files

if TYPE_CHECKING:
    from everyframe.engine.tracing import TraceVerdict

_RECORD_HELP = """Run a request, and record what every module computes at every call.

A fingerprint for each tensor, small enough to mail; no video is written.
"""
_DIFF_HELP = """Compare two traces: the first module that differs by more than precision explains.

Exit code 0 if it explains every difference, 1 if a place was found.
"""


def record(
    *,
    output: str | None = None,
    full: Sequence[str] | None = None,
    from_record: str | None = None,
    json: bool = False,
    **given: Any,
) -> int:
    """Record the trace of a run; the exit code."""
    wanted = parse_request(given, from_record)
    if output is None:
        raise InputError("name the trace to write, such as -o a.trace")
    check_place(output)
    check_input_files(wanted.request)
    with reporter(json) as shown:
        # Late import: brings torch, and a wrong option should be refused at once.
        with shown.starting():
            from everyframe.engine.tracing import record as recorded

        for event in recorded(
            wanted.request, output, tuple(full or ()), num_threads=wanted.num_threads
        ):
            shown.show(event)
    if json:
        print(json_line({"type": "traced", "path": output}), flush=True)
    else:
        print(one_line(output) if sys.stdout.isatty() else output, flush=True)
    return int(ExitCode.DONE)


def diff(
    first: str,
    second: str,
    *,
    output: str | None = None,
    model: str | None = None,
    json: bool = False,
) -> int:
    """Compare two traces; the exit code."""
    if output is not None:
        _check_picture(output)
    from everyframe.engine.tracing import diff as compared

    verdict = compared(first, second, model=model)
    if output is not None:
        Path(output).write_bytes(verdict.png(f"{Path(first).name} against {Path(second).name}"))
    if json:
        print(json_line(verdict.to_json()))
    else:
        _print(verdict, first, second, output)
    return int(ExitCode.DONE if verdict.is_explained else ExitCode.TROUBLE)


def _print(verdict: TraceVerdict, first: str, second: str, output: str | None) -> None:
    out = console(sys.stdout)

    def line(text: str, style: str = "") -> None:
        out.print(text, style=style, soft_wrap=True)

    traces = (verdict.compared.a, verdict.compared.b)
    for path, trace in zip((first, second), traces, strict=True):
        facts = [trace.about.get(key, "") for key in ("precision", "device", "torch")]
        line(f"{Path(path).name}: {'; '.join(filter(None, facts))}")
    num_calls = len(verdict.compared.partners)
    line(f"{num_calls} calls compared; the largest difference is {verdict.compared.largest:.1e}")
    for note in verdict.notes:
        line(f"note: {note}")
    for each in verdict.replayed:
        line(each.message)
    if verdict.place is None:
        line("explained: precision explains every difference", "green")
    else:
        line(f"found: {verdict.place.message}", "red")
    if output is not None:
        line(output)


def _check_picture(output: str) -> None:
    place = Path(check_path(output, "the picture"))
    if place.suffix.lower() != ".png":
        raise InputError(f"the picture is a png; name it so, such as diff.png, got {output!r}")
    if place.is_dir() or not place.parent.is_dir():
        raise InputError(f"{output!r} can't be written: no such folder, or it is one")


RECORD = make_command(
    record,
    ("from_record", "json", "log_level"),
    _RECORD_HELP,
    (
        flag("output", Path, "Where to, such as a.trace.", alias="-o"),
        flag("full", list, "Store this module's tensors whole, to replay it; may be repeated."),
    ),
)
DIFF = command(
    diff,
    (
        positional("first", "A trace."),
        positional("second", "A trace of the same request."),
        flag(
            "output",
            Path,
            "Write a picture of the differences: module by call, a .png.",
            alias="-o",
        ),
        flag("model", str, "Path of the model, to replay a module."),
        run_flag("json"),
        run_flag("log_level"),
    ),
    _DIFF_HELP,
)
