"""Replay one call in float32 on the inputs of each run, to tell growth from source.

A run that is far from float32 on its own inputs computes that module wrong. If both runs are close
to float32, the module only amplifies a difference that arose earlier. Needs the module itself and
whole tensors in both traces.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.core.errors import InputError
from everyframe.hardware.device_loss import translate_device_loss
from everyframe.numerics.trace.diff import Comparison, rounding, unit_of
from everyframe.numerics.trace.trace import Trace

See = Callable[[str, Tensor], int]
"""Callback for each tensor and its name; returns the number that finds it again."""


def pack(value: Any, name: str, see: See) -> Any:
    """Describe the structure of `value` as JSON; non-empty tensors are passed to `see`."""

    def inner(key: object) -> str:
        return f"{name}.{key}" if name else str(key)

    if isinstance(value, Tensor):
        return {"tensor": see(name, value)} if _has_numbers(value) else _other(value)
    if isinstance(value, Mapping):
        items = {str(key): pack(each, inner(key), see) for key, each in value.items()}
        return {"dict": items} if type(value) is dict else _other(value)
    if isinstance(value, (tuple, list)):
        listed = [pack(each, inner(place), see) for place, each in enumerate(value)]
        plain = {tuple: "tuple", list: "list"}.get(type(value))
        return {plain: listed} if plain else _other(value)
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            pack(getattr(value, field.name), inner(field.name), see)
        return _other(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else _other(value)


def pack_call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], see: See) -> Any:
    """Describe the arguments of one call; positional ones get their parameter's name."""
    kind: Any = type(module)
    names = _parameters(kind)
    names += tuple(str(place) for place in range(len(names), len(args)))
    listed = [pack(each, name, see) for name, each in zip(names, args, strict=False)]
    return {"args": listed, "kwargs": {key: pack(each, key, see) for key, each in kwargs.items()}}


def unpack(
    arrangement: Any, tensors: Mapping[int, Tensor], change: Callable[[Tensor], Tensor]
) -> Any:
    """Rebuild a packed value, with `change` applied to each tensor.

    Raises `InputError` for a value that can't be rebuilt.
    """
    if not isinstance(arrangement, dict):
        return arrangement
    (kind, inner), *_ = arrangement.items()
    if kind == "tensor" and inner in tensors:
        return change(tensors[inner])
    if kind == "dict":
        return {key: unpack(each, tensors, change) for key, each in inner.items()}
    if kind in ("list", "tuple"):
        listed = [unpack(each, tensors, change) for each in inner]
        return tuple(listed) if kind == "tuple" else listed
    raise InputError(f"it was given a {inner}, which a trace can't keep")


@lru_cache(maxsize=1024)
def _parameters(kind: Any) -> tuple[str, ...]:
    """Names of the positional parameters of a module class's `forward`."""
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    found = signature(kind.forward).parameters.values()
    return tuple(each.name for each in found if each.kind in positional)[1:]


def _has_numbers(tensor: Tensor) -> bool:
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized
    return is_plain and not tensor.is_meta and tensor.numel() > 0


def _other(value: Any) -> dict[str, str]:
    return {"other": type(value).__name__}


@dataclass(frozen=True)
class Replayed:
    """Result of one replayed call.

    Attributes:
        name: module.
        errors: relative errors of the first and the second run against float32 on their own inputs.
        explained: the error that each run's precision explains.
        growth: factor by which float32 amplifies the difference of the inputs; infinite if equal
            inputs give different outputs.
    """

    name: str
    errors: tuple[float, float]
    explained: tuple[float, float]
    growth: float

    @property
    def wrong(self) -> tuple[str, ...]:
        """Runs whose error exceeds what precision explains: ``first``, ``second``, both or none."""
        pairs = zip(("first", "second"), self.errors, self.explained, strict=True)
        return tuple(which for which, error, explained in pairs if error > explained)

    @property
    def message(self) -> str:
        """The finding in a sentence."""
        (one, two), (may_one, may_two) = self.errors, self.explained
        off = (
            f"replayed in float32 on its own inputs, the first run is off by {one:.1e} (its "
            f"precision explains {may_one:.1e}) and the second by {two:.1e} ({may_two:.1e})"
        )
        if self.wrong:
            runs = " and ".join(self.wrong)
            return f"{self.name}: {off}: the source is here, in the {runs} run"
        return (
            f"{self.name}: {off}: both are right. It makes differences {self.growth:.1f} times as "
            "large in float32 too: growth, and the source is before it"
        )


