"""CFG parallelism: compute guidance branches on different ranks, for any pipeline's denoisers.

Every rank makes the pipeline's own call, so its denoisers get the same calls in the same order
with the same inputs. There are two cases, found before by `cfg_detection.py`:
  - One batch holds several branches: each CFG group computes its own rows.
  - Each branch has a call of its own: a group computes its calls and returns a `LazyTensor` for the
    others. The groups exchange results when each has computed one, or when one is read.
So the result is correct for every pipeline, and the calls run in parallel if the pipeline reads
none in between. A call whose form differs from the dry run is an error (CannotRunError), never a
guess. `sequence_parallel.py` splits the work inside a CFG group.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from everyframe.core.errors import CannotRunError
from everyframe.core.plan import Repair
from everyframe.diffusers_pipelines.calls.step_tracking import bind_arguments
from everyframe.diffusers_pipelines.parallel.cfg_detection import CfgBranches
from everyframe.diffusers_pipelines.parallel.lazy_tensor import LazyTensor
from everyframe.ops.call_override import ModuleCall, override_call
from everyframe.parallel.cfg_groups import CfgGroups
from everyframe.parallel.communicator import Communicator, ParallelContext, memory_order
from everyframe.precision.dtypes import dtype_name


@dataclass(frozen=True)
class CfgExchange:
    """All-to-all between CFG groups `groups` of `video_group`, each with its own result."""

    video_group: Communicator
    groups: CfgGroups

    @property
    def mine(self) -> int:
        """Index of this rank's CFG group."""
        return self.groups.number_of(self.video_group.rank)

    def exchange(self, part: Tensor, lengths: Sequence[int], what: str) -> list[Tensor]:
        """Exchange the groups' results so that every rank has all; `part` (n,) is this group's.

        `lengths`, the same on all ranks, has the length of each group's result; a length may be 0.
        """
        mine, video_group = self.mine, self.video_group
        sizes = [self.groups.sent(lengths, rank) for rank in range(video_group.size)]
        piece = self.groups.piece(lengths, video_group.rank)
        given = part[piece.start : piece.stop].repeat(
            video_group.size - len(self.groups.ranks[mine])
        )
        came = video_group.all_to_all(given, sizes, what)
        theirs = iter(torch.split(came, [n for g, n in enumerate(lengths) if g != mine]))
        return [part if number == mine else next(theirs) for number in range(len(lengths))]


_WHAT = "answers about branches are exchanged"

#: Dtype, shape and memory order of a tensor, as plain data.
_Facts = list[Any]


@dataclass(eq=False)
class DenoiserCall(ModuleCall):
    """One denoiser call.

    Attributes:
        name: the denoiser's component name.
        owner: index of the CFG group that computes it, where each branch has a call of its own.
        mine: this rank's result before the exchange.
        answer: the final result; None until it is known.
        repairs: those that were active when it was asked for.
    """

    name: str
    owner: int = 0
    mine: Any = None
    answer: Any = None
    repairs: tuple[Repair, ...] = ()


class CallHooks:
    """Hooks around calls that are split across ranks; these do nothing, as a dry run needs."""

    @property
    def is_paused(self) -> bool:
        """Whether calls are computed whole on this rank for now."""
        return False

    def asked(self, call: DenoiserCall) -> None:
        """Called for each denoiser call, on whichever rank it is computed."""

    def computing(self, call: DenoiserCall) -> AbstractContextManager[None]:
        """Context: this rank computes its share."""
        return nullcontext()

    def checked(self, call: DenoiserCall, answer: Any) -> Any:
        """Check and repair the whole result; returns the same on all ranks."""
        return answer


