"""Sizes of a request: their written forms, and which of them contradict each other."""

from __future__ import annotations

import re
from typing import Any

from everyframe.core.errors import InputError
from everyframe.core.limits import MAX_SIDE

_SIZE = re.compile(r"(\d{1,9})\s*[xX×]\s*(\d{1,9})")
_ASPECT = re.compile(r"(\d{1,9})\s*:\s*(\d{1,9})")


def parse_size(text: str) -> tuple[int, int]:
    """(height, width) in pixels of WIDTHxHEIGHT. Raises `InputError`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"size must be WIDTHxHEIGHT, for example 640x360, got {text!r}")
    return int(match[2]), int(match[1])


def check_sizes(request: Any) -> None:
    """Raise `InputError` unless the request gives its size in one way, and a possible one."""
    ways = {
        "size": request.size is not None,
        "height and width": request.height is not None or request.width is not None,
        "resolution": request.resolution is not None,
    }
    used = [name for name, is_used in ways.items() if is_used]
    if len(used) > 1:
        raise InputError(f"{' and '.join(used)} both set the size; give one of them")
    if not all(0 < side <= MAX_SIDE for side in request.asked_size() or ()):
        raise InputError(f"size must have sides of 1 to {MAX_SIDE} pixels, got {request.size!r}")
    if (request.height is None) != (request.width is None):
        lone = "height" if request.width is None else "width"
        other = "width" if lone == "height" else "height"
        raise InputError(f"{lone} was given without {other}; give both, or size WIDTHxHEIGHT")
    if request.aspect is not None:
        if request.resolution is None:
            raise InputError("aspect needs a resolution, for example --resolution 360p")
        match = _ASPECT.fullmatch(request.aspect.strip())
        if not match or 0 in map(int, match.groups()):
            raise InputError(
                f"aspect must be width:height, for example 16:9, got {request.aspect!r}"
            )