def is_kept(compared: Comparison, call: int) -> bool:
    """Whether both traces hold the whole tensors of that call of the first trace."""
    other = compared.partners.get(call)
    return call in compared.a.arguments and other in compared.b.arguments


def replay(compared: Comparison, call: int, module: nn.Module) -> Replayed:
    """Repeat that call of the first trace, and its partner in the second, in float32.

    `module` is the module itself, with weights in any precision.

    Raises:
        InputError: its arguments are more than a trace stores, or don't fit the module.
        DeviceLostError: the module's device was lost.
    """
    name = compared.a.parts[compared.a.calls[call].part].name
    runs = ((compared.a, call), (compared.b, compared.partners[call]))
    with translate_device_loss(str(_device_of(module)), f"while {name} was replayed"):
        wide = _widen(module)
        try:
            results = [_again(wide, trace, made) for trace, made in runs]
        except (RuntimeError, TypeError, LookupError, ValueError, AttributeError) as error:
            # Whatever stands in the file was handed to the module.
            text = " ".join(str(error).split())[:300]
            raise InputError(f"{name} can't be replayed: {text}") from error
    given = [_recorded_tensors(trace, made, "output") for trace, made in runs]
    errors = tuple(_error(got, want, name) for got, want in zip(given, results, strict=True))
    first, second = (_recorded_tensors(trace, made, "input") for trace, made in runs)
    inputs, outputs = (
        _error(first, second, name),
        _error(results[0], results[1], name),
    )
    explained = tuple(_explained_error(trace, made) for trace, made in runs)
    growth = outputs / inputs if inputs else math.inf if outputs else 1.0
    return Replayed(name, (errors[0], errors[1]), (explained[0], explained[1]), growth)


def _widen(module: nn.Module) -> nn.Module:
    """Copy the module in float32, without hooks."""
    with torch.inference_mode(False):
        wide = copy.deepcopy(module).float().eval()
    for part in wide.modules():
        # Drop input casts and offload hooks: all weights are here, in float32.
        part._forward_pre_hooks.clear()
        part._forward_hooks.clear()
    return wide


def _device_of(module: nn.Module) -> torch.device:
    return next((each.device for each in module.parameters()), torch.device("cpu"))


def _again(wide: nn.Module, trace: Trace, call: int) -> list[Tensor]:
    device = _device_of(wide)

    def widen(tensor: Tensor) -> Tensor:
        return tensor.to(device, torch.float32 if tensor.is_floating_point() else None)

    arrangement = trace.arguments[call]
    args = [unpack(each, trace.full, widen) for each in arrangement["args"]]
    kwargs = {key: unpack(each, trace.full, widen) for key, each in arrangement["kwargs"].items()}
    found: list[Tensor] = []

    def keep(_: str, tensor: Tensor) -> int:
        found.append(tensor.cpu())  # a card tells what failed on it when it is asked for results
        return 0

    with torch.no_grad():
        pack(wide(*args, **kwargs), "", keep)
    return found


def _recorded_tensors(trace: Trace, call: int, kind: str) -> list[Tensor]:
    return [
        trace.full[place]
        for place, seen in enumerate(trace.seen)
        if seen.call == call and seen.kind == kind and place in trace.full
    ]


def _error(got: Sequence[Tensor], want: Sequence[Tensor], name: str) -> float:
    """Largest relative difference of tensors, pair by pair, in float64."""
    shapes = [[tuple(each.shape) for each in side] for side in (got, want)]
    if shapes[0] != shapes[1]:
        raise InputError(f"{name} can't be replayed: {shapes[0]} can't be compared to {shapes[1]}")
    largest = 0.0
    for pair in zip(got, want, strict=True):
        a, b = (each.detach().cpu().double() for each in pair)
        size = float(b.norm())
        distance = float((a - b).norm())
        error = 0.0 if distance == 0 else distance / size if size else math.inf
        largest = max(largest, error if math.isfinite(error) else math.inf)
    return largest


def _explained_error(trace: Trace, call: int) -> float:
    """Error explained by the narrowest dtype in that call.

    Roundings of nested calls add up like random errors (square root of their number). Weights count
    too; they were recorded at the first call of each module.
    """
    inside = {call}
    for later in range(call + 1, len(trace.calls)):
        if trace.calls[later].parent not in inside:
            break  # calls made in one follow it without a gap
        inside.add(later)
    parts = {trace.calls[each].part for each in inside}
    units = (
        unit_of(seen.dtype, trace)
        for seen in trace.seen
        if seen.call in inside or (seen.kind == "weight" and trace.calls[seen.call].part in parts)
    )
    return rounding(max(units, default=0.0)) * max(2.0, math.sqrt(len(inside)))
