"""Everyframe: video diffusion that comes out right on every device, then fast.

Importing this imports neither torch nor anything else that takes long; names are fetched from their
modules when they are first used. Read next: `api.py`, `core/request.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from everyframe._version import __version__ as __version__

#: Public name -> its module. `__init__.pyi` (written by ``make docs``) has their types for editors.
HOMES = {
    "Engine": "everyframe.engine.warm_engine",
    "EveryframeError": "everyframe.core.errors",
    "EveryframeWarning": "everyframe.core.errors",
    "InputError": "everyframe.core.errors",
    "Plan": "everyframe.core.plan",
    "Request": "everyframe.core.request",
    "Video": "everyframe.media.video",
    "calibrate": "everyframe.engine.calibration",
    "compile": "everyframe.engine.models.compiled_modules",
    "generate": "everyframe.api",
    "list_runs": "everyframe.api",
    "load": "everyframe.engine.warm_engine",
    "load_compiled": "everyframe.engine.models.compiled_modules",
    "plan": "everyframe.api",
    "quantize": "everyframe.engine.models.compiled_modules",
    "resume": "everyframe.api",
    "run": "everyframe.api",
    "save": "everyframe.engine.models.save",
    "save_compiled": "everyframe.engine.models.compiled_modules",
    "stream": "everyframe.api",
    "trace": "everyframe.api",
    "trace_diff": "everyframe.api",
}

__all__ = sorted(["__version__", *HOMES])


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'everyframe' has no attribute {name!r}")
    value = getattr(import_module(HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
