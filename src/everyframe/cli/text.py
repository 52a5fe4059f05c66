"""Small words for numbers and values that several commands print.

Amounts of memory are worded by `everyframe.planning.forecast`. Read next: `tables.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def json_line(value: Mapping[str, Any]) -> str:
    """One line of ASCII JSON."""
    return json.dumps(value, allow_nan=False, separators=(", ", ": "))


def clock(seconds: float) -> str:
    """``"0:07"``, ``"12:30"``, ``"1:02:03"``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """``"0.3 s"``, ``"42 s"``, ``"12:30"``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return clock(seconds)


def shortened(text: str, length: int) -> str:
    """The text in one line, cut where it is longer than that."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def counted(number: int, thing: str) -> str:
    """``"1 frame"``, ``"17 frames"``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
