"""Element counts of a model's tensors, as cached in a file. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def parse_counts(data: Any, parts: Sequence[str]) -> dict[str, dict[str, int]] | None:
    """Validate cached element counts by component and tensor; None if they do not fit."""
    if not isinstance(data, dict) or list(data) != list(parts):
        return None
    for each in data.values():
        if not isinstance(each, dict):
            return None
        if not all(type(number) is int and number >= 0 for number in each.values()):
            return None
    return data
