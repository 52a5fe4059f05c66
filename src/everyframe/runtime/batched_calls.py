"""Batch the calls of one module for several videos, without changing any bit.

Most operations compute each row independently, so several videos can share one tensor. Matrix
products and convolutions don't: the number of rows selects their kernel and summation order. They
run video by video inside the batched call, as does cross-attention, because texts differ in length.
Batching saves the rest: launches, norms, activations, self-attention.

`everyframe.engine.batched_runs` decides which calls are batched, and checks the bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from everyframe.ops.call_override import ModuleCall, override_call
from everyframe.ops.text_context import KeysValues, TextContext
from everyframe.parallel.sharded_modules import CrossAttentionPerSample

#: Modules whose kernels depend on the number of rows.
_PRODUCTS = (nn.Linear, _ConvNd)


class UnequalCallsError(Exception):
    """Two calls differ in more than the values of their tensors."""


def signature_of(call: ModuleCall) -> Hashable:
    """Signature that calls have in common if they can be computed as one."""
    return id(call.module), _signature(call.args), _signature(call.kwargs)


def can_batch(call: ModuleCall) -> bool:
    """Whether the call has what tells its rows: a tensor in the first place."""
    return bool(call.args) and isinstance(call.args[0], Tensor) and call.args[0].ndim > 0


def _signature(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.dtype, value.device, tuple(value.shape)
    if isinstance(value, TextContext):
        # Texts may differ in length; each is attended to separately.
        kinds = (value.batch_size, value.blocks[0].keys.dtype, value.blocks[0].keys.device)
        return "text", kinds, len(value.blocks)
    if isinstance(value, Mapping):
        return tuple((name, _signature(each)) for name, each in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_signature, value))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(_signature(getattr(value, each.name)) for each in fields(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return type(value), value
    return id(value)


class BatchedModule:
    """A module whose products are computed video by video while several are in one call.

    A context: it replaces calls of submodules until it ends.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._num_videos = 1
        # Texts of the videos in the call, and the number of the block that attends to them next.
        self._texts: tuple[TextContext, ...] = ()
        self._block = 0
        # Input shapes in calls of one video, by number of rows: an input this many times as large
        # in a batched call belongs to all videos.
        self._shapes: dict[tuple[int, int], set[tuple[int, ...]]] = {}
        self._batch = 0
        self._stack = ExitStack()

    def __enter__(self) -> BatchedModule:
        with ExitStack() as stack:
            stack.callback(self._module.register_forward_pre_hook(self._note_rows).remove)
            for part in self._module.modules():
                if part is self._module:
                    continue  # its own call is the one that meets others
                if isinstance(part, _PRODUCTS):
                    stack.enter_context(override_call(part, self._product))
                elif isinstance(part, CrossAttentionPerSample):
                    stack.enter_context(override_call(part, self._cross_attention))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def compute(self, calls: Sequence[ModuleCall]) -> list[Any]:
        """Results of calls of one signature, made as one call.

        Each of them, or one of the same sizes, has been made alone before.

        Raises:
            UnequalCallsError: a tensor that is shared by all rows differs.
        """
        batch, count = int(calls[0].args[0].shape[0]), len(calls)
        texts: list[tuple[TextContext, ...]] = []
        args = _join([call.args for call in calls], batch, texts)
        kwargs = _join([call.kwargs for call in calls], batch, texts)
        self._texts, self._block = texts[0] if texts else (), 0
        self._num_videos, self._batch = count, batch
        try:
            result = ModuleCall(self._module, calls[0].base, args, kwargs).compute()
            if self._texts and self._block != len(self._texts[0].blocks):
                raise UnequalCallsError("its attention to texts can't be computed video by video")
        finally:
            self._num_videos, self._texts = 1, ()
        return [_rows(result, number, count, batch) for number in range(count)]

    def _note_rows(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._num_videos == 1 and args and isinstance(args[0], Tensor) and args[0].ndim:
            self._batch = int(args[0].shape[0])

    def _product(self, call: ModuleCall) -> Any:
        x, *others = call.args
        known = self._shapes.setdefault((id(call.module), self._batch), set())
        if self._num_videos == 1:
            known.add(tuple(x.shape))
            return call.compute()
        dim = _video_dim(tuple(x.shape), known, self._num_videos)
        if dim is None:
            return call.compute()
        pieces = x.chunk(self._num_videos, dim)
        return torch.cat([replace(call, args=(each, *others)).compute() for each in pieces], dim)

    def _cross_attention(self, call: ModuleCall) -> Any:
        if not self._texts:
            return call.compute()
        number, self._block = self._block, self._block + 1
        made = [
            # Its own tensors, not slices of the batch's: bits depend on memory layout.
            replace(call, args=(q, *text.blocks[number], text.mask)).compute()
            for q, text in zip(call.args[0].chunk(self._num_videos), self._texts, strict=True)
        ]
        return torch.cat(made)


def _video_dim(shape: tuple[int, ...], known: set[tuple[int, ...]], num_videos: int) -> int | None:
    """The dimension along which the videos lie; None for a tensor that is not of several."""
    if shape in known:
        return None
    for dim, size in enumerate(shape):
        if size % num_videos == 0:
            alone = (*shape[:dim], size // num_videos, *shape[dim + 1 :])
            if alone in known:
                return dim
    return None


def _join(values: Sequence[Any], batch: int, texts: list[tuple[TextContext, ...]]) -> Any:
    """One value for all calls: rows one after the other, and what all share."""
    first = values[0]
    if isinstance(first, TextContext):
        texts.append(tuple(values))
        return _join_texts(values)
    if isinstance(first, Tensor):
        if first.ndim and first.shape[0] == batch:
            return torch.cat(list(values))
        if all(torch.equal(first, each) for each in values[1:]):
            return first
        raise UnequalCallsError("a tensor without rows differs from video to video")
    if isinstance(first, Mapping):
        return {name: _join([each[name] for each in values], batch, texts) for name in first}
    if isinstance(first, (tuple, list)):
        made = [_join(each, batch, texts) for each in zip(*values, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    if is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in fields(first)]
        parts = ([getattr(each, name) for each in values] for name in names)
        return type(first)(*(_join(part, batch, texts) for part in parts))
    return first


def _join_texts(texts: Sequence[TextContext]) -> TextContext:
    """The texts below each other, as long as the longest; where it matters each is cut again."""
    length = max(text.blocks[0].keys.shape[2] for text in texts)
    blocks = tuple(
        KeysValues(
            torch.cat([_pad(each.keys, 2, length) for each in parts]),
            torch.cat([_pad(each.values, 2, length) for each in parts]),
        )
        for parts in zip(*(text.blocks for text in texts), strict=True)
    )
    if all(text.mask is None for text in texts):
        return TextContext(blocks, None)
    masks = []
    for text in texts:
        keys = text.blocks[0].keys
        full = keys.new_ones((keys.shape[0], 1, 1, keys.shape[2]), dtype=torch.bool)
        masks.append(_pad(full if text.mask is None else text.mask, 3, length))
    return TextContext(blocks, torch.cat(masks))


def _pad(x: Tensor, dim: int, length: int) -> Tensor:
    missing = length - x.shape[dim]
    if not missing:
        return x
    shape = [*x.shape]
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def _rows(result: Any, number: int, count: int, batch: int) -> Any:
    """What is one video's of a result."""
    if isinstance(result, Tensor):
        if result.ndim and result.shape[0] == count * batch:
            return result[number * batch : (number + 1) * batch]
        raise UnequalCallsError("a result does not have the rows of its videos")
    if isinstance(result, (tuple, list)):
        made = [_rows(each, number, count, batch) for each in result]
        return type(result)(*made) if hasattr(result, "_fields") else type(result)(made)
    raise UnequalCallsError(f"a result is a {type(result).__name__}")


def have_equal_bits(a: Any, b: Any) -> bool:
    """Whether two results are the same, bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and bool(torch.equal(a, b))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(have_equal_bits, a, b))
    return a is b
