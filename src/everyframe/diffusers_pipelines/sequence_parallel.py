"""A transformer of diffusers on several ranks, put on from outside; the class is left as it is.

Each rank holds some tokens of every sample through all blocks, in uneven parts. In attention of
all tokens to all, torch's function is asked for those of this rank; what it gets in its place are
answers for which ranks have met, by heads (`everyframe.parallel.ulysses`) or in a ring
(`everyframe.parallel.ring_attention`). That function, and not the processor around it, is the same
in every class. Of the result the last projection alone is gathered; what is around the blocks
(text, timestep, patches) every rank computes for itself. The samples of a batch count as heads, so
every rank has the same tokens of all of them. Nothing is padded.

Where a class is cut is data: `token_splits.py`. Read next: `everyframe.runtime.model_sharding`,
`stage.py`.
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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from everyframe.core.errors import CannotRunError
from everyframe.diffusers_pipelines.defaults import denoisers
from everyframe.diffusers_pipelines.token_splits import CUTS, TokenSplit, TransformerSplit, dealt
from everyframe.parallel.communicator import Communicator, ParallelContext
from everyframe.parallel.sharded_modules import SequenceParallelAttention, attending
from everyframe.parallel.uneven_split import uneven_ranges, uneven_sizes
from everyframe.runtime.model_sharding import ModelPatch

#: The parameters of torch's attention, which has no signature to be asked for them.
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale",
               "enable_gqa")  # fmt: skip

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
_Key = tuple[Communicator, tuple[tuple[int, ...], ...], int]


def apply(
    model: nn.Module, team: Communicator, way: str = "ulysses"
) -> SequenceParallelTransformer:
    """Put a transformer of `CUTS` on the ranks of `team`; each must call it in the same order with
    the same input. `way` is one of `everyframe.parallel.head_partition.ATTENDING`."""
    return SequenceParallelTransformer(model, CUTS[type(model).__name__], team, way)


def apply_to_all(
    modules: Mapping[str, nn.Module], teams: ParallelContext
) -> dict[str, SequenceParallelTransformer]:
    """What is put on the denoisers among these components, by name; nothing for one rank.

    Those share tokens that have the same branches of guidance.
    """
    if teams.sharing.size == 1:
        return {}
    return {name: apply(modules[name], teams.sharing, teams.way) for name in denoisers(modules)}


class SequenceParallelTransformer(ModelPatch):
    """What `apply` has put on a transformer; `remove` takes it off."""

    def __init__(
        self, model: nn.Module, cuts: TransformerSplit, team: Communicator, way: str
    ) -> None:
        super().__init__(team, 1)
        self._way = way
        self._attending: dict[_Key, SequenceParallelAttention] = {}
        #: How many tokens of each kind the ranks hold, as far as they were cut in this call.
        self._streams: list[tuple[int, ...]] = []
        self._entered: list[tuple[nn.Module, _Asked, ExitStack]] = []
        self._handles.append(model.register_forward_pre_hook(self._begin))
        for cut in (*cuts.beside, *cuts.tokens):
            place = partial(self._cut, cut, cut in cuts.tokens)
            module = model.get_submodule(cut.module)
            self._handles.append(module.register_forward_pre_hook(place, with_kwargs=True))
        for name, dim in cuts.tables:
            table = partial(self._cut_table, dim)
            self._handles.append(model.get_submodule(name).register_forward_hook(table))
        for name, module in model.named_modules():
            if any(fnmatchcase(name, each) for each in cuts.attention):
                self._answer_in(module, name)
        gather = partial(self._gather, cuts.video)
        self._handles.append(model.get_submodule(cuts.last).register_forward_hook(gather))

    def _begin(self, model: nn.Module, args: _Args) -> None:
        self._streams.clear()

    def _cut(
        self, cut: TokenSplit, is_stream: bool, module: nn.Module, args: _Args, kwargs: _Kwargs
    ) -> tuple[_Args, _Kwargs]:
        """The call with this rank's tokens of that argument."""

        def part(value: Any) -> Any:
            if is_stream:
                self._streams.append(uneven_sizes(value.shape[cut.dim], self.team.weights))
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
        """This rank's part of tensors with tokens along `dim`; what has none is for all of them.

        A rank without tokens has one in their place, which nobody looks at and nobody gathers: a
        module that somebody else wrote may not take none.
        """
        if isinstance(value, (tuple, list)):
            return tuple(self._part(each, dim) for each in value)
        if not isinstance(value, Tensor) or value.ndim <= dim or value.shape[dim] == 1:
            return value
        mine = uneven_ranges(value.shape[dim], self.team.weights)[self.team.rank]
        return value.narrow(dim, mine.start, len(mine)) if mine else value.narrow(dim, 0, 1)

    def _answer_in(self, module: nn.Module, name: str) -> None:
        """Answer in the place of torch's attention whenever that module is called."""

        def enter(module: nn.Module, args: _Args) -> None:
            within, asked = ExitStack(), _Asked(self._together)
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
        """Answers to this rank's tokens among all tokens; a mask is of all, kind by kind."""
        unknown = [name for name, value in how.items() if value]
        if unknown:
            raise CannotRunError(
                f"attention of all tokens with {' and '.join(unknown)} can't be shared by devices "
                "here; give one device"
            )
        mine = _Mine([each[self.team.rank] for each in self._streams])
        batch, heads, length, _ = q_BHnD.shape
        assert length == mine.length, "tokens that were not cut"

        def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            if 0 in q.shape:  # which not every kernel takes
                return v.new_empty(q.shape)
            return compute(q, k, v, mask)

        q_BHnD, k, v = (mine.taken(x.flatten(0, 1)[None]) for x in (q_BHnD, k, v))
        mask = None if attn_mask is None else self._arranged(attn_mask, batch, heads)
        out = mine.put_back(self._now(batch * heads).attend(core, q_BHnD, k, v, mask))
        return torch.unflatten(out[0], 0, (batch, heads))

    def _now(self, heads: int) -> SequenceParallelAttention:
        """That of the tokens which are cut now."""
        key = (self.team, tuple(self._streams), heads)
        if key not in self._attending:
            deal = dealt(self._streams, heads, self.team.weights)
            self._attending[key] = attending(self._way, deal, self.team)
        return self._attending[key]

    def _arranged(self, mask_BHQL: Tensor, batch: int, heads: int) -> Tensor:
        """A mask of one sample of all heads (1, B * H, Q, L), in the order in which ranks have
        their tokens."""
        starts = [0, *accumulate(sum(each) for each in self._streams)]
        parts = [uneven_ranges(sum(each), self.team.weights) for each in self._streams]
        order = [
            start + place
            for rank in range(self.team.size)
            for start, kind in zip(starts, parts, strict=False)
            for place in kind[rank]
        ]
        assert mask_BHQL.shape[2] == 1
        mask = mask_BHQL.expand(batch, heads, -1, -1).flatten(0, 1)[None]
        return mask.index_select(3, torch.tensor(order, device=mask.device))

    def _gather(self, video: int, layer: nn.Module, args: _Args, out_BnC: Tensor) -> Tensor:
        if self.team.size == 1:
            return out_BnC
        lengths = self._streams[video]
        rows = out_BnC[:, : lengths[self.team.rank]].transpose(0, 1).contiguous()
        every = self.team.gather(rows, lengths, "the last projection is gathered")
        return every.transpose(0, 1).contiguous()


