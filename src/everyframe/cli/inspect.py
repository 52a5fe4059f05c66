"""``everyframe inspect``: print the record of a video, from the video or its sidecar file.

`everyframe.media.record` reads it.
"""

from __future__ import annotations

import sys

from everyframe.cli.options import command, positional, run_flag
from everyframe.cli.tables import json_line, print_record
from everyframe.core.errors import ExitCode


def inspect(file: str, *, json: bool = False) -> int:
    """Print the record of `file`; the exit code."""
    from everyframe.media.record import read_record

    record = read_record(file)
    if json:
        print(json_line(record))
    else:
        from everyframe.engine.records.record_schema import check_record

        check_record(record)
        print_record(record, sys.stdout)
    return int(ExitCode.DONE)


COMMAND = command(
    inspect,
    (
        positional("file", "A video, a folder of frames, or a sidecar."),
        run_flag("json"),
        run_flag("log_level"),
    ),
    "Show how a video was made: model, prompt, settings, seed, versions, device.",
)
