"""Functions, methods and numbers that a block's code finds by their names.

They are baked into compiled code as much as the block's own: helpers of its module, such as
diffusers' attention dispatch, methods and numbers of a class. Somebody may set another in a
module or class, and another version of a library may have another.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

#: Values that are data by themselves; other objects are read where a block holds them.
_NUMBERS = (bool, int, float, str, type(None))

#: Functions by `functools.cache`, and all callables that their names tell apart.
_CACHED = type(functools.cache(len))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, _CACHED)

_NOTHING = object()


@dataclass(frozen=True)
class NamedValue:
    """What a name stands for in a module's globals, or in a class."""

    holder: Any
    name: str
    value: object

    def is_unchanged(self) -> bool:
        """Whether the name still stands for this very object."""
        return _look_up(self.holder, self.name) is self.value

    @property
    def is_opaque(self) -> bool:
        """Whether it is a callable object, of which another may look the same."""
        return not isinstance(self.value, (*_NUMBERS, *_FUNCTIONS))

    @property
    def description(self) -> tuple[str, ...]:
        """Plain data, the same in every process."""
        holder, value = self.holder, self.value
        if isinstance(holder, dict):
            place = str(holder.get("__name__"))
        else:
            place = f"{holder.__module__}.{holder.__qualname__}"
        if self.is_opaque:
            return (place, self.name, type(value).__name__)
        if not isinstance(value, _FUNCTIONS):
            return (place, self.name, type(value).__name__, repr(value))
        line = value.__code__.co_firstlineno if isinstance(value, types.FunctionType) else 0
        return (place, self.name, f"{value.__module__}.{value.__qualname__}:{line}")


def find_named_values(
    functions: Iterable[types.FunctionType], classes: Iterable[type]
) -> tuple[list[NamedValue], set[str]]:
    """What these functions find by name, in their modules and in these classes, and so on.

    Returns:
        the values, and the source files of the functions among them.
    """
    found: dict[tuple[int, str], NamedValue] = {}
    seen: dict[int, types.FunctionType] = {}
    names: set[str] = set()
    own = [cls for cls in classes if not _is_torchs(cls)]
    waiting = list(functions)
    while waiting:
        while waiting:
            called = waiting.pop()
            if id(called) in seen or _is_torchs(called):
                continue
            seen[id(called)] = called
            asked = set(_names_in(called.__code__))
            names |= asked
            waiting += _take(called.__globals__, asked, found)
            waiting += _functions_in(called.__closure__ or ())
        for cls in own:
            waiting += _take(cls, names, found)
    return list(found.values()), {each.__code__.co_filename for each in seen.values()}


def _take(
    holder: Any, names: set[str], found: dict[tuple[int, str], NamedValue]
) -> list[types.FunctionType]:
    """Add the values of these names in a module or class; returns the functions that are new."""
    new: list[types.FunctionType] = []
    is_module = isinstance(holder, dict)
    for name in names:
        value = _look_up(holder, name)
        if (id(holder), name) in found or isinstance(value, type) or value is _NOTHING:
            continue
        code: object = value.__wrapped__ if isinstance(value, _CACHED) else value
        if isinstance(code, types.FunctionType) and not _is_torchs(code):
            new.append(code)
        elif not isinstance(value, _NUMBERS) and not (is_module and callable(value)):
            continue
        found[id(holder), name] = NamedValue(holder, name, value)
    return new


def _look_up(holder: Any, name: str) -> Any:
    if isinstance(holder, dict):
        return holder.get(name, _NOTHING)
    return getattr(holder, name, _NOTHING)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names_in(each)


def _functions_in(cells: tuple[types.CellType, ...]) -> Iterator[types.FunctionType]:
    return (each for each in map(_content, cells) if isinstance(each, types.FunctionType))


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None


def _is_torchs(value: Any) -> bool:
    return (value.__module__ or "").partition(".")[0] == "torch"
