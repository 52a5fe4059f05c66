"""Communicators: groups of ranks that exchange tensors by all-to-all, gather, broadcast and send.

Three kinds share one interface:
  - `TorchCommunicator`: processes in a torch.distributed group, gloo on CPUs and NCCL on CUDA
  - `SingleRank`: one rank, sends nothing
  - `FakeCommunicator`: one rank of a simulated group for dry runs: right shapes, wrong numbers
All ranks know all sizes in advance, so shares may be uneven or empty, and nothing is padded.
Tensors travel as bytes, so any dtype works and the received bits equal the sent bits. Every byte
that leaves a rank is counted. Processes are joined in `rendezvous`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from everyframe.core.errors import PeerLostError
from everyframe.hardware.device_loss import is_device_loss
from everyframe.hardware.memory import is_out_of_memory
from everyframe.parallel.pending import PendingReceive, PendingSend
from everyframe.precision.dtypes import dtype_name


def _ignore(what: str) -> None:  # no lambda, as simulated groups are pickled
    return None


class Communicator(ABC):
    """One rank's view of a group. All ranks must call the same exchanges in the same order.

    Attributes:
        rank, size: index of this rank, and number of ranks.
        weights: speeds of all ranks.
        sent: bytes that left this rank, by purpose.
        waits: called as ``waits(what)`` before this rank waits for others, and with "" afterwards.
    """

    def __init__(self, rank: int, weights: Sequence[float]) -> None:
        self.rank = rank
        self.weights = tuple(weights)
        self.sent: Counter[str] = Counter()
        self.waits: Callable[[str], None] = _ignore

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.weights)

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, which reports for the group."""
        return self.rank == 0

    def all_to_all(self, x: Tensor, sizes: Sequence[Sequence[int]], what: str) -> Tensor:
        """Send rows of `x` (n, ...) to their ranks, and return the rows that this rank receives.

        ``sizes[p][q]`` rows go from rank p to rank q; every rank knows all sizes. Rows are sent in
        the order of the receiving ranks and arrive in the order of the sending ranks.
        """
        return self.start_all_to_all(x, sizes, what, at_once=True).wait()

    def start_all_to_all(
        self, x: Tensor, sizes: Sequence[Sequence[int]], what: str, *, at_once: bool = False
    ) -> PendingReceive:
        """Asynchronous `all_to_all`; `x` must not change until it is waited for.

        With `at_once` it is finished on return.
        """
        mine, theirs = sizes[self.rank], [row[self.rank] for row in sizes]
        assert x.shape[0] == sum(mine), f"{x.shape[0]} rows to send, {sum(mine)} declared"
        self.sent[what] += (sum(mine) - mine[self.rank]) * _row_bytes(x)
        if not any(n for p, row in enumerate(sizes) for q, n in enumerate(row) if p != q):
            return PendingReceive(x)  # nobody has anything for another
        x, out = x.contiguous(), x.new_empty((sum(theirs), *x.shape[1:]))
        work = self._all_to_all(out, x, theirs, mine, what, at_once)
        if work is None:
            return PendingReceive(out)
        return PendingReceive(out, x, work, self._waiting(what))

    def gather(self, x: Tensor, sizes: Sequence[int], what: str) -> Tensor:
        """Concatenate the rows of all ranks on every rank; rank p has ``sizes[p]`` rows."""
        assert x.shape[0] == sizes[self.rank], f"{x.shape[0]} rows, {sizes[self.rank]} declared"
        if self.size == 1:
            return x
        self.sent[what] += x.shape[0] * _row_bytes(x) * (self.size - 1)
        out = x.new_empty((sum(sizes), *x.shape[1:]))
        parts = list(torch.split(out, list(sizes)))
        parts[self.rank].copy_(x)
        self._broadcast([(part, rank) for rank, part in enumerate(parts) if part.numel()], what)
        return out

    def broadcast(self, x: Tensor, source: int, what: str) -> Tensor:
        """`x` of rank `source` on every rank; elsewhere `x` is overwritten with it."""
        if self.size > 1 and x.numel():
            x = x.contiguous()
            if self.rank == source:
                self.sent[what] += x.nbytes * (self.size - 1)
            self._broadcast([(x, source)], what)
        return x

    def start_broadcast(self, parts: Sequence[tuple[Tensor, int]], what: str) -> PendingSend:
        """Asynchronous `broadcast` of contiguous tensors, each from the rank beside it.

        None may be read or changed until the `PendingSend` is waited for.
        """
        if self.size == 1:
            return PendingSend([], self._waiting(what))
        for x, source in parts:
            self.sent[what] += x.nbytes * (self.size - 1) * (source == self.rank)
        with self._waiting(what):
            works = self._start_broadcast([part for part in parts if part[0].numel()])
        return PendingSend(works, self._waiting(what))

    def broadcast_object(self, value: Any, source: int, what: str) -> Any:
        """Broadcast plain data (JSON values) of rank `source`."""
        if self.size == 1:
            return value
        written = json.dumps(value).encode() if self.rank == source else b""
        length = self.broadcast(torch.tensor([len(written)]), source, what)
        data = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == source:
            data = torch.frombuffer(bytearray(written), dtype=torch.uint8)
        return json.loads(bytes(self.broadcast(data, source, what).tolist()))

    def broadcast_tree(self, value: Any, source: int, what: str) -> Any:
        """Broadcast `value` of rank `source`: tensors and JSON values in containers.

        Containers are lists, tuples, dicts, `broadcastable` dataclasses and whatever else torch's
        pytree knows by name. The other ranks need not know them. Tensors arrive on the CPU in their
        memory layout: the last bits of a convolution may depend on it.
        """
        if self.size == 1:
            return value
        leaves, form = pytree.tree_flatten(value)
        data = [pytree.treespec_dumps(form), [_description(leaf) for leaf in leaves]]
        written, described = self.broadcast_object(data, source, what)
        came = []
        for number, (plain, tensor) in enumerate(described):
            if tensor is None:
                came.append(plain)
                continue
            shape, dtype, order = tensor
            if self.rank == source:
                x = leaves[number].cpu().permute(order)
            else:
                x = torch.empty([shape[dim] for dim in order], dtype=getattr(torch, dtype))
            x = self.broadcast(x, source, what)
            came.append(x.permute([order.index(dim) for dim in range(x.ndim)]))
        return pytree.tree_unflatten(came, pytree.treespec_loads(written))

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Plain data of every rank, in rank order, on every rank."""
        return [self.broadcast_object(value, source, what) for source in range(self.size)]

    def send(self, values: Sequence[Tensor], data: Any, target: int, what: str) -> PendingSend:
        """Send CPU tensors and plain data to one rank, which must `receive` them.

        They must not change until the `PendingSend` is waited for.
        """
        shapes = [[list(value.shape), dtype_name(value.dtype)] for value in values]
        head = torch.frombuffer(bytearray(json.dumps([shapes, data]).encode()), dtype=torch.uint8)
        parts = [torch.tensor([len(head)]), head, *(v.contiguous() for v in values if v.numel())]
        self.sent[what] += sum(part.nbytes for part in parts)
        return PendingSend(self._send(parts, target, what), self._waiting(what))

    def receive(self, source: int, what: str) -> tuple[list[Tensor], Any]:
        """Receive the tensors and plain data that rank `source` sent."""
        length = torch.zeros(1, dtype=torch.int64)
        self._receive([length], source, what)
        head = torch.empty(int(length), dtype=torch.uint8)
        self._receive([head], source, what)
        shapes, data = json.loads(bytes(head.tolist()))
        values = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in shapes]
        self._receive([value for value in values if value.numel()], source, what)
        return values, data

    def _waiting(self, what: str) -> AbstractContextManager[None]:
        return _Waiting(what, self.waits)

    @abstractmethod
    def _send(self, parts: Sequence[Tensor], target: int, what: str) -> list[Any]: ...

    @abstractmethod
    def _receive(self, parts: Sequence[Tensor], source: int, what: str) -> None: ...

    @abstractmethod
    def _all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        receive: Sequence[int],
        send: Sequence[int],
        what: str,
        at_once: bool,
    ) -> Any:
        """Exchange contiguous `x` into `out`; returns what to wait for, None if finished."""

    def _broadcast(self, parts: Sequence[tuple[Tensor, int]], what: str) -> None:
        """Fill each contiguous tensor with the data of its source rank."""
        with self._waiting(what):
            for work in self._start_broadcast(parts):
                work.wait()

    @abstractmethod
    def _start_broadcast(self, parts: Sequence[tuple[Tensor, int]]) -> list[Any]:
        """Asynchronous `_broadcast`; returns what to wait for."""


_Class = TypeVar("_Class", bound=type)


def broadcastable(cls: _Class) -> _Class:
    """Decorate a dataclass whose instances `Communicator.broadcast_tree` may broadcast."""
    pytree.register_dataclass(cls, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")
    return cls


class FakeCommunicator(Communicator):
    """A rank of a simulated group: receives uninitialised tensors.

    Plain data of another rank is assumed to equal this rank's.
    """

    def broadcast_object(self, value: Any, source: int, what: str) -> Any:
        """See `Communicator`."""
        return value

    def _all_to_all(self, *_: object) -> None:
        pass

    def _start_broadcast(self, *_: object) -> list[Any]:
        return []

    def _send(self, *_: object) -> list[Any]:
        return []

    def _receive(self, *_: object) -> None:
        pass


class SingleRank(FakeCommunicator):
    """A group of one rank; sends nothing."""

    def __init__(self) -> None:
        super().__init__(0, (1.0,))


@dataclass(frozen=True)
class ParallelContext:
    """Communicators of one rank.

    Attributes:
        world: all ranks.
        video_group: ranks that compute the same videos.
        num_cfg_groups: number of groups that split the guidance branches.
        sequence_backend: "ulysses" or "ring"; empty if the model has one only.
        weights_group: a second group over the ranks of `video_group`, so that broadcasts of sharded
            weights overlap with token exchange.
        branch_group: ranks of `video_group` with the same guidance branches, if each such group
            calls the denoiser independently.
    """

    world: Communicator
    video_group: Communicator
    num_cfg_groups: int = 1
    sequence_backend: str = ""
    weights_group: Communicator | None = None
    branch_group: Communicator | None = None

    @property
    def denoiser_group(self) -> Communicator:
        """Ranks that call the denoiser together."""
        return self.video_group if self.branch_group is None else self.branch_group


#: Context of a run on a single rank.
ONE = ParallelContext(SingleRank(), SingleRank())


class TorchCommunicator(Communicator):
    """This process in a torch.distributed group; None is the group of all processes."""

    def __init__(
        self, weights: Sequence[float] | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        size = dist.get_world_size(group)
        super().__init__(dist.get_rank(group), (1.0,) * size if weights is None else weights)
        assert len(self.weights) == size, f"{len(self.weights)} weights for {size} ranks"
        self._group = group
        whole = dist.group.WORLD if group is None else group
        assert whole is not None
        self._members = dist.get_process_group_ranks(whole)

    def _all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        receive: Sequence[int],
        send: Sequence[int],
        what: str,
        at_once: bool,
    ) -> Any:
        each = _row_bytes(x)
        with self._waiting(what):
            return dist.all_to_all_single(
                _bytes(out), _bytes(x),
                [n * each for n in receive], [n * each for n in send],
                group=self._group, async_op=not at_once,
            )  # fmt: skip

    def _start_broadcast(self, parts: Sequence[tuple[Tensor, int]]) -> list[Any]:
        return [
            dist.broadcast(_bytes(x), self._members[source], self._group, async_op=True)
            for x, source in parts
        ]

    def _send(self, parts: Sequence[Tensor], target: int, what: str) -> list[Any]:
        with self._waiting(what):
            return [_Sent(part, self._members[target], self._group) for part in parts]

    def _receive(self, parts: Sequence[Tensor], source: int, what: str) -> None:
        with self._waiting(what):
            for part in parts:
                dist.recv(_bytes(part), self._members[source], self._group)


class _Sent:
    """One tensor in transfer, referenced until it is sent."""

    def __init__(self, part: Tensor, target: int, group: dist.ProcessGroup | None) -> None:
        self._part = part
        self._work = dist.isend(_bytes(part), target, group)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()


class _Waiting(AbstractContextManager[None]):
    """Report a failed exchange as a `PeerLostError`: another rank died or does not answer."""

    def __init__(self, what: str, waits: Callable[[str], None]) -> None:
        self._what, self._waits = what, waits

    def __enter__(self) -> None:
        self._waits(self._what)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._waits("")
        # An exchange may reveal that this rank's device is lost or full: NCCL takes memory in a
        # group's first exchange.
        is_own = error is not None and (is_device_loss(error) or is_out_of_memory(error))
        if isinstance(error, RuntimeError) and not is_own:
            message = str(error).strip().splitlines()[0] if str(error).strip() else "no word"
            raise PeerLostError(
                f"another rank went away or did not answer while {self._what} ({message})"
            ) from error


def _bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as its bytes."""
    return x.view(-1).view(torch.uint8)


def _row_bytes(x: Tensor) -> int:
    """Bytes of one row of (n, ...)."""
    rows = x.element_size()
    for length in x.shape[1:]:
        rows *= length
    return rows


def memory_order(x: Tensor) -> list[int]:
    """Dimensions in memory order, outermost first."""
    return sorted(range(x.ndim), key=lambda dim: -x.stride()[dim])


def _description(leaf: Any) -> tuple[Any, Any]:
    """A plain value, or shape, dtype and layout of a tensor: what other ranks must know of it."""
    if not isinstance(leaf, Tensor):
        return leaf, None
    return None, (list(leaf.shape), dtype_name(leaf.dtype), memory_order(leaf))
