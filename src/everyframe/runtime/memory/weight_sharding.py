"""Shard weights across ranks by block: each rank stores some blocks and broadcasts them on use.

A rank reads only its own blocks and holds them on its device. Before a block is called its owner
broadcasts it, and the other ranks free it after the call, like any offloaded weights (`offload`);
the next block is prefetched. So a model may be larger than a device, over any number of ranks, and
every product uses the bits that were read from the file.

Unlike FSDP2, which slices every tensor, whole blocks are owned by one rank. Nothing is padded or
reassembled, any number of ranks works, and hooks, casts and repairs see ordinary parameters. All
ranks must call the same blocks in the same order, also ranks without tokens. The planner estimates
the memory in `everyframe.planning.memory.component_memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from everyframe.core.plan import Precision
from everyframe.parallel.communicator import Communicator
from everyframe.parallel.pending import PendingSend
from everyframe.precision.quantization import as_quantized
from everyframe.runtime.memory import offload
from everyframe.runtime.memory.prefetch import PendingWeights, Placeholders

#: Label of the exchange in byte counts and wait messages.
WEIGHTS = "weights are broadcast"


def assign_units(unit_sizes: Mapping[str, int], room: Sequence[float]) -> dict[str, int]:
    """Owner rank of each unit: largest unit first, to the rank that is then least full.

    `room` is how much of the weights each rank may store, relative to the others; 0 stores none.
    """
    held = {rank: 0 for rank, much in enumerate(room) if much}
    found: dict[str, int] = {}
    for unit in sorted(unit_sizes, key=lambda name: -unit_sizes[name]):
        size = unit_sizes[unit]
        found[unit] = min(held, key=lambda rank: (held[rank] + size) / room[rank])
        held[found[unit]] += size
    return found


def sharded_bytes(module: nn.Module, precision: Precision, room: Sequence[float]) -> list[int]:
    """Bytes of the units that each rank owns; see `assign_units`."""
    sizes, _ = offload.unit_bytes(module, precision)
    with as_quantized(module, precision):
        rank_of = assign_units(_elements(module), room)
    ranks = range(len(room))
    return [sum(sizes[unit] for unit in sizes if rank_of[unit] == rank) for rank in ranks]


def on_device_bytes(
    module: nn.Module, precision: Precision, room: Sequence[float], rank: int | None = None
) -> int:
    """Maximum bytes of parameters on the device of `rank`, or of the fullest rank if None.

    They are its own units, parameters outside units, and two units of other ranks: one computes,
    one is in transfer.
    """
    shards = sharded_bytes(module, precision, room)
    return offload.resident_bytes(module, precision) + (
        max(shards) if rank is None else shards[rank]
    )


class ShardedWeightsProvider:
    """`WeightsProvider` for a module that `group` shards in proportion to the ranks' `weights`.

    This group carries weights only; activations use another group.
    """

    def __init__(self, module: nn.Module, group: Communicator, device: torch.device) -> None:
        self._group, self._device = group, device
        units, rank_of = offload.units(module), assign_units(_elements(module), group.weights)
        by_parameter: dict[int, int] = {}  # one may have several names
        self._holder: dict[str, int] = {}
        for unit, part in units.items():
            for name, parameter in part.named_parameters(remove_duplicate=False):
                rank = by_parameter.setdefault(id(parameter), rank_of[unit])
                self._holder[f"{unit}.{name}"] = rank

    @property
    def elsewhere(self) -> frozenset[str]:
        """Parameters that other ranks own."""
        mine = self._group.rank
        return frozenset(name for name, rank in self._holder.items() if rank != mine)

    def bring(self, waiting: Placeholders) -> dict[str, Tensor]:
        """See `WeightsProvider`."""
        return self.send_for(waiting).wait()

    def send_for(self, waiting: Placeholders) -> PendingWeights:
        """See `WeightsProvider`."""
        mine, size = self._group.rank, 0
        tensors: dict[str, Tensor] = {}
        parts: list[tuple[Tensor, int]] = []
        for name, parameter in waiting.items():
            rank = self._holder[name]
            if rank == mine:
                # As it is now: where a repair widens it before its call, all ranks ask anew.
                tensors[name] = parameter.detach()
            else:
                # Not like the stand-in, which is on meta: the guard's search reads every operand.
                tensors[name] = torch.empty(
                    parameter.shape, dtype=parameter.dtype, device=self._device
                )
                size += tensors[name].nbytes
            parts.append((tensors[name].detach().contiguous(), rank))
        return _BroadcastWeights(size, tensors, self._group.start_broadcast(parts, WEIGHTS))


@dataclass
class _BroadcastWeights:
    """Weights in transfer from other ranks, and this rank's own."""

    num_bytes: int
    tensors: dict[str, Tensor]
    sending: PendingSend

    def wait(self) -> dict[str, Tensor]:
        self.sending.wait()
        return self.tensors

    def cancel(self) -> None:
        self.sending.wait()


def _elements(module: nn.Module) -> dict[str, int]:
    """Elements of each unit; the owner does not depend on precision."""
    return {
        name: sum(parameter.numel() for parameter in unit.parameters())
        for name, unit in offload.units(module).items()
    }
