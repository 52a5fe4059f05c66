"""Check that data classes rebuilt from a file hold values of their fields' types."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any


def mistyped(value: Any, place: str = "") -> Iterator[str]:
    """Places in a data class, at any depth, whose value is not of the declared type."""
    hints = typing.get_type_hints(type(value))
    for field in fields(value):
        inside = f"{place}.{field.name}" if place else field.name
        yield from _wrong(getattr(value, field.name), hints[field.name], inside)


def _wrong(value: Any, kind: Any, place: str) -> Iterator[str]:
    origin, within = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (origin is typing.Literal and value in within):
        return
    if origin is typing.Literal:
        yield place
    elif origin in (typing.Union, types.UnionType):
        found = [list(_wrong(value, each, place)) for each in within]
        yield from min(found, key=len)
    elif origin is tuple and isinstance(value, tuple):
        each = within[:1] * len(value) if within[-1:] == (Ellipsis,) else within
        yield from _all_wrong(value, each, place)
    elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        yield from _all_wrong([*value], within[:1] * len(value), place)
        yield from _all_wrong([*value.values()], within[1:] * len(value), place)
    elif origin is Sequence and isinstance(value, (list, tuple)):
        yield from _all_wrong(value, within * len(value), place)
    elif not _is_of(value, origin or kind):
        yield place
    elif is_dataclass(value):
        yield from mistyped(value, place)


def _all_wrong(values: Sequence[Any], kinds: Sequence[Any], place: str) -> Iterator[str]:
    if len(values) != len(kinds):
        yield place
        return
    for number, (value, kind) in enumerate(zip(values, kinds, strict=True)):
        yield from _wrong(value, kind, f"{place}[{number}]")


def _is_of(value: Any, kind: Any) -> bool:
    if kind is float:
        kind = (int, float)
    return isinstance(value, kind) and (not isinstance(value, bool) or kind is bool)
