"""How much of its inner life the program tells, by ``--log-level`` or ``EVERYFRAME_LOG``.

Our modules log under ``everyframe``; warnings of Python go the same way. Everything goes to
standard error. Read next: `main.py`.
"""

from __future__ import annotations

import logging
import os

from everyframe.cli.streams import tell
from everyframe.cli.text import printable
from everyframe.core.errors import InputError, did_you_mean

LEVELS = ("debug", "info", "warning", "error")
VARIABLE = "EVERYFRAME_LOG"


class _ToStandardError(logging.Handler):
    """Writes to whatever standard error is at the time: a progress bar puts itself in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        tell(printable(self.format(record)))


def set_up(asked: str | None) -> None:
    """Set the level asked for, else the environment's, else warnings. Raises `InputError`."""
    source = "--log-level" if asked is not None else VARIABLE
    level = (asked if asked is not None else os.environ.get(VARIABLE) or "warning").lower()
    if level not in LEVELS:
        raise InputError(
            f"{source} must be one of {', '.join(LEVELS)}, got {level!r}"
            f"{did_you_mean(level, LEVELS)}"
        )
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _ToStandardError)]:
        root.removeHandler(handler)
    handler = _ToStandardError()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    logging.getLogger("everyframe").setLevel(level.upper())
    logging.captureWarnings(True)


def is_debug() -> bool:
    """Whether tracebacks are wanted."""
    return logging.getLogger("everyframe").isEnabledFor(logging.DEBUG)
