"""Apply a precision to a plain module: cast its parameters, hook input casts at module edges.

Every leaf module with parameters (Linear, Conv, Norm, Embedding) gets a hook that casts its
floating inputs to the dtype of its parameters. Two dtypes therefore never meet inside a leaf, on
any device, without autocast. A narrow output enters a float32 sum by promotion, so a residual
stream that starts in float32 stays there. To start it there in a foreign module, make the first
layer an island; to get float32 out, make the last layer one or name it in `outputs`.

Swap child modules before, as the hooks sit on the children.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from everyframe.core.errors import InputError
from everyframe.core.plan import Precision
from everyframe.precision.dtypes import island_dtype, num_bytes, torch_dtype
from everyframe.precision.islands import check_islands, is_in_island
from everyframe.precision.upcast import narrow_with_float32


class CastHooks:
    """Handle of the hooks of `add_cast_hooks`; `remove` removes them, parameters stay as they are.

    Narrowed parameters don't get their bits back. To get the float32 model, load it again.
    """

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    @property
    def num_hooks(self) -> int:
        """Number of hooks; 0 when everything is float32 or wider."""
        return len(self._handles)

    def remove(self) -> None:
        """Remove all hooks. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def add_cast_hooks(
    module: nn.Module,
    precision: Precision,
    outputs: tuple[str, ...] = ("",),
    *,
    keeps_float32: bool = False,
) -> CastHooks:
    """Cast the parameters of `module` in place, and hook the edges of its leaf modules.

    `outputs` are dotted names of modules whose results leave for the engine and are widened to
    float32 if narrower. ``""`` is the module itself, which is enough when it is called as
    ``module(...)``; an autoencoder's ``decode`` is no such call, so name its decoder. Buffers keep
    their dtype: they are tables and statistics, wanted in float32. With `keeps_float32`, the values
    of narrowed parameters stay in memory (`upcast.narrow_with_float32`).

    Raises:
        InputError: applied already; compute dtype differs from the parameters'; an island or output
            does not exist.
    """
    if precision.compute != precision.parameters:
        raise InputError(
            f"parameters in {precision.parameters} with compute in {precision.compute}: this "
            "module's parameters are multiplied as they are stored, so both must be the same"
        )
    if any(map(is_cast_hook, _all_hooks(module))):
        raise InputError(
            "this module has a precision already; remove() the old one first, and load the "
            "weights again if they were narrowed"
        )
    modules = dict(module.named_modules())
    for name in outputs:
        if name not in modules:
            raise InputError(f"output {name!r} is no part of this {type(module).__name__}")
    _cast_parameters(module, precision, keeps_float32=keeps_float32)
    leaves = {name: part for name, part in modules.items() if _multiplies_its_inputs(part)}
    _check_one_dtype_each(leaves)
    if num_bytes(precision.parameters) >= 4:
        return CastHooks([])
    handles = [
        leaf.register_forward_pre_hook(_CastInputs(), with_kwargs=True) for leaf in leaves.values()
    ]
    widest = torch_dtype(island_dtype(precision.parameters))
    handles += [modules[name].register_forward_hook(_WidenOutputs(widest)) for name in outputs]
    return CastHooks(handles)


def add_input_casts(module: nn.Module) -> CastHooks:
    """Hook the leaf modules that have no input cast yet; parameters stay as they are.

    For a module without a precision in which two dtypes are about to meet. The hooks change nothing
    while all is of one dtype.
    """
    bare = [part for part in module.modules() if _multiplies_its_inputs(part) and not _casts(part)]
    hook = _CastInputs()
    return CastHooks([part.register_forward_pre_hook(hook, with_kwargs=True) for part in bare])


def _casts(part: nn.Module) -> bool:
    return any(isinstance(hook, _CastInputs) for hook in part._forward_pre_hooks.values())


class _Hook:
    """Marker base class of our hooks."""


def is_cast_hook(hook: object) -> bool:
    """Whether it is a hook of `add_cast_hooks`: one that only casts, whatever else happens."""
    return isinstance(hook, _Hook)


class _CastInputs(_Hook):
    """Forward pre-hook that casts floating inputs to the dtype of the module's parameters.

    The dtype is read at each call.
    """

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        dtype = next(_own_floats(module)).dtype
        if all(_fits(value, dtype) for value in args) and not kwargs:
            return None
        return (
            tuple(_cast(value, dtype) for value in args),
            {key: _cast(value, dtype) for key, value in kwargs.items()},
        )


class _WidenOutputs(_Hook):
    """Forward hook that widens floating results to `dtype`, also inside containers."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        return map_tensors(result, self._widen)

    def _widen(self, tensor: Tensor) -> Tensor:
        narrow = tensor.is_floating_point() and tensor.dtype.itemsize < self.dtype.itemsize
        return tensor.to(self.dtype) if narrow else tensor


def _fits(value: Any, dtype: torch.dtype) -> bool:
    return not isinstance(value, Tensor) or value.dtype == dtype or not value.is_floating_point()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value if _fits(value, dtype) else value.to(dtype)


def _multiplies_its_inputs(module: nn.Module) -> bool:
    """Whether a module multiplies its inputs with its own parameters, and so needs one dtype.

    A module with children may add its own parameters to a wide stream (modulation or position
    tables). Promotion handles that, and a cast would narrow the stream. A module can opt out with
    `takes_any_dtype`.
    """
    if getattr(module, "takes_any_dtype", False):
        return False
    if isinstance(module, nn.MultiheadAttention):
        return True  # has a child, which it never calls: it takes the child's weight
    return not module._modules and any(True for _ in _own_floats(module))


def _own_floats(module: nn.Module) -> Iterator[nn.Parameter]:
    return (p for p in module._parameters.values() if p is not None and p.is_floating_point())


def _cast_parameters(module: nn.Module, precision: Precision, *, keeps_float32: bool) -> None:
    named = list(module.named_parameters(remove_duplicate=False))
    check_islands(precision.islands, (name for name, _ in named))
    # A parameter with several names (tied embeddings) is in an island if any of its names is.
    islanders = {id(p) for name, p in named if is_in_island(name, precision.islands)}
    # Batch norms mix their parameters with their statistics, which are buffers in float32.
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    islanders |= {id(p) for norm in norms for p in norm.parameters()}
    narrow = torch_dtype(precision.parameters)
    wide = torch_dtype(island_dtype(precision.parameters))
    for _, parameter in named:
        if not parameter.is_floating_point():
            continue
        dtype = wide if id(parameter) in islanders else narrow
        if keeps_float32 and dtype != parameter.dtype == torch.float32:
            narrow_with_float32(parameter, dtype)
        elif parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def _check_one_dtype_each(leaves: Mapping[str, nn.Module]) -> None:
    for name, leaf in leaves.items():
        dtypes = {str(p.dtype) for p in _own_floats(leaf)}
        if len(dtypes) > 1:
            raise InputError(
                f"a float32 island cuts {name!r} in two ({', '.join(sorted(dtypes))}); "
                "name the module, not one of its parameters"
            )


def _all_hooks(module: nn.Module) -> Iterator[object]:
    for part in module.modules():
        yield from part._forward_pre_hooks.values()
        yield from part._forward_hooks.values()


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor in a structure; parts without tensors stay the same object."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        # diffusers' and transformers' outputs: dataclasses that are ordered mappings as well.
        names = [field.name for field in fields(value) if field.init]
        return type(value)(**{n: map_tensors(getattr(value, n), change) for n in names})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a structure, in the order of `map_tensors`."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found
