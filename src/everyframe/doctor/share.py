"""A report fit to be pasted where others read it: no path of a home, no name of host or user.

Read next: `report`.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Mapping
from typing import Any

#: Variables whose value is a list of places; which ones they are says enough.
_PLACES = re.compile(r"(^|_)(PATH|DIR|HOME|FILE|CACHE|RUNS|PRELOAD)$")


def shareable(value: Any, private: Mapping[str, str] | None = None) -> Any:
    """The same plain data with everything private in its texts replaced.

    `private` maps what must not be seen to what stands for it; by default this machine's own.
    """
    hidden = _private() if private is None else private
    if isinstance(value, str):
        return _hide(value, hidden)
    if isinstance(value, Mapping):
        return {key: _variable(key, each, hidden) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [shareable(each, hidden) for each in value]
    return value


def _variable(name: str, value: Any, hidden: Mapping[str, str]) -> Any:
    if isinstance(value, str) and name.isupper() and _PLACES.search(name):
        return "(set)" if value else ""
    return shareable(value, hidden)


def _hide(text: str, hidden: Mapping[str, str]) -> str:
    for private, instead in hidden.items():
        # A whole word only: a host called "h" must not eat letters.
        pattern = rf"(?<![\w-]){re.escape(private)}(?![\w-])"
        text = re.sub(pattern, instead.replace("\\", r"\\"), text, flags=re.IGNORECASE)
    # Homes of others, for example in a library's path.
    return re.sub(r"(/home/|/Users/|\\Users\\)[^/\\\s:]+", r"~", text)


def _private() -> dict[str, str]:
    """What must not be seen of this machine, longest first."""
    found = {os.path.expanduser("~"): "~", platform.node(): "(host)"}
    try:
        found[getpass.getuser()] = "(user)"
    except (KeyError, OSError):  # a user without a name has none to hide
        found[""] = ""
    # Names that are everybody's: hiding them would only make the text harder to read.
    for common in ("", "/", "root", "user", "localhost", "ubuntu", "cpu", "cuda"):
        found.pop(common, None)
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))
