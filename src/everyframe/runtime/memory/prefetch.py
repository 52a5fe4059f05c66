"""Prefetch offloaded weights: copy the next block while the current one computes.

The next block is predicted from the order of the previous pass; a wrong prediction costs one
wasted copy. On CUDA, copies run on their own stream in a worker thread. A `WeightsProvider` says
where weights come from: `LocalWeightsProvider` is for host memory and files, `weight_sharding` has
one for other ranks. `offload` decides which blocks exist and when they come and go.
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

from everyframe.hardware.thread_state import use_card

Placeholders = Mapping[str, nn.Parameter]
"""Stand-ins in the module for parameters that are elsewhere, by dotted name."""

LoadWeight = Callable[[str, nn.Parameter], Tensor]
"""Loads the parameter of that name onto the device, in the dtype of its stand-in."""

#: Device types on which copies in another thread are safe during computation.
_KINDS = ("cpu", "cuda")


class PendingWeights(Protocol):
    """Weights in transfer, and the bytes that they take on the device."""

    num_bytes: int

    def wait(self) -> dict[str, Tensor]:
        """Wait for the weights and return them."""
        ...

    def cancel(self) -> None:
        """Cancel; no transfer is in progress any more when this returns."""
        ...


class WeightsProvider(Protocol):
    """Source of offloaded parameters; each comes in the dtype of its stand-in."""

    def bring(self, waiting: Placeholders) -> dict[str, Tensor]:
        """Load all of these now."""
        ...

    def send_for(self, waiting: Placeholders) -> PendingWeights | None:
        """Start a transfer in the background; None if the device can't do that."""
        ...


class Prefetcher:
    """Load blocks by name, one ahead; `order` is the first prediction of what follows what."""

    def __init__(self, provider: WeightsProvider, order: Sequence[str]) -> None:
        self._provider = provider
        self._next = dict(pairwise(order))
        self._last: str | None = None
        self._sent: tuple[str, PendingWeights] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that are in transfer, or have arrived and are not used yet."""
        return 0 if self._sent is None else self._sent[1].num_bytes

    def take(self, part: str, waiting: Placeholders) -> dict[str, Tensor]:
        """Return the block's tensors on the device: prefetched ones, and the rest loaded now."""
        if self._last is not None:
            self._next[self._last] = part
        self._last = part
        came = self._take_prefetched(part)
        # The waiting weights may have been upcast since.
        left = {
            name: each
            for name, each in waiting.items()
            if name not in came or came[name].dtype != each.dtype
        }
        for name in left:
            came.pop(name, None)
        return {**came, **(self._provider.bring(left) if left else {})}

    def following(self, part: str) -> str | None:
        """The block that followed this one last time."""
        return self._next.get(part)

    def send_for(self, part: str, waiting: Placeholders) -> None:
        """Start prefetching a block."""
        if self._sent is None and waiting:
            coming = self._provider.send_for(waiting)
            self._sent = None if coming is None else (part, coming)

    def forget(self) -> None:
        """Drop the prefetched weights."""
        self._take_prefetched("")

    def _take_prefetched(self, part: str) -> dict[str, Tensor]:
        """The prefetched weights if they are of that block; otherwise they are dropped."""
        sent, self._sent = self._sent, None
        if sent is None:
            return {}
        if sent[0] == part:
            return sent[1].wait()
        sent[1].cancel()  # or both would be there at once
        return {}


class LocalWeightsProvider:
    """Provider that loads one parameter after the other, in a thread when it prefetches."""

    def __init__(self, bring: LoadWeight, device: torch.device) -> None:
        self._bring = bring
        self._device = device
        # Copies have their own stream, or they would wait for the computation.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._worker: ThreadPoolExecutor | None = None
        if device.type in _KINDS:
            # Leaving a stream's block selects the thread's own card again: by default the first,
            # where it would create a context of hundreds of MB.
            card = None if self._stream is None else self._stream.device.index
            self._worker = ThreadPoolExecutor(1, "everyframe-weights", use_card, (card,))

    def bring(self, waiting: Placeholders) -> dict[str, Tensor]:
        """See `WeightsProvider`."""
        return {name: self._bring(name, each) for name, each in waiting.items()}

    def send_for(self, waiting: Placeholders) -> PendingWeights | None:
        """See `WeightsProvider`."""
        if self._worker is None:
            return None
        size = sum(each.nbytes for each in waiting.values())
        # Queued computation must finish first: otherwise all earlier blocks would still be on the
        # card, many if copies are faster than it.
        before = None
        if self._stream is not None:
            before = torch.cuda.current_stream(self._device).record_event()
        coming = self._worker.submit(self._beside, dict(waiting), before)
        return _LoadingWeights(size, coming, None if self._stream is None else self._device)

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
class _LoadingWeights:
    """Weights that a thread loads; `device` is set if it uses a CUDA stream of its own."""

    num_bytes: int
    coming: Future[dict[str, Tensor]]
    device: torch.device | None

    def wait(self) -> dict[str, Tensor]:
        tensors = self.coming.result()
        if self.device is not None:
            for tensor in tensors.values():
                # Its memory belongs to the other stream, and must not be reused while this one
                # reads it.
                tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensors

    def cancel(self) -> None:
        if not self.coming.cancel():
            wait([self.coming])
