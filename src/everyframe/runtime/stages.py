"""The loop that every denoising stage has: each take through its sampler, each step an event.

After each step the take says how far it is, so that a run that is broken off goes on from there.
Each state is looked at by the stage's guard, and what that repaired comes before the step's event.

Not here: which sampler, and what it is given; that is the family's. Read next: `interface.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn

from everyframe.core.events import ComponentLoaded, Event, FramesDecoded, Step, event_of
from everyframe.core.plan import Plan, Settings
from everyframe.numerics.tensor_stats import value_range
from everyframe.parallel.communicator import ONE, Communicator, ParallelContext
from everyframe.parallel.ordered_map import assign_pieces, run_in_order
from everyframe.runtime.guard import Guard
from everyframe.runtime.interface import Stage, VideoState
from everyframe.runtime.loading import load_component
from everyframe.runtime.model_sharding import ModelPatch
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.samplers.base import Step as SamplerStep

_Model = TypeVar("_Model", bound=NativeModelSpec[Any, Any, Any])


@dataclass(frozen=True)
class StageContext(Generic[_Model]):
    """The plan, the model and the ranks of a run."""

    plan: Plan
    model: _Model
    teams: ParallelContext = ONE

    @property
    def settings(self) -> Settings:
        """The plan's settings."""
        return self.plan.settings

    def device(self, component: str) -> str:
        """Where a component runs."""
        return self.plan.component(component).device

    def loaded(self, component: str) -> Generator[Event, None, Any]:
        """A component with its weights, and an event that says how long that took."""
        began = time.perf_counter()
        sizes = self.model.sizes
        module = load_component(
            self.plan.component(component),
            partial(sizes.taken, component),
            *self.model.weights(component),
            outputs=sizes.outputs(component),
            supply=self.teams.supply,
        )
        yield ComponentLoaded(component, time.perf_counter() - began)
        return module

    def guard(
        self,
        stage: str,
        parts: Mapping[str, nn.Module],
        apart: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> Guard:
        """What watches these components in that stage; see `Guard`."""
        return Guard(self.plan, stage, parts, savings=self.model.savings, apart=apart)


@dataclass(frozen=True)
class SamplerBatch:
    """Batches of a take that are worked on at the same time, by `count` ranks; one as a rule.

    `steps` are those of this rank's batch, and the state after the last is that of them all. When
    they are over, `end` steps of the take are done: those of each batch count.
    """

    steps: Iterator[SamplerStep]
    end: int
    count: int = 1


SamplerBatches = Callable[[VideoState], Iterable[SamplerBatch]]
"""A take's lots from that one on which `VideoState.step` is in, begun at that step."""


def run_denoising(
    stage: str, takes: Sequence[VideoState], num_steps: int, guard: Guard, lots: SamplerBatches
) -> Iterator[Event]:
    """Fill each take's `latents` with what its samplers make of it, one lot after the other.

    `num_steps` is of one take. The latents of several batches are joined along the first axis.
    """
    for number, take in enumerate(takes):
        if take.step == num_steps:
            continue  # done before the run was broken off
        begun = time.perf_counter()
        guard.take(take)
        for lot in lots(take):
            for step in lot.steps:
                guard.latents(step.index + 1, step.x)
                yield from guard.events()
                left = step.num_steps - 1 - step.index
                _take_step(take, step, lot.end if not left else take.step + 1, num_steps)
                now = time.perf_counter()
                # Steps of batches that other ranks have count as they go on, too.
                done = number * num_steps + lot.end - left * lot.count
                yield Step(stage, done, len(takes) * num_steps, take.seed, now - begun)
                begun = now


def run_sharded_denoising(
    stage: Stage,
    job: StageContext[Any],
    model: nn.Module,
    put_on: ModelPatch,
    takes: Sequence[VideoState],
    sample: Callable[[Guard, VideoState], Iterator[SamplerStep]],
) -> Iterator[Event]:
    """Fill each take's `latents` by a denoiser that all ranks of a video call together.

    `put_on` is what was put on it for them, and is taken off. ``sample(guard, take)`` are a take's
    steps, from that one on which it is in.
    """
    with put_on:
        apart = put_on.apart if put_on.team.size > 1 else None
        guard = job.guard(stage.name, {stage.component: model}, apart)
        steps = job.settings.num_inference_steps

        def lots(take: VideoState) -> Iterator[SamplerBatch]:
            yield SamplerBatch(sample(guard, take), steps)

        yield from run_denoising(stage.name, takes, steps, guard, lots)


def _take_step(take: VideoState, step: SamplerStep, done: int, num_steps: int) -> None:
    """Put the state after a step into its take, whole at every moment in which others see it."""
    take.step = done
    take.latents, take.memory = step.x, step.memory
    if step.index + 1 == step.num_steps:
        take.finished = (*take.finished, step.x.to("cpu"))
        take.latents = take.memory = None
    if done == num_steps:
        take.latents = torch.cat(take.finished) if len(take.finished) > 1 else take.finished[0]
        take.finished = ()


_Result = TypeVar("_Result")


def on_lead_rank(
    team: Communicator, encoded: Generator[Event, None, Sequence[Tensor]], what: str
) -> Generator[Event, None, list[Tensor]]:
    """On every rank what `encoded` makes on the first; elsewhere it is not begun.

    `what` is said of the wait, such as "the text is handed on".
    """
    mine = (yield from encoded) if team.is_lead else None
    return team.share(mine, 0, what)


def encode_once(
    stage: str, guard: Guard, takes: Sequence[VideoState], calls: Sequence[Callable[[], _Result]]
) -> Generator[Event, None, list[_Result]]:
    """The result of each call, which is for all takes: a step each."""
    results = []
    for step, encode in enumerate(calls, start=1):
        results.append((yield from _step(stage, guard, takes[0], step, len(calls), encode)))
    return results


def encode_per_video(
    stage: str, guard: Guard, takes: Sequence[VideoState], encode: Callable[[VideoState], _Result]
) -> Generator[Event, None, list[_Result]]:
    """What `encode` makes for each take, which has repairs of its own: a step each."""
    results = []
    for step, take in enumerate(takes, start=1):
        guard.take(take)
        call = partial(encode, take)
        results.append((yield from _step(stage, guard, take, step, len(takes), call)))
    return results


def _step(
    stage: str, guard: Guard, take: VideoState, step: int, total: int, call: Callable[[], _Result]
) -> Generator[Event, None, _Result]:
    begun = time.perf_counter()
    result = guard.call(step, call)
    yield from guard.events()
    yield Step(stage, step, total, take.seed, time.perf_counter() - begun)
    return result


@dataclass(frozen=True)
class DecodePieces:
    """The pieces that a take's latents are decoded in.

    ``decode(number, step)`` makes one, on the host, in that step of the stage.
    ``ready(number, piece)`` is asked on the first rank, piece by piece, and gives the frames
    (T, H, W, 3) in 0..1 that are finished then; as a rule the piece's own.
    """

    num: int
    decode: Callable[[int, int], Tensor]
    ready: Callable[[int, Tensor], Tensor] = lambda number, piece: piece


def distribute_pieces(
    team: Communicator, guard: Guard, owner: Iterable[int], decode: Callable[[int], Tensor]
) -> Iterator[tuple[Tensor, list[Event]]]:
    """What `decode` makes of each piece and what happened meanwhile, in order, on the first rank.

    `decode(number)` is called for a rank's own pieces, those that `owner` says are its.
    """

    def make(number: int) -> tuple[Tensor, list[Any]]:
        made = decode(number)
        return made, [event.to_json() for event in guard.events()]

    for made, told in run_in_order(team, owner, make, "frames are handed over"):
        yield made, [event_of(each) for each in told]


def decode_pieces(
    stage: str,
    takes: Sequence[VideoState],
    place: int,
    guard: Guard,
    team: Communicator,
    pieces: DecodePieces,
) -> Iterator[Event]:
    """Yield the frames of the take at `place`; several ranks deal out its pieces."""
    take, first, begun = takes[place], place * pieces.num + 1, time.perf_counter()
    guard.take(take)

    def decode(number: int) -> Tensor:
        return pieces.decode(number, first + number)

    made = distribute_pieces(team, guard, assign_pieces(pieces.num, team.weights), decode)
    for number, (piece, told) in enumerate(made):
        seconds = time.perf_counter() - begun
        yield from told
        yield Step(stage, first + number, len(takes) * pieces.num, take.seed, seconds)
        frames = pieces.ready(number, piece)
        if len(frames):
            yield FramesDecoded(take.seed, len(frames), frames.numpy())
        begun = time.perf_counter()
    take.latents = None


def as_floats(frames: Any) -> Tensor:
    """8-bit frames in 0..1, float32."""
    return torch.from_numpy(frames).to(torch.float32) / 255


def as_frames(pixels_TCHW: Tensor) -> Tensor:
    """Frames (T, H, W, 3) in 0..1 of pixels around -1..1, on the host."""
    frames_THWC = rearrange(pixels_TCHW, "t c h w -> t h w c").to("cpu", torch.float32)
    return (frames_THWC / 2 + 0.5).clamp(0, 1).contiguous()


class GuardedDenoiser:
    """``denoise`` as `make` makes it, which is made again whenever its guard changed a module.

    For what it keeps of a text was computed by modules, too. It is made with the guard's `settings`
    of then, also where memory ran out. `start` steps were done before.
    """

    def __init__(
        self, guard: Guard, make: Callable[[], Callable[..., Tensor]], start: int = 0
    ) -> None:
        self._guard = guard
        self._make = make
        self._denoise = guard.spared(start + 1, make)
        self._step = start

    def __call__(self, *given: Tensor) -> Tensor:
        self._step += 1

        def again() -> Tensor:
            self._denoise = self._make()
            return self._denoise(*given)

        # A run that goes on from a later step has the repairs that its first step asked for.
        probe = self._guard.probe() if self._step == 1 else None
        with probe or nullcontext():
            answer = self._guard.spared(self._step, lambda: self._denoise(*given), again)
        seen = value_range(answer)
        if seen.is_finite:
            answer = self._guard.probed(self._step, probe, answer, again)
        if not seen.is_finite:
            with self._guard.apart():
                answer = self._guard.repaired(self._step, again)
            seen = value_range(answer)
        self._guard.answered(self._step, seen)
        return answer
