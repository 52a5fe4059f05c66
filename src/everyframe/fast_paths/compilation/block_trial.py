"""Try compiled code of a block on the inputs of a real call, against the block as written.

The same comparison as that of every fast path (`benchmark`): the error against the block in float32
first, then the time. It is made in this process: a package is code of torch's own compiler, and the
call has its inputs here. `trials` does it with made-up inputs, in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.fast_paths.benchmark import Comparison, OutOfTimeError, run_comparisons
from everyframe.fast_paths.certificates import Verdict, judge
from everyframe.fast_paths.compilation.block_state import copy_with, describe, flatten
from everyframe.precision.cast_hooks import map_tensors

#: Seconds for all rounds.
_SECONDS = 120.0

#: Allowed error against the block in its own precision, where it can't be computed in float32.
_ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 4e-3}

Given = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """Verdict with its reason, the error and its limit, and the block's time over the code's."""

    verdict: Verdict
    reason: str
    error: float
    limit: float
    gain: float


def try_block(
    block: nn.Module, given: Given, fast: Callable[..., Any], device: torch.device
) -> Outcome:
    """Compare ``fast(*args, **kwargs)`` with the block's `forward`."""
    clones = _writes_to_its_arguments(block, given)
    plain = partial(_run, block.forward, given, clones=clones)
    truth, allowed = _in_float32(block, given), None
    if truth is None:
        dtypes = {each.dtype for each in block.parameters()}
        truth, allowed = plain, max((_ALLOWED.get(each, 1e-5) for each in dtypes), default=1e-5)
    comparison = Comparison(
        "its first call", truth=truth, plain=plain, fast=partial(_run, fast, given, clones=clones),
        allowed=allowed,
    )  # fmt: skip
    try:
        found = run_comparisons([comparison], str(device), time.monotonic() + _SECONDS)
    except OutOfTimeError:
        return Outcome("refused", "there was no time to try it", 0.0, 0.0, 0.0)
    verdict, reason = judge(found.error, found.limit, found.gain)
    return Outcome(verdict, reason, found.error, found.limit, found.gain)


def changes_state(block: nn.Module, given: Given) -> bool:
    """Whether the block's call changes attributes, or lists and mappings that it is given.

    As causal convolutions that leave frames there for the next call. Compiled code would not.
    """
    block, given = copy_with(block, Tensor.clone), map_tensors(given, Tensor.clone)
    held: list[Tensor] = []  # so that no other tensor gets the id of one that was there

    def state() -> Any:
        tensors: list[Tensor] = []
        structure = flatten(given, tensors)
        held.extend(tensors)
        return describe(block).key, structure, [*map(id, tensors)]

    before = state()
    block.forward(*given[0], **given[1])
    is_changed: bool = state() != before
    return is_changed


def _run(call: Callable[..., Any], given: Given, *, clones: bool) -> Any:
    args, kwargs = map_tensors(given, Tensor.clone) if clones else given
    return call(*args, **kwargs)


def _writes_to_its_arguments(block: nn.Module, given: Given) -> bool:
    mine: list[Tensor] = []
    before: list[Tensor] = []
    args, kwargs = map_tensors(given, Tensor.clone)
    flatten(given, before)
    flatten((args, kwargs), mine)
    block.forward(*args, **kwargs)
    return not all(map(torch.equal, before, mine))


def _in_float32(block: nn.Module, given: Given) -> Callable[[], Any] | None:
    """The block's call in float32; None if it can't be computed so."""

    def widened(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() else tensor

    wide = copy_with(block, widened)
    truth = partial(_run, wide.forward, map_tensors(given, widened), clones=True)
    try:
        truth()
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    return truth


def call_with_hooks(
    block: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What `nn.Module` does around `forward`, around `call`: the block's own hooks."""
    called: set[int] = set()
    result = None
    try:
        for number, hook in tuple(block._forward_pre_hooks.items()):
            if number in block._forward_pre_hooks_with_kwargs:
                args, kwargs = hook(block, args, kwargs) or (args, kwargs)
            else:
                changed = hook(block, args)
                if changed is not None:
                    args = changed if isinstance(changed, tuple) else (changed,)
        result = call(args, kwargs)
        for number, hook in tuple(block._forward_hooks.items()):
            called.add(number)
            result = _after(block, number, hook, args, kwargs, result)
        return result
    except Exception:
        # Those that clean up are called whatever happens.
        for number, hook in tuple(block._forward_hooks.items()):
            if number in block._forward_hooks_always_called and number not in called:
                _after(block, number, hook, args, kwargs, result)
        raise


def _after(block: nn.Module, number: int, hook: Any, args: Any, kwargs: Any, result: Any) -> Any:
    if number in block._forward_hooks_with_kwargs:
        changed = hook(block, args, kwargs, result)
    else:
        changed = hook(block, args, result)
    return result if changed is None else changed
