"""Component files of a request: names of components and the files of their weights. Plain data."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from everyframe.core.errors import InputError
from everyframe.core.options import shown

_FORM = "NAME=FILE, such as transformer=wan.gguf"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_components(given: Any) -> dict[str, str]:
    """Files by component from a mapping, or from one or several texts of the form NAME=FILE.

    Raises:
        InputError: another form, an empty name or file, or a component given twice.
    """
    if isinstance(given, Mapping):
        pairs: list[tuple[Any, Any]] = list(given.items())
    else:
        listed = [given] if isinstance(given, str) else given
        if not isinstance(listed, (list, tuple)):
            raise InputError(f"components must be {_FORM}, got {shown(given)}")
        pairs = [str(each).partition("=")[::2] for each in listed]
    found: dict[str, str] = {}
    for name, file in pairs:
        is_file = isinstance(file, (str, os.PathLike)) and os.fspath(file)
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not is_file:
            raise InputError(f"components must be {_FORM}, got {shown(given)}")
        if name in found:
            raise InputError(f"components: {name} has two files; give one of them")
        found[name] = str(os.fspath(file))
    return found
