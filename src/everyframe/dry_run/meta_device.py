"""Meta device of a dry run: which tensors stand for the plan's device, and which keep values.

A tensor on the stand-in has shape and dtype only. Foreign code asks for values: a pipeline looks up
which expert serves this timestep, or how long the text is. Those tensors are small, so they are
really computed on the host. An unknown mask counts as fully set, the most that it can select.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_Value = TypeVar("_Value")
_Sizes = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

#: Device that stands for the plan's; it computes shapes and dtypes.
STAND_IN = "meta"

#: Tensors of at most this many elements keep their values.
KNOWN_ELEMENTS = 4096

#: Largest host result, in elements, that is computed for real.
HOST_ELEMENTS = 1 << 24


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Result of an operation on the stand-in.

    Torch decomposes group norm there into about twenty Python operations, most of the time of a
    decoder's dry run. The shortcut returns a tensor of the input's shape and dtype, and two
    statistics per group.
    """
    # torch's own Python code there is not a call of the model.
    with torch._C.DisableTorchFunction():
        if func is not torch.ops.aten.native_group_norm.default:
            return func(*args, **kwargs)
        given, samples, groups = args[0], args[3], args[6]
        statistics = [given.new_empty((samples, groups)) for _ in range(2)]
        return torch.empty_like(given, memory_format=torch.contiguous_format), *statistics


class OperationDict(dict[Any, _Value]):
    """What is known of operations by `operation_key`; empty again when it has become large."""

    most = 1 << 14

    def __setitem__(self, key: Any, value: _Value) -> None:
        if len(self) >= self.most:
            self.clear()
        super().__setitem__(key, value)


class MetaKernelCache:
    """Cache of `compute` for equal calls.

    The blocks of a model are alike, and so are its dry runs for several devices. Torch computes
    most shapes in Python, about a hundred times slower than a lookup.
    """

    def __init__(self) -> None:
        self._known = OperationDict[tuple[bool, list[_Sizes]]]()

    def __call__(self, key: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Result of the operation, whose `operation_key` is `key`; always new tensors."""
        if key is None:
            return compute(func, args, kwargs)
        known = self._known.get(key)
        if known is None:
            answer = compute(func, args, kwargs)
            made = _sizes_of(answer, on_device((args, kwargs)))
            if made is not None:
                self._known[key] = (isinstance(answer, Tensor), made)
            return answer
        is_one, made = known
        with torch._C.DisableTorchFunction():
            again = [
                torch.empty_strided(shape, strides, dtype=dtype, device=STAND_IN)
                for shape, strides, dtype in made
            ]
        return again[0] if is_one else tuple(again)


#: Cache shared by all dry runs of this process.
COMPUTED = MetaKernelCache()


@cache
def _makes_new(func: Any) -> bool:
    """Whether all results are new tensors whose sizes depend on no values."""
    return not (
        func.is_view
        or func._schema.is_mutable
        or torch.Tag.data_dependent_output in func.tags
        or torch.Tag.dynamic_output_shape in func.tags
    )


def operation_key(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What the sizes of an operation's results depend on, hashable; None if on more than that."""
    if not _makes_new(func):
        return None
    # The default dtype is that of what is made without one.
    key = [func, torch.get_default_dtype()]
    _add_to_key((args, kwargs), key)
    return None if None in key else tuple(key)


def _add_to_key(value: Any, key: list[Any]) -> None:
    """Add all of an operand that sizes depend on; None for what can't be a key."""
    if isinstance(value, Tensor):
        key.append((value.shape, value.stride(), value.dtype) if stands_in(value) else None)
    elif isinstance(value, (tuple, list)):
        key.append(len(value))
        for each in value:
            _add_to_key(each, key)
    elif isinstance(value, dict):
        for name, each in value.items():
            key.append(name)
            _add_to_key(each, key)
    else:  # of a number the type counts as well: 1 and 1.0 are equal
        key.append((type(value), value))


def _sizes_of(answer: Any, given: list[Tensor]) -> list[_Sizes] | None:
    """Sizes of the results; None if one is not new or does not fill its storage."""
    results = [answer] if isinstance(answer, Tensor) else answer
    if not isinstance(results, (tuple, list)):
        return None
    known = {id(each.untyped_storage()) for each in given}
    made: list[_Sizes] = []
    for each in results:
        if not isinstance(each, Tensor) or not stands_in(each):
            return None
        storage = each.untyped_storage()
        if id(storage) in known or storage.nbytes() != each.nbytes:
            return None
        made.append((tuple(each.shape), each.stride(), each.dtype))
    return made


def place(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Redirect the device in `kwargs` of a tensor factory called by foreign code.

    Small device tensors are made on the host, with values. Large host tensors (noise is drawn
    there) are made on the stand-in, without.
    """
    on_device_asked = made_on_device(kwargs)
    if "device" not in kwargs or (not on_device_asked and _has_tensors(args)):
        return kwargs
    dry = {**kwargs, "device": torch.device(STAND_IN)}
    if "generator" in kwargs:
        dry["generator"] = None
    results = [each for each in tree_leaves(func(*args, **dry)) if isinstance(each, Tensor)]
    if sum(each.numel() for each in results) > KNOWN_ELEMENTS:
        return dry
    return {**kwargs, "device": torch.device("cpu")}


def on_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on host tensors; a large result is made without values."""
    try:
        dry_args, dry_kwargs = tree_map(to_stand_in, args), tree_map(to_stand_in, kwargs)
        dry = COMPUTED(operation_key(func, dry_args, dry_kwargs), func, dry_args, dry_kwargs)
    except (RuntimeError, TypeError):  # its sizes depend on numbers, or it is for real ones alone
        return func(*args, **kwargs)
    results = [each for each in tree_leaves(dry) if isinstance(each, Tensor)]
    is_large = sum(each.numel() for each in results) > HOST_ELEMENTS
    return dry if is_large and on_device(dry) else func(*args, **kwargs)


def listed(func: Any, args: Any, kwargs: dict[str, Any], *, keeps: bool) -> Tensor:
    """A tensor on the stand-in made from a list; if it `keeps` its values, a small host tensor."""
    made: Tensor = func(*args, **{**kwargs, "device": "cpu"})
    return made if keeps and made.numel() <= KNOWN_ELEMENTS else made.to(STAND_IN)


def _has_tensors(values: Any) -> bool:
    return any(isinstance(each, Tensor) for each in tree_leaves(values))


def without_masks(operation: str, args: Any) -> Any:
    """Operands of an indexing, with boolean masks replaced by indices that need no values."""
    if operation not in ("aten::index", "aten::index_put", "aten::index_put_"):
        return args
    indices: list[Any] = []
    for index in args[1]:
        if isinstance(index, Tensor) and index.dtype == torch.bool:
            indices += places(index).unbind(1)
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])


