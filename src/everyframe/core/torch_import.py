"""Errors of a library's own import: of an installation or a variable that it can't bear.

``TORCH_LOGS`` is one: torch reads it, and refuses a word that it does not know. The hub's library
takes its ``HF_HUB_ETAG_TIMEOUT`` for a number.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from traceback import extract_tb

from everyframe.core.errors import InputError

#: Files whose import fails for such a reason.
_FILES = (("torch", "__init__.py"), ("huggingface_hub", "constants.py"))


def explain_import(error: Exception) -> Exception:
    """An `InputError` for an error that a library's import raised; any other error as it is."""
    for frame in extract_tb(error.__traceback__):
        place = Path(frame.filename).parts[-2:]
        if frame.name == "<module>" and place in _FILES:
            text = str(error).strip()
            named = [name for name, value in os.environ.items() if value and repr(value) in text]
            hint = f"; set {' or '.join(named)} to another value, or unset it" if named else ""
            return InputError(f"{place[0]} can't be imported here: {text}{hint}")
    return error


def check_docstrings() -> None:
    """Raise `InputError` if Python leaves them out: transformers reads its own at its import."""
    if sys.flags.optimize > 1:
        raise InputError(
            "Python leaves docstrings out (-OO, or PYTHONOPTIMIZE=2), and transformers can't be "
            "imported without them; at most -O or PYTHONOPTIMIZE=1 is possible"
        )
