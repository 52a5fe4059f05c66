"""Options of a model as data, for forms: type, unit, limits, default and help of each."""

from __future__ import annotations

import typing
from typing import Any

from everyframe.core.options import Options, facts_of
from everyframe.core.quality import EXACT
from everyframe.core.request import DTYPES, QUANTIZE, Request
from everyframe.families.registry import family_names, options_of
from everyframe.server.data_folder import MEDIA
from everyframe.server.requests.client_options import owning_classes, refused_fields

#: Options whose values are words of a list.
_CHOICES = {
    "dtype": list(dict.fromkeys(DTYPES)), "quantize": list(QUANTIZE),
    "attention": ["flash", "efficient", "cudnn", "math"], "fit": ["crop", "pad", "stretch"],
}  # fmt: skip
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
_LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum",
           "max_length": "maxLength"}  # fmt: skip


def option_schema(family: str | None) -> list[dict[str, Any]]:
    """Options that clients may set for a family; those of all families if it is unknown."""
    is_known = family in family_names()
    owners: list[type[Options]]
    owners = [Request, options_of(family)] if is_known and family else owning_classes()
    found: dict[str, dict[str, Any]] = {}
    for options in owners:
        for name in options.model_fields:
            if name not in refused_fields() and name not in found:
                found[name] = _describe(options, name)
    return [*found.values()]


def _describe(options: type[Options], name: str) -> dict[str, Any]:
    field, facts = options.model_fields[name], facts_of(options, name)
    annotation = field.annotation
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    kind: Any = kinds[0] if kinds else annotation
    origin = typing.get_origin(annotation)
    is_list, is_map = origin is tuple or name in ("loras", "disable"), origin is dict
    shown: dict[str, Any] = {
        "name": name,
        "type": "array" if is_list else "object" if is_map else _TYPES.get(kind, "string"),
        "group": facts.get("group"),
        "help": field.description,
        "unit": facts.get("unit"),
        "default": _plain(field.default),
    }
    if name in MEDIA:
        shown |= {"type": "file", "accepts": MEDIA[name]}
    if name in _CHOICES:
        shown["enum"] = _CHOICES[name]
    for limit in field.metadata:
        for ours, theirs in _LIMITS.items():
            value = getattr(limit, ours, None)
            if value is not None:
                shown[theirs] = value
    if name == "quality":
        shown["examples"] = [EXACT, "32dB", "ab2@10"]
    return shown


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return list(value)
    return value if isinstance(value, (str, int, float, bool, dict)) or value is None else None