class _Mine:
    """Tokens (b, heads, n, D) of one rank, kind beside kind; of a kind without any, one stands in.

    `lengths` are how many there are of each kind.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        starts = accumulate((max(1, length) for length in lengths), initial=0)
        *begins, self.length = starts
        self._is_whole = all(lengths)
        self._here = [
            slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)
        ]

    def taken(self, x: Tensor) -> Tensor:
        """Those that count."""
        return x if self._is_whole else torch.cat([x[:, :, here] for here in self._here], 2)

    def put_back(self, answer: Tensor) -> Tensor:
        """What `taken` undoes, with zeros for those that stand in."""
        if self._is_whole:
            return answer
        out = answer.new_zeros(*answer.shape[:2], self.length, answer.shape[3])
        lengths = [here.stop - here.start for here in self._here]
        for here, part in zip(self._here, torch.split(answer, lengths, 2), strict=True):
            out[:, :, here] = part
        return out


class _Asked(TorchFunctionMode):
    """Within, torch's attention is computed by `answer`, which is given that function first."""

    def __init__(self, answer: Callable[..., Tensor]) -> None:
        super().__init__()
        self._answer = answer
        self.num_times = 0

    def __torch_function__(
        self, func: Any, types: Any, args: _Args = (), kwargs: _Kwargs | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.num_times += 1
        given = dict(zip(_PARAMETERS, args, strict=False)) | (kwargs or {})
        q, k, v = (given.pop(name) for name in _PARAMETERS[:3])
        return self._answer(func, q, k, v, **given)
