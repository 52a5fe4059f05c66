"""Compute once what no step of a video changes: the prompt's keys and values, tables of positions.

`CachedConstants` is put around one model for one video. Its first call shows which modules have
constant results (`constant_modules`); their results are stored in later calls and served where
their inputs are bit for bit the stored ones and their weights and hooks are the same. So a changed
prompt, a LoRA that is merged or a repair is never answered with an old result. It is for CPUs:
inputs that are other tensors than before have to be compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from everyframe.fast_paths.modules.constant_modules import (
    ConstantModule,
    find_constant_modules,
    result_tensors,
)
from everyframe.fast_paths.modules.fast_modules import state_key
from everyframe.fast_paths.path_sizes import constant_bytes
from everyframe.numerics.tensor_stats import value_range
from everyframe.ops.call_override import ModuleCall, override_call

#: Most stored results of a module: one for each guidance branch, and some to spare. A module that
#: needs more is computed from then on.
MOST_RESULTS = 4

#: Integers of each size in bytes, to compare bits.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


#: Name of the fast path.
PATH = "cached-constants"


def can_cache(model: nn.Module) -> bool:
    """Whether it is a denoiser of diffusers; our own families have their contexts."""
    if not type(model).__module__.startswith("diffusers."):
        return False
    return {"timestep", "encoder_hidden_states"} <= inspect.signature(
        model.forward
    ).parameters.keys()


@dataclass
class _Memory:
    """Bytes left for stored results."""

    left: int


class _Stored:
    """A tensor as it was: itself while its version counter stands still, else a copy of its bits.

    Tensors of inference mode have no such counter.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = _copy(tensor) if tensor.is_inference() else tensor
        self._version = self.tensor._version

    @property
    def is_intact(self) -> bool:
        """Whether nothing was written to it since."""
        return self.tensor._version == self._version

    def equals(self, other: Tensor) -> bool:
        """Whether the other has the same bits."""
        return self.is_intact and (other is self.tensor or _is_same(other, self.tensor))


def _copy(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone(memory_format=torch.preserve_format)


def _form(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _is_same(one: Tensor, other: Tensor) -> bool:
    if _form(one) != _form(other) or one.element_size() not in _BITS:
        return False
    bits = _BITS[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))


@dataclass(frozen=True)
class _Result:
    """A stored result with what it was computed from.

    Attributes:
        form: everything of the arguments that is no tensor, and the form of each tensor.
        inputs: the arguments' constant tensors.
        state: the module's weights and hooks; `weights` keeps their memory from being used again.
        result: as it was returned.
        outputs: its tensors.
        is_confirmed: whether it may be served; else it has to be computed once more, as its
            arguments' varying tensors were different ones.
    """

    form: Hashable
    inputs: tuple[_Stored, ...]
    state: Hashable
    weights: tuple[Tensor, ...]
    result: Any
    outputs: tuple[_Stored, ...]
    is_confirmed: bool

    def fits(self, form: Hashable, inputs: list[Tensor], state: Hashable) -> bool:
        """Whether a call with these arguments has this result."""
        return (
            self.form == form
            and self.state == state
            and all(map(_Stored.equals, self.inputs, inputs))
            and all(each.is_intact for each in self.outputs)
        )


class _CachedModule:
    """Stored results of one module."""

    def __init__(self, found: ConstantModule, memory: _Memory) -> None:
        self._varying, self._memory = found.varying, memory
        self._results: list[_Result] = []
        self._is_given_up = False

    def answer(self, call: ModuleCall) -> Any:
        """The stored result of this call, or the computed one, which is stored."""
        module = call.module
        leaves, tree = pytree.tree_flatten((call.args, call.kwargs))
        form = _form_of(leaves, tree)
        if self._is_given_up or form is None:
            return call.compute()
        constant = [
            each
            for number, each in enumerate(leaves)
            if isinstance(each, Tensor) and number not in self._varying
        ]
        state = tuple(state_key(module))
        found = next((each for each in self._results if each.fits(form, constant, state)), None)
        if found is not None and found.is_confirmed:
            return found.result
        result = call.compute()
        tensors = result_tensors(result)
        if tensors is None or not value_range(tensors).is_finite:
            return result  # what is not finite has to be seen where it arises
        if found is not None:
            self._results.remove(found)
            is_equal = all(map(_Stored.equals, found.outputs, tensors))
            self._is_given_up = not is_equal
        if not self._is_given_up:
            weights = tuple(each.detach() for each in (*module.parameters(), *module.buffers()))
            self._store(form, constant, state, weights, result, is_confirmed=found is not None)
        return result

    def _store(
        self,
        form: Hashable,
        inputs: list[Tensor],
        state: Hashable,
        weights: tuple[Tensor, ...],
        result: Any,
        *,
        is_confirmed: bool,
    ) -> None:
        size = sum(each.nbytes for each in result_tensors(result) or ())
        if len(self._results) == MOST_RESULTS or size > self._memory.left:
            self._is_given_up = True
            self._results.clear()
            return
        self._memory.left -= size
        copied = tuple(map(_copy, result)) if isinstance(result, tuple) else _copy(result)
        outputs = tuple(map(_Stored, result_tensors(copied) or ()))
        stored = tuple(map(_Stored, inputs))
        confirmed = is_confirmed or not self._varying
        self._results.append(_Result(form, stored, state, weights, copied, outputs, confirmed))


def _form_of(leaves: list[Any], tree: Any) -> Hashable | None:
    """What arguments are beside the values of their tensors; None if that can't be compared."""
    plain = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
    if not all(isinstance(each, (Tensor, *plain)) for each in leaves):
        return None
    forms = (
        _form(each) if isinstance(each, Tensor) else (type(each), repr(each)) for each in leaves
    )
    return str(tree), tuple(forms)


class CachedConstants:
    """Context: constant results of a model's modules are computed once.

    Args:
        model: the model; the first call of it is followed, which finds the modules.
        is_paused: whether a call now is none of the video's own, and is computed plainly.
        modules: the modules, where they are known.
    """

    def __init__(
        self,
        model: nn.Module,
        is_paused: Callable[[], bool] = lambda: False,
        modules: tuple[ConstantModule, ...] | None = None,
    ) -> None:
        self._model, self._is_paused, self.modules = model, is_paused, modules
        weights = sum(each.nbytes for each in model.parameters())
        self._memory = _Memory(constant_bytes(weights))
        self._on = ExitStack()

    def __enter__(self) -> CachedConstants:
        if self.modules is None:
            self._on.enter_context(override_call(self._model, self._answer_call))
        else:
            self._cache(self.modules)
        return self

    def __exit__(self, *_: object) -> None:
        self._on.close()

    def _answer_call(self, call: ModuleCall) -> Any:
        if self.modules is not None or self._is_paused():
            return call.compute()
        result, self.modules = find_constant_modules(call)
        self._cache(self.modules)
        return result

    def _cache(self, modules: tuple[ConstantModule, ...]) -> None:
        for each in modules:
            cached = _CachedModule(each, self._memory)
            module = self._model.get_submodule(each.name)
            self._on.enter_context(override_call(module, partial(self._serve, cached)))

    def _serve(self, cached: _CachedModule, call: ModuleCall) -> Any:
        return call.compute() if self._is_paused() else cached.answer(call)
