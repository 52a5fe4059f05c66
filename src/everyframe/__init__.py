"""Everyframe: video diffusion that comes out right on every device, then fast.

Importing this imports neither torch nor anything else that takes long; names are fetched from their
modules when they are first used. Read next: `api.py`, `core/request.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from everyframe._version import __version__

if TYPE_CHECKING:
    from everyframe.api import (
        generate,
        list_runs,
        plan,
        resume,
        run,
        stream,
        trace,
        trace_diff,
    )
    from everyframe.core.errors import EveryframeError, EveryframeWarning, InputError
    from everyframe.core.plan import Plan
    from everyframe.core.request import Request
    from everyframe.media.video import Video

__all__ = [
    "EveryframeError",
    "EveryframeWarning",
    "InputError",
    "Plan",
    "Request",
    "Video",
    "__version__",
    "generate",
    "list_runs",
    "plan",
    "resume",
    "run",
    "stream",
    "trace",
    "trace_diff",
]

_HOMES = {
    **dict.fromkeys(__all__, "everyframe.api"),
    **dict.fromkeys(
        ("EveryframeError", "EveryframeWarning", "InputError"), "everyframe.core.errors"
    ),
    "Plan": "everyframe.core.plan",
    "Request": "everyframe.core.request",
    "Video": "everyframe.media.video",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'everyframe' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
