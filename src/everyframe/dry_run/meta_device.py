"""Tensors of a dry run: what is on the device that stands for the plan's, and what has numbers.

What is on the stand-in has shape and dtype alone. Code that nobody wrote for that asks for numbers:
a pipeline's own call looks at which expert takes this timestep and how long the text is. All of
that is small, so there it is made on the host for real. Where a mask is not known, everything in it
counts as set, which is the most that it can select.
Read next: `everyframe.dry_run.executor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

#: The device that stands for the plan's; it computes shapes and dtypes.
STAND_IN = "meta"

#: Tensors of so few elements keep their numbers.
KNOWN_ELEMENTS = 4096

#: What the host computes of such is made for real up to so many elements.
HOST_ELEMENTS = 1 << 24


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation on the stand-in gives.

    torch takes a group norm apart there, into some twenty operations of Python: most of the time of
    a decoder's dry run, for a result of its input's shape and dtype, and two statistics a group.
    """
    # What torch does in Python for that is none of the model's own calls.
    with torch._C.DisableTorchFunction():
        if func is not torch.ops.aten.native_group_norm.default:
            return func(*args, **kwargs)
        given, samples, groups = args[0], args[3], args[6]
        statistics = [given.new_empty((samples, groups)) for _ in range(2)]
        return torch.empty_like(given, memory_format=torch.contiguous_format), *statistics


class MetaKernelCache:
    """`computed`, once for calls that are alike: the blocks of a model are, and a model's dry runs
    for several devices; and torch works most sizes out in Python, some hundred times as slowly as
    it is to remember them.
    """

    def __init__(self, most: int = 1 << 14) -> None:
        self._known: dict[Any, tuple[bool, list[_Sizes]]] = {}
        self._most = most

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the operation gives; its results are new ones each time."""
        key = (func, *_described((args, kwargs))) if _makes_new(func) else None
        if key is None or None in key:
            return computed(func, args, kwargs)
        key = (torch.get_default_dtype(), *key)  # of what is made without one
        known = self._known.get(key)
        if known is None:
            answer = computed(func, args, kwargs)
            made = _sizes_of(answer, on_device((args, kwargs)))
            if made is not None:
                if len(self._known) >= self._most:
                    self._known.clear()
                self._known[key] = (isinstance(answer, Tensor), made)
            return answer
        is_one, made = known
        with torch._C.DisableTorchFunction():
            again = [
                torch.empty_strided(shape, strides, dtype=dtype, device=STAND_IN)
                for shape, strides, dtype in made
            ]
        return again[0] if is_one else tuple(again)


#: What all dry runs of this process have in common.
COMPUTED = MetaKernelCache()

_Sizes = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@cache
def _makes_new(func: Any) -> bool:
    """Whether all that this operation gives is new, of a size that depends on no numbers."""
    return not (
        func.is_view
        or func._schema.is_mutable
        or torch.Tag.data_dependent_output in func.tags
        or torch.Tag.dynamic_output_shape in func.tags
    )


def _described(value: Any) -> Iterator[Any]:
    """All that sizes depend on, as what can be looked up; None for what can't be."""
    if isinstance(value, Tensor):
        yield (value.shape, value.stride(), value.dtype) if stands_in(value) else None
    elif isinstance(value, (tuple, list)):
        yield len(value)
        for each in value:
            yield from _described(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _described(each)
    else:  # of a number the type counts as well: 1 and 1.0 are equal
        yield type(value), value


def _sizes_of(answer: Any, given: list[Tensor]) -> list[_Sizes] | None:
    """Those of the results; None where one is not new, or not all that its memory is for."""
    results = [answer] if isinstance(answer, Tensor) else answer
    if not isinstance(results, (tuple, list)):
        return None
    known = {id(each.untyped_storage()) for each in given}
    made: list[_Sizes] = []
    for each in results:
        if not isinstance(each, Tensor) or not stands_in(each):
            return None
        storage = each.untyped_storage()
        if id(storage) in known or storage.nbytes() != each.numel() * each.element_size():
            return None
        made.append((tuple(each.shape), each.stride(), each.dtype))
    return made


def placed(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` of what makes tensors, in code that asks for numbers, with another device in them.

    What would be on the device, and is small, is made on the host; what would be on the host, and
    is large (noise is drawn there), has no numbers.
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
    """An operation on host tensors; its result has no numbers where it would be large."""
    try:
        dry = func(*tree_map(to_stand_in, args), **tree_map(to_stand_in, kwargs))
    except (RuntimeError, TypeError):  # its sizes depend on numbers, or it is for real ones alone
        return func(*args, **kwargs)
    results = [each for each in tree_leaves(dry) if isinstance(each, Tensor)]
    is_large = sum(each.numel() for each in results) > HOST_ELEMENTS
    return dry if is_large and on_device(dry) else func(*args, **kwargs)


def _has_tensors(values: Any) -> bool:
    return any(isinstance(each, Tensor) for each in tree_leaves(values))


def without_masks(operation: str, args: Any) -> Any:
    """The operands of an indexing with its masks as indices, which need no numbers to be used."""
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
    """Where a tensor is not zero, (N, dimensions): N as known, or all of them."""
    if mask.device.type != STAND_IN:
        return mask.nonzero().to(STAND_IN)
    return torch.empty(mask.numel(), mask.ndim, dtype=torch.int64, device=STAND_IN)


def stands_in(tensor: Tensor) -> bool:
    """Whether a tensor is on the stand-in; asked some ten times an operation."""
    return tensor.is_meta


def on_device(values: Any) -> list[Tensor]:
    """Those of the tensors that are on the stand-in."""
    return [each for each in tensors_of(values) if stands_in(each)]


def to_stand_in_all(values: Any) -> Any:
    """`values` with `to_stand_in` of each; the same ones where there is nothing to be done."""
    if all(stands_in(each) for each in tensors_of(values)):
        return values
    return tree_map(to_stand_in, values)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors among an operation's operands, or results."""
    # Not torch's pytree, which knows many more kinds of trees than operations are given, and took
    # a fifth of a dry run.
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
    """A host tensor without its numbers; anything else, and single numbers, as they are."""
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.ndim:
        return torch.empty_like(value, device=STAND_IN)
    return value


def widened(args: Any) -> Any:
    """Floating tensors among the operands brought to the widest dtype of all."""
    dtypes = [t.dtype for t in on_device(args) if t.is_floating_point()]
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)

    def widen(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return torch.empty_like(value, dtype=widest) if floats else value

    return tree_map(widen, args)
