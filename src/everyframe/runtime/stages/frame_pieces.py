"""Pieces of decoded frames: shared among ranks, and as floats from pixels and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from everyframe.core.events import Event, event_of
from everyframe.parallel.communicator import Communicator
from everyframe.parallel.ordered_map import run_in_order
from everyframe.runtime.stages.guard import Guard


def distribute_pieces(
    group: Communicator, guard: Guard, owner: Iterable[int], decode: Callable[[int], Tensor]
) -> Iterator[tuple[Tensor, list[Event]]]:
    """Decode pieces across ranks; yield each with its events, in order, on the lead rank.

    ``decode(number)`` runs for the pieces that `owner` assigns to this rank.
    """

    def make(number: int) -> tuple[Tensor, list[Any]]:
        made = decode(number)
        return made, [event.to_json() for event in guard.events()]

    for made, events in run_in_order(group, owner, make, "frames are handed over"):
        yield made, [event_of(each) for each in events]


def as_floats(frames: Any) -> Tensor:
    """8-bit frames as float32 in 0..1."""
    return torch.from_numpy(frames).to(torch.float32) / 255


def as_frames(pixels_TCHW: Tensor) -> Tensor:
    """Frames (T, H, W, 3) in 0..1 on the host, from pixels around -1..1."""
    frames_THWC = rearrange(pixels_TCHW, "t c h w -> t h w c").to("cpu", torch.float32)
    return (frames_THWC / 2 + 0.5).clamp(0, 1).contiguous()
