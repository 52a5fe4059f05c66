"""Rank 0 yields what the other video groups of torchrun send it, in their order."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from everyframe.core.events import Event, FramesDecoded, Note, Preview, Step, VideoDone
from everyframe.engine.distributed import gather_events


class Mailbox:
    """A world of two ranks; what rank 1 sends waits here for rank 0."""

    def __init__(self) -> None:
        self.sent: deque[Any] = deque()

    def of(self, rank: int) -> Any:
        def send(tensors: list[Any], data: Any, to: int, what: str) -> Any:
            assert (rank, to) == (1, 0)
            self.sent.append((tensors, data))
            return SimpleNamespace(wait=lambda: None)

        return SimpleNamespace(
            parallel=SimpleNamespace(
                world=SimpleNamespace(
                    rank=rank, is_lead=rank == 0, send=send,
                    receive=lambda source, what: self.sent.popleft(),
                )
            ),
            sources=(1,),
        )  # fmt: skip


def test_previews_of_other_groups_reach_rank_0() -> None:
    box = Mailbox()
    pictures = [Preview(8, step, 2, 256, 144, bytes([0, 255, step])) for step in (1, 2)]
    frames = np.full((2, 4, 4, 3), 0.5, np.float32)
    made: list[Event] = [
        Note("a note"), pictures[0], Step("denoise", 1, 2, 8, 0.1), pictures[1],
        FramesDecoded(8, 2, frames), VideoDone(8, 2, {"seed": 8}),
    ]  # fmt: skip
    assert [*gather_events(iter(made), box.of(1))] == made
    own = Note("rank 0 is done")
    note, *previews, decoded, done = [*gather_events(iter([own]), box.of(0))][1:]
    assert (note, previews) == (made[0], pictures)
    assert isinstance(decoded, FramesDecoded)
    assert decoded.frames.dtype == np.uint8
    assert done == made[-1]
    assert not box.sent
