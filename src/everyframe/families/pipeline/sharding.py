"""A transformer of diffusers on several ranks, put on from outside; the class is left as it is.

Each rank holds some tokens of every sample through all blocks, in uneven parts. In attention of
all tokens to all, torch's function is asked for those of this rank; what it gets in its place are
answers for which ranks have met, by heads (`everyframe.parallel.ulysses`) or in a ring
(`everyframe.parallel.ring`). That function, and not the processor around it, is the same in every
class. Of the result the last projection alone is gathered; what is around the blocks (text,
timestep, patches) every rank computes for itself. Nothing is padded.

Where a class is cut is data: `cuts.py`. Read next: `everyframe.families.sharded`, `stages.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from everyframe.core.errors import CannotRunError
from everyframe.families.pipeline.cuts import CUTS, Cut, Cuts, dealt
from everyframe.families.pipeline.sizes import denoisers
from everyframe.families.sharded import PutOn
from everyframe.parallel.partition import shares, spans
from everyframe.parallel.shared import Attending, attending
from everyframe.parallel.team import Team, Teams

#: The parameters of torch's attention, which has no signature to be asked for them.
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale",
               "enable_gqa")  # fmt: skip

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
_Key = tuple[Team, tuple[tuple[int, ...], ...], int]


def apply(model: nn.Module, team: Team, way: str = "ulysses") -> Sharding:
    """Put a transformer of `CUTS` on the ranks of `team`; each must call it in the same order with
    the same input. `way` is one of `everyframe.parallel.heads.ATTENDING`."""
    return Sharding(model, CUTS[type(model).__name__], team, way)


def of_all(modules: Mapping[str, nn.Module], teams: Teams) -> dict[str, Sharding]:
    """What is put on the denoisers among these components, by name; nothing for one rank."""
    if teams.team.size == 1:
        return {}
    return {name: apply(modules[name], teams.team, teams.way) for name in denoisers(modules)}


class Sharding(PutOn):
    """What `apply` has put on a transformer; `remove` takes it off."""

    def __init__(self, model: nn.Module, cuts: Cuts, team: Team, way: str) -> None:
        super().__init__(team, 1)
        self._way = way
        self._attending: dict[_Key, Attending] = {}
        #: How many tokens of each kind the ranks hold, as far as they were cut in this call.
        self._streams: list[tuple[int, ...]] = []
        self._entered: list[tuple[nn.Module, _Asked]] = []
        self._handles.append(model.register_forward_pre_hook(self._begin))
        for cut in (*cuts.beside, *cuts.tokens):
            place = partial(self._cut, cut, cut in cuts.tokens)
            module = model.get_submodule(cut.module)
            self._handles.append(module.register_forward_pre_hook(place, with_kwargs=True))
        for name in cuts.tables:
            self._handles.append(model.get_submodule(name).register_forward_hook(self._cut_table))
        for name, module in model.named_modules():
            if fnmatchcase(name, cuts.attention):
                self._put_in(module, self._together, name)
            elif fnmatchcase(name, cuts.context):
                self._put_in(module, _for_tokens)
        self._handles.append(model.get_submodule(cuts.last).register_forward_hook(self._gather))

    def _begin(self, model: nn.Module, args: _Args) -> None:
        self._streams.clear()

    def _cut(
        self, cut: Cut, is_stream: bool, module: nn.Module, args: _Args, kwargs: _Kwargs
    ) -> tuple[_Args, _Kwargs]:
        """The call with this rank's tokens of that argument."""

        def part(value: Any) -> Any:
            if is_stream:
                self._streams.append(shares(value.shape[cut.dim], self.team.weights))
            return self._part(value, cut.dim, is_stream=is_stream)

        if cut.argument in kwargs:
            return args, {**kwargs, cut.argument: part(kwargs[cut.argument])}
        number = list(inspect.signature(module.forward).parameters).index(cut.argument)
        if number < len(args):
            args = (*args[:number], part(args[number]), *args[number + 1 :])
        return args, kwargs

    def _cut_table(self, module: nn.Module, args: _Args, tables: Any) -> Any:
        return self._part(tables, 1)

    def _part(self, value: Any, dim: int, *, is_stream: bool = False) -> Any:
        """This rank's part of tensors that have tokens along `dim`; the same for all of them is
        of length 1 there, or has no such dimension."""
        if isinstance(value, (tuple, list)):
            return tuple(self._part(each, dim) for each in value)
        if not isinstance(value, Tensor) or value.ndim <= dim:
            return value
        if value.shape[dim] == 1 and not is_stream:
            return value
        mine = spans(value.shape[dim], self.team.weights)[self.team.rank]
        if not mine and not is_stream:
            return value.narrow(dim, 0, 1)  # goes with no tokens as with any number of them
        return value.narrow(dim, mine.start, len(mine))

    def _put_in(self, module: nn.Module, answer: Callable[..., Tensor], must: str = "") -> None:
        """Have `answer` in the place of torch's attention whenever that module is called.

        One that is named by `must` has to ask for it.
        """

        def enter(module: nn.Module, args: _Args) -> None:
            asked = _Asked(answer)
            asked.__enter__()
            self._entered.append((module, asked))

        def leave(module: nn.Module, args: _Args, result: Any) -> None:
            # A call that ended in somebody's hook before ours was never entered.
            if not self._entered or self._entered[-1][0] is not module:
                return
            _, asked = self._entered.pop()
            asked.__exit__(None, None, None)
            if must and result is not None and not asked.num_times:
                raise CannotRunError(
                    f"{must} computes its attention by another function than torch's, so devices "
                    "can't share it; unset DIFFUSERS_ATTN_BACKEND, or give one device"
                )

        self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _together(
        self, compute: Callable[..., Tensor], q_BHnD: Tensor, k: Tensor, v: Tensor, **how: Any
    ) -> Tensor:
        """Answers to this rank's tokens among all tokens."""
        unknown = [name for name, value in how.items() if isinstance(value, Tensor) or value]
        if unknown:
            raise CannotRunError(
                f"attention of all tokens with {' and '.join(unknown)} can't be shared by devices "
                "here; give one device"
            )
        batch, heads, length, _ = q_BHnD.shape
        key = (self.team, tuple(self._streams), batch * heads)
        if key not in self._attending:
            deal = dealt(self._streams, batch * heads, self.team.weights)
            assert len(deal.columns[self.team.rank]) == length, "tokens that were not cut"
            self._attending[key] = attending(self._way, deal, self.team)

        def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            return _for_tokens(compute, q, k, v)

        folded = (x.flatten(0, 1)[None] for x in (q_BHnD, k, v))
        return self._attending[key].attend(core, *folded)[0].unflatten(0, (batch, heads))

    def _gather(self, layer: nn.Module, args: _Args, out_BnC: Tensor) -> Tensor:
        if self.team.size == 1:
            return out_BnC
        rows = out_BnC.transpose(0, 1).contiguous()
        every = self.team.gather(rows, self._streams[0], "the last projection is gathered")
        return every.transpose(0, 1).contiguous()


def _for_tokens(
    compute: Callable[..., Tensor], q_BHQD: Tensor, k: Tensor, v: Tensor, **how: Any
) -> Tensor:
    """What torch's function computes; of no tokens nothing, which not every kernel takes."""
    if 0 in q_BHQD.shape:
        return v.new_empty((*q_BHQD.shape[:-1], v.shape[-1]))
    return compute(q_BHQD, k, v, **how)


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
