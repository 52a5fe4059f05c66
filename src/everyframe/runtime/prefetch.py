"""Weights brought to the device one part ahead: while a part computes, the next one is on its way.

Which part is next is learnt from the last pass; a wrong guess costs its way and nothing else. How
weights come is their `WeightsProvider`'s affair: here is the one that fetches what waits in this
process's reach; ranks that keep weights between them have another (`holding`). Not here: which
parts there are and when they come and go (`offload`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

Placeholders = Mapping[str, nn.Parameter]
"""What stands in the module for parameters that are elsewhere, by their dotted names."""

LoadWeight = Callable[[str, nn.Parameter], Tensor]
"""Brings what waits under that dotted name to the device, in the dtype of what stands for it."""

#: Where copies in another thread are known to be safe beside the computation.
_KINDS = ("cpu", "cuda")


class PendingWeights(Protocol):
    """Parameters that come while something else is computed, and the bytes that they take."""

    num_bytes: int

    def arrived(self) -> dict[str, Tensor]:
        """All of them, once they are there."""
        ...

    def dropped(self) -> None:
        """They are not wanted; none is on its way any more when this returns."""
        ...


class WeightsProvider(Protocol):
    """Brings parameters to the device, each in the dtype of what stands for it."""

    def bring(self, waiting: Placeholders) -> dict[str, Tensor]:
        """All of these, now."""
        ...

    def send_for(self, waiting: Placeholders) -> PendingWeights | None:
        """Begin to bring them; None where nothing can come meanwhile."""
        ...


class Prefetcher:
    """Brings parts by name, each in full; `order` is a first guess at which follows which."""

    def __init__(self, carrier: WeightsProvider, order: Sequence[str]) -> None:
        self._carrier = carrier
        self._next = dict(pairwise(order))
        self._last: str | None = None
        self._sent: tuple[str, PendingWeights] | None = None

    @property
    def num_bytes(self) -> int:
        """Of what is on its way or has arrived and was not taken."""
        return 0 if self._sent is None else self._sent[1].num_bytes

    def take(self, part: str, waiting: Placeholders) -> dict[str, Tensor]:
        """The part's tensors on the device: those that were sent for, and the others now."""
        if self._last is not None:
            self._next[self._last] = part
        self._last = part
        came = self._arrived(part)
        # What waits may have been put to another precision since.
        left = {
            name: each
            for name, each in waiting.items()
            if name not in came or came[name].dtype != each.dtype
        }
        for name in left:
            came.pop(name, None)
        return {**came, **(self._carrier.bring(left) if left else {})}

    def following(self, part: str) -> str | None:
        """The part that came after this one last time."""
        return self._next.get(part)

    def send_for(self, part: str, waiting: Placeholders) -> None:
        """Begin to bring a part that will be taken next."""
        if self._sent is None and waiting:
            coming = self._carrier.send_for(waiting)
            self._sent = None if coming is None else (part, coming)

    def forget(self) -> None:
        """Let go of what was sent for."""
        self._arrived("")

    def _arrived(self, part: str) -> dict[str, Tensor]:
        """What was sent for, if it is that part; else nothing of it is left."""
        sent, self._sent = self._sent, None
        if sent is None:
            return {}
        if sent[0] == part:
            return sent[1].arrived()
        sent[1].dropped()  # or both would be there at once
        return {}


class LocalWeightsProvider:
    """A carrier that brings one parameter after the other; what comes meanwhile, in a thread."""

    def __init__(self, bring: LoadWeight, device: torch.device) -> None:
        self._bring = bring
        self._device = device
        # Copies have a stream of their own, or they would wait for what is being computed.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._worker: ThreadPoolExecutor | None = None
        if device.type in _KINDS:
            self._worker = ThreadPoolExecutor(1, "everyframe-weights")

    def bring(self, waiting: Placeholders) -> dict[str, Tensor]:
        """See `WeightsProvider`."""
        return {name: self._bring(name, each) for name, each in waiting.items()}

    def send_for(self, waiting: Placeholders) -> PendingWeights | None:
        """See `WeightsProvider`."""
        if self._worker is None:
            return None
        size = sum(each.nbytes for each in waiting.values())
        # What is computed by now must be over first. A card's work is only queued here, and the
        # parts before would all still be there: many of them, where copies are quicker than it.
        before = None
        if self._stream is not None:
            before = torch.cuda.current_stream(self._device).record_event()
        coming = self._worker.submit(self._beside, dict(waiting), before)
        return _InThread(size, coming, None if self._stream is None else self._device)

    def _beside(self, waiting: Placeholders, before: torch.cuda.Event | None) -> dict[str, Tensor]:
        if before is not None:
            before.synchronize()
        context: AbstractContextManager[object] = nullcontext()
        if self._stream is not None:
            context = torch.cuda.stream(self._stream)
        with context:
            tensors = self.bring(waiting)
        if self._stream is not None:
            self._stream.synchronize()
        return tensors


@dataclass
class _InThread:
    """What a thread brings; `device` is set where it does so in a stream of its own."""

    num_bytes: int
    coming: Future[dict[str, Tensor]]
    device: torch.device | None

    def arrived(self) -> dict[str, Tensor]:
        tensors = self.coming.result()
        if self.device is not None:
            for tensor in tensors.values():
                # Its memory belongs to the other stream, and must not be given away while this one
                # still reads it.
                tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensors

    def dropped(self) -> None:
        if not self.coming.cancel():
            wait([self.coming])
