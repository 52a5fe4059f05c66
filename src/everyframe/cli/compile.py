"""``everyframe compile``: compile a model's blocks ahead of its runs, and save them in a folder.

It accepts the options of ``generate``, which fix sizes and precision. The work is done by
`everyframe.planning.compiled_model`; ``docs/how-to/compile.md`` explains it.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from everyframe.cli.fast_paths import with_least_inputs
from everyframe.cli.options import make_command, optional
from everyframe.cli.parse_request import parse_request, with_model
from everyframe.cli.tables import json_line, printable
from everyframe.core.errors import ExitCode, InputError

_HELP = """Compile the blocks of a model for this device, and save them in the folder -o.

Takes minutes the first time; what is not right and faster here is not used. Runs find the result by
themselves, or in the folder by --compiled. Exit code 3 if nothing can be compiled with a gain.
"""


def compile_(
    named: str | None = None, *, output: str | None = None, json: bool = False, **given: Any
) -> int:
    """Compile for these options; the exit code."""
    if output is None:
        raise InputError("name a folder for the compiled blocks: -o FOLDER")
    from everyframe.planning.compiled_model import compile_model

    request = parse_request(with_model(given, named), None).request
    done = with_least_inputs(request, partial(compile_model, target=output))
    if json:
        rows = {name: vars(choice) for name, choice in done.choices.items()}
        print(json_line({"type": "compiled", "model": done.plan.model, "components": rows,
                         "folder": os.fspath(done.folder)}))  # fmt: skip
        return int(ExitCode.DONE)
    for name, choice in done.choices.items():
        gain = "" if choice.gain is None else f", {choice.gain:.2f}x"
        print(printable(f"{name}: {choice.verdict}{gain} ({choice.reason})"))
    print(printable(os.fspath(done.folder)))
    return int(ExitCode.DONE)


COMMAND = make_command(
    compile_,
    ("output", "json", "log_level"),
    _HELP,
    (optional("named", "The model, as --model names it; by default the one in the package."),),
)