class CfgParallel:
    """Context: split calls of these denoisers (by name) across CFG groups."""

    def __init__(
        self,
        denoisers: Mapping[str, nn.Module],
        branches: CfgBranches,
        parallel: ParallelContext,
        around: CallHooks | None = None,
    ) -> None:
        self._denoisers, self._branches = dict(denoisers), branches
        video_group = parallel.video_group
        self._groups = CfgGroups.of(video_group.weights, branches.count, parallel.num_cfg_groups)
        self._exchange = CfgExchange(video_group, self._groups)
        self._around = CallHooks() if around is None else around
        self._on = ExitStack()
        self._count = 0
        self._pending: list[DenoiserCall] = []
        #: Dtype, shape and memory order of this rank's results; in a dry run, of another rank's.
        self._last = [["float32", [*shape], [*range(len(shape))]] for shape in branches.answer]

    def __enter__(self) -> CfgParallel:
        if self._num_groups > 1:
            for name, module in self._denoisers.items():
                self._on.enter_context(override_call(module, partial(self._answer_call, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._on.close()
        self._pending.clear()

    @property
    def _num_groups(self) -> int:
        return len(self._groups.ranks)

    def _answer_call(self, name: str, made: ModuleCall) -> Any:
        if self._around.is_paused:
            return made.compute()
        call = DenoiserCall(**vars(made), name=name)
        self._around.asked(call)
        if self._branches.is_together:
            return self._together(call)
        return self._in_turn(call)

    # ------------------------------------------------------------ several branches in a batch

    def _together(self, call: DenoiserCall) -> Any:
        """The whole result of a batch, of which this rank's group computes its own branches."""
        mine = self._groups.branches(self._exchange.mine)
        part = self._part(call, mine)
        with self._around.computing(call):
            answer = (call if part is None else part).compute()
        if part is not None:
            answer = self._join(answer, len(mine))
        return self._around.checked(call, answer)

    def _part(self, call: DenoiserCall, mine: range) -> ModuleCall | None:
        """The call restricted to those branches; None if the call has one branch only."""
        given, rows, count = (
            bind_arguments(call.module, call.args, call.kwargs),
            self._branches.rows,
            0,
        )
        leaves, form = pytree.tree_flatten_with_path(given)
        here: list[Any] = []
        counts: set[int] = set()
        for path, leaf in leaves:
            one = rows.get(pytree.keystr(path))
            if one is None or not isinstance(leaf, Tensor):
                here.append(leaf)
                continue
            count, rest = divmod(leaf.shape[0], one)
            counts.add(-1 if rest else count)
            here.append(_of_branches(leaf, one, count, mine, pytree.keystr(path)))
        if counts == {1}:
            return None
        if counts != {self._branches.count}:
            raise CannotRunError(
                f"{call.name} is called with another batch than in its dry run, so its "
                "branches are unknown; leave out cfg"
            )
        cut = pytree.tree_unflatten(here, form)
        names = list(inspect.signature(call.module.forward).parameters)[: len(call.args)]
        args = tuple(cut.pop(name) for name in names)
        return ModuleCall(call.module, call.base, args, cut)

    def _join(self, answer: Any, load: int) -> Any:
        """Concatenate the results of all groups; this group's result has `load` branches."""
        leaves, form = pytree.tree_flatten(answer)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        each = [
            [_scale(_facts(one), load, other) for one in tensors] for other in self._groups.loads
        ]
        parts = self._exchange_tensors(tensors, each)
        whole = iter([_beside(list(same)) for same in zip(*parts, strict=True)])
        return pytree.tree_unflatten(
            [next(whole) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form
        )

    # ------------------------------------------------------------ a branch in each call

    def _in_turn(self, call: DenoiserCall) -> Any:
        """The result, or a `LazyTensor` that is exchanged when it is read."""
        call.owner = self._count % self._num_groups
        self._count += 1
        if call.owner == self._exchange.mine:
            with self._around.computing(call):
                call.mine = call.compute()
        self._pending.append(call)
        if len(self._pending) == self._num_groups:
            self._exchange_pending()
            return call.answer
        leaves, form = self._form(call)
        return pytree.tree_unflatten(
            [LazyTensor.of(partial(self._leaf, call, number)) for number in range(leaves)], form
        )

    def _form(self, call: DenoiserCall) -> tuple[int, Any]:
        """Number of tensors in a result and their container, both known from the dry run."""
        if call.mine is None:
            return len(self._branches.answer), self._branches.form
        leaves, form = pytree.tree_flatten(call.mine)
        if form != self._branches.form:
            raise CannotRunError(
                f"{call.name} answers in another form than in its dry run; leave out cfg"
            )
        return len(leaves), form

    def _leaf(self, call: DenoiserCall, number: int) -> Tensor:
        if call.answer is None:
            self._exchange_pending()
        leaf: Tensor = pytree.tree_leaves(call.answer)[number]
        return leaf

    def _exchange_pending(self) -> None:
        """Exchange the results of the pending calls and check each."""
        calls, self._pending = self._pending, []
        facts = [list[_Facts]() for _ in self._groups.ranks]
        made: list[Tensor] = []
        for call in calls:
            if call.owner == self._exchange.mine:
                made = pytree.tree_leaves(call.mine)
                self._last = [_facts(tensor) for tensor in made]
        for call in calls:
            first = self._groups.ranks[call.owner].start
            facts[call.owner] = self._exchange.video_group.broadcast_object(
                self._last, first, _WHAT
            )
        parts = self._exchange_tensors(made, facts)
        for call in calls:
            answer = pytree.tree_unflatten(parts[call.owner], self._branches.form)
            call.answer = self._around.checked(call, answer)
            call.mine = None

    # ------------------------------------------------------------ both

    def _exchange_tensors(
        self, mine: Sequence[Tensor], facts: Sequence[Sequence[_Facts]]
    ) -> list[list[Tensor]]:
        """Every group's tensors on every rank, sent as bytes; `facts` describes each tensor."""
        device = mine[0].device if mine else self._device()
        here = [_flat(tensor) for tensor in mine]
        part = torch.cat(here) if here else torch.empty(0, dtype=torch.uint8, device=device)
        lengths = [sum(_num_bytes(each) for each in group) for group in facts]
        came = self._exchange.exchange(part, lengths, _WHAT)
        return [
            list(mine) if number == self._exchange.mine else _unflatten(came[number], group)
            for number, group in enumerate(facts)
        ]

    def _device(self) -> torch.device:
        """Device for received tensors on a rank that has no result of its own."""
        first = next(iter(self._denoisers.values()))
        return next(first.parameters()).device


def _of_branches(leaf: Tensor, one: int, count: int, mine: range, path: str) -> Tensor:
    """Rows of those branches; several rows of one branch must be repetitions of the same row."""
    if one > 1 and count > 1 and not leaf.is_meta:
        each = torch.unflatten(leaf, 0, (count, one))
        if not bool((each == each[:, :1]).all()):
            raise CannotRunError(
                f"the rows of its denoiser's {path} can't be assigned to guidance branches; "
                "leave out cfg"
            )
    return leaf[mine.start * one : mine.stop * one]


def _facts(tensor: Tensor) -> _Facts:
    return [dtype_name(tensor.dtype), list(tensor.shape), memory_order(tensor)]


def _scale(facts: _Facts, load: int, other: int) -> _Facts:
    """The same facts for another number of branches."""
    dtype, (rows, *shape), order = facts
    return [dtype, [rows // load * other, *shape], order]


def _num_bytes(facts: _Facts) -> int:
    dtype, shape, _ = facts
    return torch.Size(shape).numel() * int(getattr(torch, dtype).itemsize)


def _flat(tensor: Tensor) -> Tensor:
    """A tensor as bytes, in memory order."""
    return tensor.permute(memory_order(tensor)).contiguous().view(-1).view(torch.uint8)


def _unflatten(data: Tensor, group: Sequence[_Facts]) -> list[Tensor]:
    """Inverse of `_flat`: the tensors, with their memory order."""
    found = []
    for piece, (dtype, shape, order) in zip(
        torch.split(data, [_num_bytes(each) for each in group]), group, strict=True
    ):
        # Begins in memory where numbers of any size may.
        flat = piece.clone().view(getattr(torch, dtype))
        lying = flat.view([shape[dim] for dim in order])
        found.append(lying.permute([order.index(dim) for dim in range(len(order))]))
    return found


def _beside(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate branches along the batch, preserving their memory order."""
    order = memory_order(parts[0])
    joined = torch.cat([part.permute(order) for part in parts], order.index(0))
    return joined.permute([order.index(dim) for dim in range(len(order))])
