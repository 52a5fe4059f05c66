"""What stages do that encode or decode: calls under a guard, results handed on, pieces dealt out.

One rank encodes what all need (texts, pictures) and tells the others; pieces of latents are decoded
by all and come to the first. Not here: what is encoded and which pieces there are, which is the
family's, and denoising (`stepping.py`). Read next: `job.py`, `everyframe.parallel.pieces`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from einops import rearrange
from torch import Tensor

from everyframe.core.events import Event, Frames, Step, event_of
from everyframe.families.family import Take
from everyframe.families.guarding import Guard
from everyframe.parallel.pieces import in_order, owners
from everyframe.parallel.team import Team

_Result = TypeVar("_Result")


def from_lead(
    team: Team, encoded: Generator[Event, None, Sequence[Tensor]], what: str
) -> Generator[Event, None, list[Tensor]]:
    """On every rank what `encoded` makes on the first; elsewhere it is not begun.

    `what` is said of the wait, such as "the text is handed on".
    """
    mine = (yield from encoded) if team.is_lead else None
    return team.share(mine, 0, what)


def encoded_once(
    stage: str, guard: Guard, takes: Sequence[Take], calls: Sequence[Callable[[], _Result]]
) -> Generator[Event, None, list[_Result]]:
    """The result of each call, which is for all takes: a step each."""
    results = []
    for step, encode in enumerate(calls, start=1):
        results.append((yield from _step(stage, guard, takes[0], step, len(calls), encode)))
    return results


def encoded_each(
    stage: str, guard: Guard, takes: Sequence[Take], encode: Callable[[Take], _Result]
) -> Generator[Event, None, list[_Result]]:
    """What `encode` makes for each take, which has repairs of its own: a step each."""
    results = []
    for step, take in enumerate(takes, start=1):
        guard.take(take)
        call = partial(encode, take)
        results.append((yield from _step(stage, guard, take, step, len(takes), call)))
    return results


def _step(
    stage: str, guard: Guard, take: Take, step: int, total: int, call: Callable[[], _Result]
) -> Generator[Event, None, _Result]:
    begun = time.perf_counter()
    result = guard.call(step, call)
    yield from guard.events()
    yield Step(stage, step, total, take.seed, time.perf_counter() - begun)
    return result


@dataclass(frozen=True)
class Pieces:
    """The pieces that a take's latents are decoded in.

    ``decode(number, step)`` makes one, on the host, in that step of the stage.
    ``ready(number, piece)`` is asked on the first rank, piece by piece, and gives the frames
    (T, H, W, 3) in 0..1 that are finished then; as a rule the piece's own.
    """

    num: int
    decode: Callable[[int, int], Tensor]
    ready: Callable[[int, Tensor], Tensor] = lambda number, piece: piece


def dealt_out(
    team: Team, guard: Guard, owner: Iterable[int], decode: Callable[[int], Tensor]
) -> Iterator[tuple[Tensor, list[Event]]]:
    """What `decode` makes of each piece and what happened meanwhile, in order, on the first rank.

    `decode(number)` is called for a rank's own pieces, those that `owner` says are its.
    """

    def make(number: int) -> tuple[Tensor, list[Any]]:
        made = decode(number)
        return made, [event.to_json() for event in guard.events()]

    for made, told in in_order(team, owner, make, "frames are handed over"):
        yield made, [event_of(each) for each in told]


def decoded(
    stage: str, takes: Sequence[Take], place: int, guard: Guard, team: Team, pieces: Pieces
) -> Iterator[Event]:
    """Yield the frames of the take at `place`; several ranks deal out its pieces."""
    take, first, begun = takes[place], place * pieces.num + 1, time.perf_counter()
    guard.take(take)

    def decode(number: int) -> Tensor:
        return pieces.decode(number, first + number)

    made = dealt_out(team, guard, owners(pieces.num, team.weights), decode)
    for number, (piece, told) in enumerate(made):
        seconds = time.perf_counter() - begun
        yield from told
        yield Step(stage, first + number, len(takes) * pieces.num, take.seed, seconds)
        frames = pieces.ready(number, piece)
        if len(frames):
            yield Frames(take.seed, len(frames), frames.numpy())
        begun = time.perf_counter()
    take.latents = None


def as_floats(frames: Any) -> Tensor:
    """8-bit frames in 0..1, float32."""
    return torch.from_numpy(frames).to(torch.float32) / 255


def as_frames(pixels_TCHW: Tensor) -> Tensor:
    """Frames (T, H, W, 3) in 0..1 of pixels around -1..1, on the host."""
    frames_THWC = rearrange(pixels_TCHW, "t c h w -> t h w c").to("cpu", torch.float32)
    return (frames_THWC / 2 + 0.5).clamp(0, 1).contiguous()
