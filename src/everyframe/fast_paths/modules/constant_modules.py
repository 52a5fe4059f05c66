"""Find the modules of a model whose results depend neither on its latents nor on its timestep.

One call is followed operation by operation: what is computed from latents or timestep varies, and
all else (weights, the prompt's tensors, tables made of sizes) is constant. It works for any model,
as nothing of its class is known here. A number that is read from a varying tensor (``item()``)
makes everything after it vary, and so do random and uninitialised tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from everyframe.ops.call_override import ModuleCall
from everyframe.ops.native.kernels import KernelMode

#: Arguments of a model that differ in every step, by name, beside its first one.
VARYING = frozenset({
    "hidden_states", "sample", "timestep", "timesteps", "temb", "audio_hidden_states",
    "audio_timestep", "sigma", "audio_sigma", "timestep_r", "r_timestep",
})  # fmt: skip


@dataclass(frozen=True)
class ConstantModule:
    """A submodule whose results are constant.

    Attributes:
        name: dotted name in the model.
        varying: positions of its varying tensors among the leaves of ``(args, kwargs)``, of which
            it reads sizes alone, as a table of positions does.
    """

    name: str
    varying: frozenset[int]


class _Dependencies(KernelMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that marks as constant what is computed from constant tensors alone."""

    #: Torch asks each mode this for operators such as flex_attention.
    supports_higher_order_operators = True

    def __init__(self, constants: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._constant = WeakTensorKeyDictionary()
        #: Memory that something varying was written to; views of it vary too.
        self._written: set[int] = set()
        self.num_operations = 0
        self.has_read_varying = False
        for each in constants:
            self._constant[each] = True

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether nothing varying was used for it."""
        return tensor in self._constant and _storage(tensor) not in self._written

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        self.num_operations += 1
        used, made = _tensors((args, given)), _tensors(result)
        is_constant = self._are_constant(used)
        if is_constant and not _is_arbitrary(func):
            self._mark_constant(made, used)
            return result
        self._written.update(_storage(each) for each in _targets(func, args, given))
        self.has_read_varying |= bool(used) and not made and not is_constant and result is not None
        return result

    def note_kernel(self, inputs: Sequence[Tensor], output: Tensor) -> None:
        self.num_operations += 1
        if self._are_constant(inputs):
            self._mark_constant([output], inputs)

    def _are_constant(self, used: Sequence[Tensor]) -> bool:
        return not self.has_read_varying and all(map(self.is_constant, used))

    def _mark_constant(self, made: Sequence[Tensor], used: Sequence[Tensor]) -> None:
        # New memory may lie where something else lay before.
        self._written -= {*map(_storage, made)} - {*map(_storage, used)}
        for each in made:
            self._constant[each] = True


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_arbitrary(func: Any) -> bool:
    """Whether the operation draws random numbers, or leaves memory as it is."""
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return is_random or "empty" in str(func._schema.name)


def _targets(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Tensors that the operation writes to."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]


def result_tensors(value: Any) -> list[Tensor] | None:
    """Tensors of a module's result, if that is a tensor or a tuple of tensors; else None."""
    items = value if type(value) is tuple else (value,)
    return list(items) if items and all(isinstance(each, Tensor) for each in items) else None


def find_constant_modules(call: ModuleCall) -> tuple[Any, tuple[ConstantModule, ...]]:
    """The result of a model's call, and what was constant in it.

    Of modules inside each other the outermost is listed. The result has the bits of any other call.
    """
    model = call.module
    names = list(inspect.signature(model.forward).parameters)
    by_name = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    varying = VARYING | {*names[:1]}
    constants = _tensors([value for name, value in by_name.items() if name not in varying])
    mode = _Dependencies([*model.parameters(), *model.buffers(), *constants])
    found: dict[str, set[int]] = {}
    others: set[str] = set()
    with _watch_calls(model, mode, found, others), mode:
        result = call.compute()
    for name in others:
        found.pop(name, None)
    outermost = [each for each in found if not any(outer in found for outer in _outer(each))]
    return result, tuple(ConstantModule(each, frozenset(found[each])) for each in outermost)


def _outer(name: str) -> Iterator[str]:
    """Names of the modules around a module."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


@contextmanager
def _watch_calls(
    model: nn.Module, mode: _Dependencies, found: dict[str, set[int]], others: set[str]
) -> Iterator[None]:
    """Context: note each submodule that is called, in `found` if its results are constant."""
    begun: list[tuple[str, int, set[int]]] = []

    def entering(name: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            leaves = enumerate(pytree.tree_leaves((args, kwargs)))
            varying = {
                number
                for number, each in leaves
                if isinstance(each, Tensor) and not mode.is_constant(each)
            }
            begun.append((name, mode.num_operations, varying))

        return enter

    def leave(_: nn.Module, args: Any, result: Any) -> None:
        name, num_operations, varying = begun.pop()
        tensors = result_tensors(result)
        does_nothing = mode.num_operations == num_operations
        if does_nothing or tensors is None or not all(map(mode.is_constant, tensors)):
            others.add(name)
        else:
            found.setdefault(name, set()).update(varying)

    def begin(*_: object) -> None:
        mode.has_read_varying = False  # a hook that looks at the timestep changes no result

    handles = [model.register_forward_pre_hook(begin)]
    for name, module in model.named_modules():
        if name:
            before = module.register_forward_pre_hook(
                entering(name), prepend=True, with_kwargs=True
            )
            handles += [before, module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
