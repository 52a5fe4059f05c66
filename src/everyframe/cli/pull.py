"""``everyframe pull``: fetch and verify what a model needs, and nothing else.

`everyframe.engine.models.pull` does it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from everyframe.cli.options import make_command, optional
from everyframe.cli.parse_request import parse_request, with_model
from everyframe.cli.streams import print_message
from everyframe.cli.tables import json_line, one_line, printable
from everyframe.core.bytes import format_bytes
from everyframe.core.errors import ExitCode, InputError

_HELP = """Fetch what a model needs, verify it, and load nothing.

It takes the options of `generate`, as some decide which files are needed: --variant, --vae,
--first-frame flux. What is on this disk is not fetched again, but verified too: bytes against the
hub's digests, tensors against the model. A later run needs no network.
"""


def pull(named: str | None = None, *, json: bool = False, **given: Any) -> int:
    """Fetch and verify; the exit code."""
    request = parse_request(with_model(given, named), None).request
    if request.model is None:
        raise InputError("name the model: everyframe pull MODEL; `everyframe models` lists some")
    # Late import: brings torch, and a wrong option should be refused at once.
    from everyframe.engine.models.pull import pull as pull_model

    found = pull_model(request, _note)
    if json:
        print(json_line({"type": "pulled", **asdict(found)}))
        return int(ExitCode.DONE)
    others = len(found.files) - found.num_verified
    text = f"{found.name}: {len(found.files)} files, {format_bytes(found.num_bytes)}; "
    text += f"{found.num_verified} have the hub's digest"
    print(one_line(text + (f", {others} are no files of the hub's cache" if others else "")))
    return int(ExitCode.DONE)


def _note(line: str) -> None:
    print_message(f"note: {printable(line)}")


COMMAND = make_command(
    pull,
    ("json", "log_level"),
    _HELP,
    (optional("named", "The model: a name, folder or hub id."),),
    without=("prompt",),
)
