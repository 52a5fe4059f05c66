"""Stage loops that families share: encode, denoise and decode, with events, guard and ranks.

After each denoising step the video's state is saved in its `VideoState`, so that an interrupted
run resumes there. The guard checks each state, and its repair events come before the step's event.
The family chooses the sampler and its inputs.
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
    """Plan, model and ranks of a run."""

    plan: Plan
    model: _Model
    teams: ParallelContext = ONE

    @property
    def settings(self) -> Settings:
        """The plan's settings."""
        return self.plan.settings

    def device(self, component: str) -> str:
        """Device of a component."""
        return self.plan.component(component).device

    def loaded(self, component: str) -> Generator[Event, None, Any]:
        """Load a component, and yield an event with the loading time."""
        began = time.perf_counter()
        builder = self.model.builder
        module = load_component(
            self.plan.component(component),
            partial(builder.taken, component),
            *self.model.patched_weights(component),
            outputs=builder.outputs(component),
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
        """The guard of these components in that stage; see `Guard`."""
        return Guard(self.plan, stage, parts, savings=self.model.savings, apart=apart)


@dataclass(frozen=True)
class SamplerBatch:
    """Batches of a video that `count` ranks (usually 1) compute at the same time.

    `steps` are the steps of this rank's batch; the state after the last one includes all batches.
    `end` is the number of the video's finished steps then, counting those of each batch.
    """

    steps: Iterator[SamplerStep]
    end: int
    count: int = 1


SamplerBatches = Callable[[VideoState], Iterable[SamplerBatch]]
"""Yields a video's batches from the one that contains `VideoState.step`, begun at that step."""


def run_denoising(
    stage: str, takes: Sequence[VideoState], num_steps: int, guard: Guard, lots: SamplerBatches
) -> Iterator[Event]:
    """Run each video's sampler batches and fill its `latents`.

    `num_steps` is per video. Latents of several batches are joined along the first axis.
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
    """Fill each video's `latents` with a denoiser that all its ranks call together.

    `put_on` is the denoiser's sharding, which is removed at the end. ``sample(guard, take)`` yields
    a video's steps from its current one.
    """
    with put_on:
        apart = put_on.apart if put_on.team.size > 1 else None
        guard = job.guard(stage.name, {stage.component: model}, apart)
        steps = job.settings.num_inference_steps

        def lots(take: VideoState) -> Iterator[SamplerBatch]:
            yield SamplerBatch(sample(guard, take), steps)

        yield from run_denoising(stage.name, takes, steps, guard, lots)


def _take_step(take: VideoState, step: SamplerStep, done: int, num_steps: int) -> None:
    """Store the state after a step in its video, consistent whenever others can see it."""
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
    """Run `encoded` on the lead rank and share its result with every rank.

    `what` names the wait in messages, such as "the text is handed on".
    """
    mine = (yield from encoded) if team.is_lead else None
    return team.share(mine, 0, what)


def encode_once(
    stage: str, guard: Guard, takes: Sequence[VideoState], calls: Sequence[Callable[[], _Result]]
) -> Generator[Event, None, list[_Result]]:
    """Run calls whose results are for all videos; one step each."""
    results = []
    for step, encode in enumerate(calls, start=1):
        results.append((yield from _step(stage, guard, takes[0], step, len(calls), encode)))
    return results


def encode_per_video(
    stage: str, guard: Guard, takes: Sequence[VideoState], encode: Callable[[VideoState], _Result]
) -> Generator[Event, None, list[_Result]]:
    """Run `encode` for each video, with that video's repairs; one step each."""
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
    """Pieces in which a video's latents are decoded.

    ``decode(number, step)`` decodes one, on the host, in that step of the stage.
    ``ready(number, piece)`` is called on the lead rank, piece by piece, and returns the frames
    (T, H, W, 3) in 0..1 that are finished then; usually the piece's own.
    """

    num: int
    decode: Callable[[int, int], Tensor]
    ready: Callable[[int, Tensor], Tensor] = lambda number, piece: piece


def distribute_pieces(
    team: Communicator, guard: Guard, owner: Iterable[int], decode: Callable[[int], Tensor]
) -> Iterator[tuple[Tensor, list[Event]]]:
    """Decode pieces across ranks; yield each with its events, in order, on the lead rank.

    ``decode(number)`` runs for the pieces that `owner` assigns to this rank.
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
    """Yield the frames of the video at index `place`; several ranks share its pieces."""
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
    """8-bit frames as float32 in 0..1."""
    return torch.from_numpy(frames).to(torch.float32) / 255


def as_frames(pixels_TCHW: Tensor) -> Tensor:
    """Frames (T, H, W, 3) in 0..1 on the host, from pixels around -1..1."""
    frames_THWC = rearrange(pixels_TCHW, "t c h w -> t h w c").to("cpu", torch.float32)
    return (frames_THWC / 2 + 0.5).clamp(0, 1).contiguous()


class GuardedDenoiser:
    """A guarded ``denoise``, which `make` builds again whenever the guard has changed a module.

    It caches results of modules for the text, so a change makes them stale. It is built with the
    guard's current `settings`, also after a memory fallback. `start` steps are already done.
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
