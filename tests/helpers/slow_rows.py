"""Rows of a parametrised test, some of them marked slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_unless(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """The values as rows; those that are not `fast` run with ``--slow``."""
    return [each if each in fast else pytest.param(each, marks=pytest.mark.slow) for each in values]
