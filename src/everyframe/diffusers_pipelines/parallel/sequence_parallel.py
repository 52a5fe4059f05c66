"""Sequence parallelism for diffusers transformers, applied from outside; classes stay unchanged.

Each rank holds some tokens of every sample through all blocks; shares may be uneven. In full
self-attention torch's `scaled_dot_product_attention` is intercepted: ranks exchange tokens and
compute it by heads (`everyframe.parallel.ulysses`) or in a ring
(`everyframe.parallel.ring_attention`). That function is the same in every class; the attention
processors around it are not. Only the output of the last projection is gathered. Every rank
computes the layers around the blocks (text, timestep, patches) itself. Samples of a batch count as
heads, so every rank has the same tokens of all of them. Nothing is padded. `token_splits.py` is the
table of split points per class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.core.errors import CannotRunError
from everyframe.diffusers_pipelines.inputs.defaults import denoisers
from everyframe.diffusers_pipelines.parallel.token_splits import (
    CUTS,
    TokenSplit,
    TransformerSplit,
    stream_partition,
)
from everyframe.ops.attention_override import AttentionOverride
from everyframe.parallel.communicator import Communicator, ParallelContext
from everyframe.parallel.sharded_modules import SequenceParallelAttention, sequence_attention
from everyframe.parallel.uneven_split import uneven_ranges, uneven_sizes
from everyframe.runtime.model_sharding import ModelPatch

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
_Key = tuple[Communicator, tuple[tuple[int, ...], ...], int]


def apply(
    model: nn.Module, group: Communicator, backend: str = "ulysses"
) -> SequenceParallelTransformer:
    """Split a transformer of `CUTS` across the ranks of `group`.

    All ranks must call it in the same order with the same input. `backend` is one of
    `everyframe.parallel.head_partition.SEQUENCE_BACKENDS`.
    """
    return SequenceParallelTransformer(model, CUTS[type(model).__name__], group, backend)


def apply_to_all(
    modules: Mapping[str, nn.Module], parallel: ParallelContext
) -> dict[str, SequenceParallelTransformer]:
    """Split the denoisers among these components; returns the patches by name, none for one rank.

    Ranks that compute the same guidance branches share tokens.
    """
    if parallel.denoiser_group.size == 1:
        return {}
    return {
        name: apply(modules[name], parallel.denoiser_group, parallel.sequence_backend)
        for name in denoisers(modules)
    }


class SequenceParallelTransformer(ModelPatch):
    """The patch that `apply` adds to a transformer; `remove` removes it."""

    def __init__(
        self, model: nn.Module, cuts: TransformerSplit, group: Communicator, backend: str
    ) -> None:
        super().__init__(group, 1)
        self._backend = backend
        self._attentions: dict[_Key, SequenceParallelAttention] = {}
        #: Tokens per rank of each stream that was split so far in this call.
        self._streams: list[tuple[int, ...]] = []
        self._entered: list[tuple[nn.Module, AttentionOverride, ExitStack]] = []
        before: list[tuple[nn.Module, Callable[..., Any]]] = [(model, self._begin)]
        for cut in (*cuts.beside, *cuts.tokens):
            place = partial(self._cut, cut, cut in cuts.tokens)
            before.append((model.get_submodule(cut.module), place))
        # All other hooks see this rank's tokens. Of prepended ones the last comes first.
        for module, hook in reversed(before):
            self._handles.append(
                module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
            )
        for name, dim in cuts.tables:
            table = partial(self._cut_table, dim)
            self._handles.append(model.get_submodule(name).register_forward_hook(table))
        for name, module in model.named_modules():
            if any(fnmatchcase(name, each) for each in cuts.attention):
                self._answer_in(module, name)
        gather = partial(self._gather, cuts.video)
        self._handles.append(model.get_submodule(cuts.last).register_forward_hook(gather))

    def _begin(self, model: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        self._streams.clear()

    def _cut(
        self, cut: TokenSplit, is_stream: bool, module: nn.Module, args: _Args, kwargs: _Kwargs
    ) -> tuple[_Args, _Kwargs]:
        """The call with this rank's tokens of that argument."""

        def part(value: Any) -> Any:
            if is_stream:
                self._streams.append(uneven_sizes(value.shape[cut.dim], self.group.weights))
            return self._part(value, cut.dim)

        if cut.argument in kwargs:
            return args, {**kwargs, cut.argument: part(kwargs[cut.argument])}
        number = list(inspect.signature(module.forward).parameters).index(cut.argument)
        if number < len(args):
            args = (*args[:number], part(args[number]), *args[number + 1 :])
        return args, kwargs

    def _cut_table(self, dim: int, module: nn.Module, args: _Args, tables: Any) -> Any:
        return self._part(tables, dim)

    def _part(self, value: Any, dim: int) -> Any:
        """This rank's share of tensors with tokens along `dim`.

        Tensors without that dim, or of length 1, stay whole. A rank without tokens gets one
        placeholder token, which is neither attended to nor gathered: foreign modules may not accept
        empty tensors.
        """
        if isinstance(value, (tuple, list)):
            return tuple(self._part(each, dim) for each in value)
        if not isinstance(value, Tensor) or value.ndim <= dim or value.shape[dim] == 1:
            return value
        mine = uneven_ranges(value.shape[dim], self.group.weights)[self.group.rank]
        return value.narrow(dim, mine.start, len(mine)) if mine else value.narrow(dim, 0, 1)

    def _answer_in(self, module: nn.Module, name: str) -> None:
        """Intercept torch's attention during calls of that module."""

        def enter(module: nn.Module, args: _Args) -> None:
            within, asked = ExitStack(), AttentionOverride(self._together)
            within.enter_context(asked)
            self._entered.append((module, asked, within))

        def leave(module: nn.Module, args: _Args, result: Any) -> None:
            # A call that ended in somebody's hook before ours was never entered.
            if not self._entered or self._entered[-1][0] is not module:
                return
            _, asked, within = self._entered.pop()
            within.close()
            if result is not None and not asked.num_times:
                raise CannotRunError(
                    f"{name} computes its attention by another function than torch's, so devices "
                    "can't share it; unset DIFFUSERS_ATTN_BACKEND, or give one device"
                )

        self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _together(
        self,
        compute: Callable[..., Tensor],
        q_BHnD: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        **how: Any,
    ) -> Tensor:
        """Attention of this rank's tokens to all tokens; a mask covers all, stream by stream."""
        unknown = [name for name, value in how.items() if value]
        if unknown:
            raise CannotRunError(
                f"attention of all tokens with {' and '.join(unknown)} can't be shared by devices "
                "here; give one device"
            )
        mine = _Mine([each[self.group.rank] for each in self._streams])
        batch, heads, length, _ = q_BHnD.shape
        assert length == mine.length, "tokens that were not cut"

        def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            if 0 in q.shape:  # which not every kernel takes
                return v.new_empty(q.shape)
            return compute(q, k, v, mask)

        q_BHnD, k, v = (mine.taken(x.flatten(0, 1)[None]) for x in (q_BHnD, k, v))
        mask = None if attn_mask is None else self._reorder_mask(attn_mask, batch, heads)
        out = mine.put_back(self._now(batch * heads).attend(core, q_BHnD, k, v, mask))
        return torch.unflatten(out[0], 0, (batch, heads))

    def _now(self, heads: int) -> SequenceParallelAttention:
        """The parallel attention for the current token split, cached."""
        key = (self.group, tuple(self._streams), heads)
        if key not in self._attentions:
            partition = stream_partition(self._streams, heads, self.group.weights)
            self._attentions[key] = sequence_attention(self._backend, partition, self.group)
        return self._attentions[key]

    def _reorder_mask(self, mask_BHQL: Tensor, batch: int, heads: int) -> Tensor:
        """Reorder a mask of one sample, all heads (1, B * H, Q, L), to the ranks' token order."""
        starts = [0, *accumulate(sum(each) for each in self._streams)]
        parts = [uneven_ranges(sum(each), self.group.weights) for each in self._streams]
        order = [
            start + place
            for rank in range(self.group.size)
            for start, kind in zip(starts, parts, strict=False)
            for place in kind[rank]
        ]
        assert mask_BHQL.shape[2] == 1
        mask = mask_BHQL.expand(batch, heads, -1, -1).flatten(0, 1)[None]
        return mask.index_select(3, torch.tensor(order, device=mask.device))

    def _gather(self, video: int, layer: nn.Module, args: _Args, out_BnC: Tensor) -> Tensor:
        if self.group.size == 1:
            return out_BnC
        lengths = self._streams[video]
        rows = out_BnC[:, : lengths[self.group.rank]].transpose(0, 1).contiguous()
        every = self.group.gather(rows, lengths, "the last projection is gathered")
        return every.transpose(0, 1).contiguous()


class _Mine:
    """Tokens (b, heads, n, D) of one rank, stream after stream; an empty stream has a placeholder.

    `lengths` are the token counts of each stream.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        starts = accumulate((max(1, length) for length in lengths), initial=0)
        *begins, self.length = starts
        self._is_whole = all(lengths)
        self._here = [
            slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)
        ]

    def taken(self, x: Tensor) -> Tensor:
        """The real tokens."""
        return x if self._is_whole else torch.cat([x[:, :, here] for here in self._here], 2)

    def put_back(self, answer: Tensor) -> Tensor:
        """Inverse of `taken`, with zeros for placeholders."""
        if self._is_whole:
            return answer
        out = answer.new_zeros(*answer.shape[:2], self.length, answer.shape[3])
        lengths = [here.stop - here.start for here in self._here]
        for here, part in zip(self._here, torch.split(answer, lengths, 2), strict=True):
            out[:, :, here] = part
        return out
