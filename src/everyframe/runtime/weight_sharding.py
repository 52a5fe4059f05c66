"""Weights that several ranks keep between them: each has some units, and hands them to the others.

A rank reads its own units alone and keeps them on its device. When one is about to be called its
holder sends it to all, who let go of it after the call, as of any weights that come for their call
(`offload`); the next one is already on its way. So a model may be larger than a device, in any
number of parts, and each product is computed by what was read from the file, bit for bit.

Units and not slices of each tensor (as PyTorch's FSDP2 has them): what has to be there whole for
one product comes from one rank, nothing is padded or put together, any number of ranks will do, and
hooks, casts and repairs that sit on modules see plain parameters. All ranks must call the same
units in the same order, also those that have no tokens.

Read next: `offload.py`; `everyframe.planning.component_memory`, which forecasts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from everyframe.core.plan import Precision
from everyframe.parallel.communicator import Communicator
from everyframe.parallel.pending import PendingSend
from everyframe.precision.quantization import as_quantised
from everyframe.runtime import offload
from everyframe.runtime.prefetch import PendingWeights, Placeholders

#: What is sent, by which it is counted and waited for.
WEIGHTS = "weights are handed on"


def assign_units(unit_sizes: Mapping[str, int], room: Sequence[float]) -> dict[str, int]:
    """Which rank keeps each unit: the largest first, each by who is least full with it.

    `room` is how much of the weights each rank may keep beside the others; one without keeps none.
    """
    held = {rank: 0 for rank, much in enumerate(room) if much}
    found: dict[str, int] = {}
    for unit in sorted(unit_sizes, key=lambda name: -unit_sizes[name]):
        size = unit_sizes[unit]
        found[unit] = min(held, key=lambda rank: (held[rank] + size) / room[rank])
        held[found[unit]] += size
    return found


def sharded_bytes(module: nn.Module, precision: Precision, room: Sequence[float]) -> list[int]:
    """Bytes of units that each rank keeps for all; see `assign_units`."""
    sizes, _ = offload.unit_bytes(module, precision)
    with as_quantised(module, precision):
        rank_of = assign_units(_elements(module), room)
    ranks = range(len(room))
    return [sum(sizes[unit] for unit in sizes if rank_of[unit] == rank) for rank in ranks]


def on_device_bytes(
    module: nn.Module, precision: Precision, room: Sequence[float], rank: int | None = None
) -> int:
    """Bytes of parameters that that rank has on its device at most; None is who has most.

    What it keeps, what belongs to no unit, and two units of others: one computes, one comes.
    """
    kept = sharded_bytes(module, precision, room)
    return offload.resident_bytes(module, precision) + (max(kept) if rank is None else kept[rank])


class ShardedWeightsProvider:
    """A `WeightsProvider` for a module whose weights the ranks of `team` keep between them, by its
    weights.

    They talk of nothing else meanwhile: what they compute is exchanged by another team.
    """

    def __init__(self, module: nn.Module, team: Communicator, device: torch.device) -> None:
        self._team, self._device = team, device
        units, rank_of = offload.units(module), assign_units(_elements(module), team.weights)
        by_parameter: dict[int, int] = {}  # one may have several names
        self._holder: dict[str, int] = {}
        for unit, part in units.items():
            for name, parameter in part.named_parameters(remove_duplicate=False):
                rank = by_parameter.setdefault(id(parameter), rank_of[unit])
                self._holder[f"{unit}.{name}"] = rank

    @property
    def elsewhere(self) -> frozenset[str]:
        """The parameters that other ranks keep."""
        mine = self._team.rank
        return frozenset(name for name, rank in self._holder.items() if rank != mine)

    def bring(self, waiting: Placeholders) -> dict[str, Tensor]:
        """See `WeightsProvider`."""
        return self.send_for(waiting).arrived()

    def send_for(self, waiting: Placeholders) -> PendingWeights:
        """See `WeightsProvider`."""
        mine, size = self._team.rank, 0
        tensors: dict[str, Tensor] = {}
        parts: list[tuple[Tensor, int]] = []
        for name, parameter in waiting.items():
            rank = self._holder[name]
            if rank == mine:
                tensors[name] = parameter
            else:
                tensors[name] = torch.empty_like(parameter, device=self._device)
                size += tensors[name].nbytes
            parts.append((tensors[name].detach().contiguous(), rank))
        return _Handed(size, tensors, self._team.start_broadcast(parts, WEIGHTS))


@dataclass
class _Handed:
    """What other ranks send, and this one's own."""

    num_bytes: int
    tensors: dict[str, Tensor]
    sending: PendingSend

    def arrived(self) -> dict[str, Tensor]:
        self.sending.wait()
        return self.tensors

    def dropped(self) -> None:
        self.sending.wait()


def _elements(module: nn.Module) -> dict[str, int]:
    """Elements of each unit; who keeps it depends on no precision."""
    return {
        name: sum(parameter.numel() for parameter in unit.parameters())
        for name, unit in offload.units(module).items()
    }
