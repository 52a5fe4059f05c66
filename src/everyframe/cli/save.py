"""``everyframe save``: write a model with merged or quantized weights as a checkpoint folder."""

from __future__ import annotations

from typing import Any

from everyframe.cli.options import command, flag, positional, request_flag, run_flag
from everyframe.core.errors import ExitCode, InputError

_HELP = """Write a model with merged or quantized weights to a new folder.

LoRAs are merged and component files take the place of the model's own. The folder loads as the old
one does, with the same bits; it appears whole or not at all.
"""


def save(model: str, *, output: str | None = None, **given: Any) -> int:
    """Save `model` to the folder `output`; the exit code."""
    if output is None:
        raise InputError("give the folder to write: --output FOLDER")
    from everyframe.engine.models.save import save as save_model

    given.pop("log_level", None)
    print(save_model(model, output, **given))
    return int(ExitCode.DONE)


COMMAND = command(
    save,
    (
        positional("model", "Folder, or hub id of a pipeline that is on this disk."),
        flag("output", str, "The folder to write, which must not exist.", alias="-o"),
        request_flag("loras"),
        request_flag("components"),
        request_flag("quantize"),
        request_flag("dtype"),
        run_flag("log_level"),
    ),
    _HELP,
)
