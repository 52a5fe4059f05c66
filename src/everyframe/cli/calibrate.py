"""``everyframe calibrate``: measure what lossy methods cost in decibels, for ``--quality``.

It prints a line after each video, and what each budget leads to at the end. The measuring is in
`everyframe.engine.calibration`; ``docs/how-to/quality.md`` explains it.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from everyframe.cli.options import flag, make_command, optional
from everyframe.cli.parse_request import parse_request, with_model
from everyframe.cli.tables import json_line
from everyframe.core.errors import ExitCode, InputError

_HELP = """Measure how close lossy sampling comes to the exact video on this machine, and save it.

Makes a set of videos by exact steps and by each method, and compares them frame by frame. Then
`--quality 32dB` takes the fastest method whose worst frame held 32 dB with a margin. Interrupt it
at any time: the same command continues. Without options, the embedded model.
"""

#: Options that it does not take: it sets them itself, or measures them.
_WITHOUT = ("prompt", "model", "seed", "num_videos", "quality", "report")


def calibrate(
    model: str | None = None,
    *,
    videos: str | None = None,
    prompts: str | None = None,
    methods: str | None = None,
    lowest: str | None = None,
    json: bool = False,
    **given: Any,
) -> int:
    """Calibrate for these options; the exit code."""
    without = [name for name in _WITHOUT if name != "model"]
    request = parse_request(with_model(given, model), None, without=without).request
    # Late import: brings torch, and a wrong option should be refused at once.
    from everyframe.engine import calibration
    from everyframe.engine.calibration_methods import BUDGETS
    from everyframe.fast_paths.calibrations import LEAST_VIDEOS

    number = LEAST_VIDEOS + 1 if videos is None else _number("videos", videos)
    found = None
    for progress in calibration.calibrate(
        request,
        prompts=() if prompts is None else _lines(prompts),
        num_videos=int(number),
        methods=() if methods is None else [each.strip() for each in methods.split(",")],
        lowest_db=30.0 if lowest is None else _number("lowest", lowest.lower().removesuffix("db")),
    ):
        found = progress.calibration
        print(progress.text, file=sys.stderr, flush=True)
    if found is None:
        print("everything that was asked for is measured already", file=sys.stderr)
        return int(ExitCode.DONE)
    if json:
        rows = {name: _plain(found, name) for name in found.measured}
        print(json_line({"type": "calibrated", "seconds": found.seconds, "methods": rows}))
        return int(ExitCode.DONE)
    for line in calibration.report(found, BUDGETS):
        print(line)
    return int(ExitCode.DONE)


def _plain(found: Any, name: str) -> dict[str, Any]:
    return {
        "videos": len(found.measured[name]),
        "worst_db": found.worst_db(name),
        "median_db": found.median_db(name),
        "gain": found.gain(name),
    }


def _number(name: str, text: str) -> float:
    try:
        found = float(int(text)) if name == "videos" else float(text)
    except (ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise InputError(f"{name} must be a number, got {text!r}")
    return found


def _lines(path: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts: {path} can't be read as text: {error}") from None
    found = [line.strip() for line in text.splitlines() if line.strip()]
    if not found:
        raise InputError(f"prompts: {path} has no line with a prompt")
    return found


COMMAND = make_command(
    calibrate,
    ("json", "log_level"),
    _HELP,
    (
        optional("model", "The model: a name, folder or hub id."),
        flag("videos", int, "Videos in the set, 15 or more; 16 by default."),
        flag("prompts", Path, "A text file with a prompt on each line, taken in turn."),
        flag(
            "methods",
            str,
            "Methods to measure, such as unipc,ab2@8,int8-dynamic; the usual ones by default.",
        ),
        flag("lowest", str, "Methods below so many dB are measured no further; 30 by default."),
    ),
    without=_WITHOUT,
)
