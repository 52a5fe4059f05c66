"""What a module is called with, taken apart: its tensors by name, and how they were arranged.

The arrangement is plain data, so that it can be written as JSON; `unpacked` puts it together again
for a replay. What is neither a tensor nor plain is remembered by the name of its type alone: it
can't be given to a module again. Read next: `recording`, `replay`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.core.errors import InputError

See = Callable[[str, Tensor], int]
"""Told of each tensor and its name; gives the number by which it is found again."""


def packed(value: Any, name: str, see: See) -> Any:
    """The arrangement of `value`, whose tensors with elements are shown to `see`."""

    def inner(key: object) -> str:
        return f"{name}.{key}" if name else str(key)

    if isinstance(value, Tensor):
        return {"tensor": see(name, value)} if _has_numbers(value) else _other(value)
    if isinstance(value, Mapping):
        items = {str(key): packed(each, inner(key), see) for key, each in value.items()}
        return {"dict": items} if type(value) is dict else _other(value)
    if isinstance(value, (tuple, list)):
        listed = [packed(each, inner(place), see) for place, each in enumerate(value)]
        plain = {tuple: "tuple", list: "list"}.get(type(value))
        return {plain: listed} if plain else _other(value)
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            packed(getattr(value, field.name), inner(field.name), see)
        return _other(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else _other(value)


def packed_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], see: See
) -> Any:
    """The arrangement of one call's arguments; positional ones have their parameter's name."""
    kind: Any = type(module)
    names = _parameters(kind)
    names += tuple(str(place) for place in range(len(names), len(args)))
    listed = [packed(each, name, see) for name, each in zip(names, args, strict=False)]
    return {"args": listed, "kwargs": {key: packed(each, key, see) for key, each in kwargs.items()}}


def unpacked(
    arrangement: Any, tensors: Mapping[int, Tensor], change: Callable[[Tensor], Tensor]
) -> Any:
    """What was packed, with `change` applied to each tensor.

    Raises `InputError` for what can't be put together again.
    """
    if not isinstance(arrangement, dict):
        return arrangement
    (kind, inner), *_ = arrangement.items()
    if kind == "tensor" and inner in tensors:
        return change(tensors[inner])
    if kind == "dict":
        return {key: unpacked(each, tensors, change) for key, each in inner.items()}
    if kind in ("list", "tuple"):
        listed = [unpacked(each, tensors, change) for each in inner]
        return tuple(listed) if kind == "tuple" else listed
    raise InputError(f"it was given a {inner}, which a trace can't keep")


@lru_cache(maxsize=1024)
def _parameters(kind: Any) -> tuple[str, ...]:
    """Names of the positional parameters of the forward of a class of modules."""
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    found = signature(kind.forward).parameters.values()
    return tuple(each.name for each in found if each.kind in positional)[1:]


def _has_numbers(tensor: Tensor) -> bool:
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized
    return is_plain and not tensor.is_meta and tensor.numel() > 0


def _other(value: Any) -> dict[str, str]:
    return {"other": type(value).__name__}
