"""``everyframe models``: list known models, whether they are on this disk, and what they need.

`everyframe.planning.find_model` collects the rows.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from everyframe.cli.options import command, run_flag
from everyframe.cli.tables import json_line, print_models
from everyframe.core.errors import ExitCode


def models(*, json: bool = False) -> int:
    """Print one row a model, in JSON one line a model; the exit code."""
    from everyframe.planning.find_model import list_models

    rows = list_models()
    if json:
        for row in rows:
            print(json_line({"type": "model", **asdict(row)}))
    else:
        print_models(rows, sys.stdout)
    return int(ExitCode.DONE)


COMMAND = command(
    models,
    (run_flag("json"), run_flag("log_level")),
    "List known models: which are on this disk, what must be downloaded, what fits here.",
)
