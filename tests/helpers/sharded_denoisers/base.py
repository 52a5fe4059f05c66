"""Base of small sharded denoisers: each rank's output, sent bytes and operations.

They run in float64, so a wrong split can't hide behind rounding. `rank_pool.py` has the processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.ops.attention import attention
from everyframe.parallel import ring_attention
from everyframe.parallel.communicator import Communicator, SingleRank
from everyframe.runtime.model_sharding import ModelPatch
from helpers.sharded_calls import answered

Inputs = dict[str, Any]
Fault = Callable[[Any, Any, Inputs, Communicator], Callable[[], None] | None]


class SmallDenoiser(ABC):
    """A denoiser of one family, with every parameter drawn, so that no branch is silent.

    Attributes:
        cases: shapes of the inputs, by name.
        fast: the cases of every run of the tests; the others are slow.
        guided: the case of two samples.
        single: a case of one.
        large: the case whose work is counted.
        islands: modules that stay in float32 when the rest is narrow.
        gather: what the exchange of the answer is called.
        faults: ``fault(handle, model, inputs, group)`` makes one rank wrong in the case beside it;
            what it returns undoes that.
    """

    cases: Mapping[str, Any]
    fast: Sequence[str] = ()
    guided: str
    single: str
    large: str
    gather: str = "the last projection is gathered"
    islands: tuple[str, ...]
    faults: Mapping[str, tuple[Fault, str]]

    @abstractmethod
    def build(self) -> nn.Module:
        """A new one in float32."""

    @abstractmethod
    def draw(self, model: nn.Module) -> None:
        """Fill its parameters, which are in float64."""

    @abstractmethod
    def inputs(self, case: str) -> Inputs:
        """What it is called with, in float64."""

    @abstractmethod
    def answer(self, model: Any, inputs: Inputs) -> Tensor:
        """Its answer."""

    @abstractmethod
    def apply(self, model: Any, group: Communicator, groups: int) -> Any:
        """Shard it over the ranks of the group."""

    @abstractmethod
    def planned_bytes(self, weights: tuple[float, ...], groups: int, rank: int) -> int:
        """What the plan says that a rank sends in the guided case, in float64."""

    @abstractmethod
    def share(self, size: int, rank: int, case: str) -> float:
        """The share of the work that a rank has."""

    def exchanged(self, sent: Mapping[str, int]) -> int:
        """The bytes that are exchanged in the dtype of the model."""
        return sent["frames are gathered"] + sent["frames are given back"]

    @cache  # noqa: B019  (there are five of them)
    def model(self) -> Any:
        """The one in float64 that all calls of this process share."""
        made = self.build().double().eval().requires_grad_(False)
        self.draw(made)
        return made

    @cache  # noqa: B019
    def wanted(self, case: str) -> Tensor:
        """The answer of one device."""
        return self.bare(case)

    def bare(self, case: str) -> Tensor:
        """The answer of the model as it is, not sharded."""
        with torch.inference_mode():
            return self.answer(self.model(), self.inputs(case))

    def operations(self, group: Communicator) -> int:
        """Those of one rank in the large case."""
        found: int = self.sharded(group, self.large, count=True)["operations"]
        return found

    def sharded(
        self,
        group: Communicator,
        case: str,
        groups: int = 1,
        fault: Fault | None = None,
        count: bool = False,
    ) -> dict[str, Any]:
        """One rank's answer, the bytes that left it and, with `count`, its operations.

        What was applied is removed again, and a planted fault undone.
        """
        inputs = self.inputs(case)
        handle: ModelPatch = self.apply(self.model(), group, groups)
        undo = fault(handle, self.model(), inputs, group) if fault is not None else None
        call = partial(self.answer, self.model(), inputs)
        return answered(group, handle, undo, call, count=count)


def drawn(generator: torch.Generator, *shape: int) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# Faults that are the same for all.


def compute_everything(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> None:
    """A rank computes it all by itself: the answer is right."""
    handle.group = SingleRank()


def other_noise(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> None:
    """The last rank begins with other noise, in one number."""
    if group.rank == group.size - 1:
        inputs["x"].view(-1)[-1] += 1e-6


def own_positions(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> Any:
    """The last rank counts positions from its own first token."""
    hook = model.rope.register_forward_hook(
        lambda rope, args, table: table._replace(
            cos=table.cos.roll(1, 0) if group.rank == group.size - 1 else table.cos
        )
    )
    return hook.remove


def pad_keys(core: nn.Module, group: Communicator) -> Any:
    """The first rank's attention by `core` sees a key of zeros behind the others."""
    if group.rank:
        return None
    inner = ring_attention.partial_attention

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2)

    def partial(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Any:
        return inner(q, padded(k), padded(v), mask)

    ring_attention.partial_attention = partial  # type: ignore[attr-defined]
    before = type(core).forward

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        return attention(q, padded(k), padded(v)) if self is core else before(self, q, k, v, mask)

    type(core).forward = forward

    def undo() -> None:
        ring_attention.partial_attention = inner  # type: ignore[attr-defined]
        type(core).forward = before

    return undo
