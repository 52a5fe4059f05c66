"""Errors of torch's own import: of an installation or a variable that it can't be imported with.

``TORCH_LOGS`` is one: torch reads it, and refuses a word that it does not know.
"""

from __future__ import annotations

from pathlib import Path
from traceback import extract_tb

from everyframe.core.errors import InputError


def explain_import(error: Exception) -> Exception:
    """An `InputError` for an error that torch's import raised; any other error as it is."""
    for frame in extract_tb(error.__traceback__):
        if frame.name == "<module>" and Path(frame.filename).parts[-2:] == ("torch", "__init__.py"):
            return InputError(f"torch can't be imported here: {str(error).strip()}")
    return error