def places(mask: Tensor) -> Tensor:
    """Indices of non-zero elements, (N, dimensions); all elements if the values are unknown."""
    if mask.device.type != STAND_IN:
        return mask.nonzero().to(STAND_IN)
    return torch.empty(mask.numel(), mask.ndim, dtype=torch.int64, device=STAND_IN)


def stands_in(tensor: Tensor) -> bool:
    """Whether a tensor is on the stand-in; called about ten times per operation."""
    return tensor.is_meta


def on_device(values: Any) -> list[Tensor]:
    """Tensors among `values` that are on the stand-in."""
    return select_stand_ins(tensors_of(values))


def select_stand_ins(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of the tensors that are on the stand-in."""
    return [each for each in tensors if stands_in(each)]


def tensors_of(value: Any) -> list[Tensor]:
    """Tensors among an operation's operands or results."""
    # Not torch's pytree, which is more general and took a fifth of a dry run.
    found: list[Tensor] = []
    _gather((value,), found)
    return found


def _gather(values: Iterable[Any], found: list[Tensor]) -> None:
    for each in values:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (tuple, list)):
            _gather(each, found)
        elif isinstance(each, dict):
            _gather(each.values(), found)


def goes_to_host(kwargs: dict[str, Any]) -> bool:
    """Whether an operation with these arguments makes a host tensor."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != STAND_IN


def made_on_device(kwargs: dict[str, Any]) -> bool:
    """Whether an operation with these arguments makes a tensor on the stand-in."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == STAND_IN


def to_stand_in(value: Any) -> Any:
    """Host tensor without its values; scalars and other values are returned unchanged."""
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.ndim:
        return torch.empty_like(value, device=STAND_IN)
    return value


def widen(args: Any) -> Any:
    """Promote the floating tensors among the operands to their widest dtype."""
    dtypes = [t.dtype for t in on_device(args) if t.is_floating_point()]
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)

    def widen(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return torch.empty_like(value, dtype=widest) if floats else value

    return tree_map(widen, args)
