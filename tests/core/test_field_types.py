"""Types of what a file says: each field of a plan, at any depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

from everyframe.core.field_types import mistyped


@dataclass(frozen=True)
class Inner:
    width: int = 3
    share: float = 1


@dataclass(frozen=True)
class Outer:
    name: str | None = None
    inner: Inner = Inner()
    many: tuple[Inner, ...] = (Inner(), Inner())
    pair: tuple[str, int] = ("a", 1)
    table: Mapping[str, float] | None = None
    row: Sequence[int] = (1, 2)
    is_on: bool = False
    mode: Literal["a", "b"] = "a"
    whatever: Any = None


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({}, None),
        ({"name": "x", "table": {"a": 1, "b": 0.5}, "row": [1], "whatever": object()}, None),
        ({"name": 5}, "name"),
        ({"inner": None}, "inner"),
        ({"inner": Outer()}, "inner"),
        ({"inner": Inner(width="3")}, "inner.width"),  # type: ignore[arg-type]
        ({"inner": Inner(width=True)}, "inner.width"),
        ({"many": (Inner(), Inner(share="x"))}, "many[1].share"),  # type: ignore[arg-type]
        ({"many": [Inner()]}, "many"),
        ({"pair": ("a",)}, "pair"),
        ({"pair": (1, "a")}, "pair[0]"),
        ({"table": {"a": "b"}}, "table[0]"),
        ({"table": {1: 1.0}}, "table[0]"),
        ({"row": (1, None)}, "row[1]"),
        ({"is_on": 1}, "is_on"),
        ({"mode": "b"}, None),
        ({"mode": "c"}, "mode"),
    ],
)
def test_the_place_of_another_type_is_named(change: dict[str, Any], place: str | None) -> None:
    assert next(mistyped(replace(Outer(), **change)), None) == place
