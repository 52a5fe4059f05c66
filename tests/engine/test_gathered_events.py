"""Rank 0 yields what the other video groups of torchrun send it, in their order."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from everyframe.core.events import (
    AudioDecoded,
    Event,
    FramesDecoded,
    Note,
    Preview,
    Step,
    VideoDone,
)
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


def test_several_videos_of_one_call_reach_rank_0_apart() -> None:
    box, frames = Mailbox(), np.zeros((2, 4, 4, 3), np.uint8)
    samples = np.zeros((1, 8), np.float32)
    made: list[Event] = []
    for index in (0, 1):
        made += [AudioDecoded(8, 16_000, 0.5, samples, index), FramesDecoded(8, 2, frames, index),
                 VideoDone(8, 2, {"seed": 8, "index": index}, index)]  # fmt: skip
    assert [*gather_events(iter(made), box.of(1))] == made
    came = [*gather_events(iter(()), box.of(0))]
    assert [each.to_json() for each in came] == [each.to_json() for each in made]


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
