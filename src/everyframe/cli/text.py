"""Small words for numbers and values that several commands print.

Amounts of memory are worded by `everyframe.planning.forecast`. Read next: `tables.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

#: What steers a terminal: control characters but for tab and newline (an escape begins with one),
#: letters that turn the direction of those around them, other ends of a line, invisible tags.
_STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)

#: The longest word of a message that is shown whole.
_LONGEST = 1000


def printable(text: str) -> str:
    """The text as it may be shown: what would steer a terminal is written out, ``\\x1b``.

    Prompts, names and messages come from files that anybody may have made.
    """
    return _STEERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The same in one line, so that none of it looks like a message of ours."""
    return printable(text.replace("\n", "\\n"))


def error_line(text: str) -> str:
    """A message as one line; of a word longer than a path may be, the beginning is shown."""
    words = (word if len(word) <= _LONGEST else f"{word[:80]}..." for word in text.split())
    return one_line(" ".join(words))


def json_line(value: Mapping[str, Any]) -> str:
    """One line of ASCII JSON."""
    line = json.dumps(value, allow_nan=False, separators=(", ", ": "))
    return line.replace("\x7f", "\\u007f")


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
