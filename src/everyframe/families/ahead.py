"""Weights brought to the device one part ahead: while a part computes, the next one is on its way.

Which part is next is learnt from the last pass; a wrong guess costs its way and nothing else. Not
here: which parts there are and when they come and go (`offload`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

Bring = Callable[[str, nn.Parameter], Tensor]
"""Brings what waits under that dotted name to the device, in the dtype of what stands for it."""

#: Where copies in another thread are known to be safe beside the computation.
_KINDS = ("cpu", "cuda")


@dataclass(frozen=True)
class _Sent:
    """A part on its way, and what it takes."""

    part: str
    tensors: Future[dict[str, Tensor]]
    num_bytes: int


class Ahead:
    """Brings parts by name, each in full; `order` is a first guess at which follows which."""

    def __init__(self, bring: Bring, device: torch.device, order: Sequence[str]) -> None:
        self._bring = bring
        self._device = device
        self._next = dict(pairwise(order))
        self._last: str | None = None
        self._sent: _Sent | None = None
        # Copies have a stream of their own, or they would wait for what is being computed.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._worker: ThreadPoolExecutor | None = None
        if device.type in _KINDS:
            self._worker = ThreadPoolExecutor(1, "everyframe-weights")

    @property
    def num_bytes(self) -> int:
        """Of what is on its way or has arrived and was not taken."""
        return 0 if self._sent is None else self._sent.num_bytes

    def take(self, part: str, waiting: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """The part's tensors on the device: those that were sent for, and the others now."""
        if self._last is not None:
            self._next[self._last] = part
        self._last = part
        sent, self._sent = self._sent, None
        came: dict[str, Tensor] = {}
        if sent is not None and sent.part == part:
            came = sent.tensors.result()
        elif sent is not None and not sent.tensors.cancel():
            wait([sent.tensors])  # or both would be there at once
        del sent
        return {name: self._taken(came, name, each) for name, each in waiting.items()}

    def following(self, part: str) -> str | None:
        """The part that came after this one last time."""
        return self._next.get(part)

    def send_for(self, part: str, waiting: Mapping[str, nn.Parameter]) -> None:
        """Begin to bring a part that will be taken next."""
        if self._worker is None or self._sent is not None or not waiting:
            return
        size = sum(each.nbytes for each in waiting.values())
        self._sent = _Sent(part, self._worker.submit(self._all, dict(waiting)), size)

    def forget(self) -> None:
        """Let go of what was sent for."""
        self._sent = None

    def _taken(self, came: Mapping[str, Tensor], name: str, waiting: nn.Parameter) -> Tensor:
        tensor = came.get(name)
        # What waits may have been put to another precision since.
        if tensor is None or tensor.dtype != waiting.dtype:
            return self._bring(name, waiting)
        if self._stream is not None:
            # Its memory belongs to the other stream, and must not be given away while this one
            # still reads it.
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    def _all(self, waiting: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        context: AbstractContextManager[object] = nullcontext()
        if self._stream is not None:
            context = torch.cuda.stream(self._stream)
        with context:
            tensors = {name: self._bring(name, each) for name, each in waiting.items()}
        if self._stream is not None:
            self._stream.synchronize()
        return tensors
