"""JSON serialization of our own values: dataclasses, requests, tuples, paths.

Used for run folders and for messages between our own processes. Only frozen data classes of this
package are rebuilt, so a file can run no code. Arrays and tensors are stored elsewhere: `keep`
saves one and returns a JSON reference, `fetch` reads it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from everyframe.core.errors import CorruptRunError, NotSerializableError
from everyframe.core.options import Options

Keep = Callable[[Any], "dict[str, Any] | None"]
"""Save an array or tensor and return its JSON reference; None for any other value."""

Fetch = Callable[[Mapping[str, Any]], Any]
"""Read back the value for which `Keep` returned this data."""

#: Key of tagged JSON objects. A mapping that has it as a key is written as a list.
_MARK = "$"
_PACKAGE = __name__.partition(".")[0]

#: What data of another form raises while a value is rebuilt.
_UNREADABLE = (
    KeyError, TypeError, ValueError, AttributeError, ImportError, ArithmeticError, RecursionError,
)  # fmt: skip


def _has_nothing(kept: Mapping[str, Any]) -> Any:
    raise ValueError("no tensors were saved with this data")


def to_jsonable(value: Any, keep: Keep = lambda value: None) -> Any:
    """Convert `value` to JSON data; arrays and tensors need `keep`.

    Raises:
        NotSerializableError: it holds a value that neither this function nor `keep` knows.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return _of_mapping(value, keep)
    if isinstance(value, tuple):
        return {_MARK: "tuple", "items": [to_jsonable(each, keep) for each in value]}
    if isinstance(value, list):
        return [to_jsonable(each, keep) for each in value]
    if isinstance(value, Path):
        return {_MARK: "path", "text": str(value)}
    if isinstance(value, Fraction):
        return {_MARK: "fraction", "text": str(value)}
    if _is_ours(type(value)):
        return {
            _MARK: "object",
            "class": f"{type(value).__module__}:{type(value).__qualname__}",
            "fields": {k: to_jsonable(each, keep) for k, each in _fields(value).items()},
        }
    kept = keep(value)
    if kept is None:
        raise NotSerializableError(
            f"a {type(value).__module__}.{type(value).__qualname__} can't be saved"
        )
    return {_MARK: "kept", **kept}


def _of_mapping(value: Mapping[Any, Any], keep: Keep) -> Any:
    if all(isinstance(key, str) for key in value) and _MARK not in value:
        return {key: to_jsonable(each, keep) for key, each in value.items()}
    items = [[to_jsonable(key, keep), to_jsonable(each, keep)] for key, each in value.items()]
    return {_MARK: "mapping", "items": items}


def _is_ours(kind: type[Any]) -> bool:
    is_data = is_dataclass(kind) or issubclass(kind, Options)
    return is_data and kind.__module__.partition(".")[0] == _PACKAGE


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, Options):
        return value.given()
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}


def from_jsonable(data: Any, fetch: Fetch = _has_nothing) -> Any:
    """Rebuild the value from the data of `to_jsonable`.

    Raises:
        CorruptRunError: the data is nothing that `to_jsonable` writes.
    """
    try:
        return _rebuild(data, fetch)
    except _UNREADABLE as error:
        raise CorruptRunError(f"the saved data can't be read: {error}") from error


def _rebuild(data: Any, fetch: Fetch) -> Any:
    if isinstance(data, list):
        return [_rebuild(each, fetch) for each in data]
    if not isinstance(data, dict):
        return data
    if _MARK not in data:
        return {key: _rebuild(each, fetch) for key, each in data.items()}
    mark = data[_MARK]
    if mark == "kept":
        return fetch(data)
    if mark == "tuple":
        return tuple(_rebuild(each, fetch) for each in data["items"])
    if mark == "mapping":
        return {_rebuild(k, fetch): _rebuild(each, fetch) for k, each in data["items"]}
    if mark == "path":
        return Path(data["text"])
    if mark == "fraction":
        # Of two whole numbers, as it is written: one with an exponent may take hours to be read.
        return Fraction(*map(int, data["text"].split("/")))
    if mark == "object":
        values = {key: _rebuild(each, fetch) for key, each in data["fields"].items()}
        return _class(data["class"])(**values)
    raise ValueError(f"an unknown mark, {mark!r}")


@lru_cache(maxsize=256)
def _class(name: str) -> type[Any]:
    module, _, place = name.partition(":")
    if module.partition(".")[0] != _PACKAGE:
        raise ValueError(f"{name!r} is no class of this package")
    found: Any = import_module(module)
    for part in place.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or not _is_ours(found):
        raise ValueError(f"{name!r} holds no data")
    return found
