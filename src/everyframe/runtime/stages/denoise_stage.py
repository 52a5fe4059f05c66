"""The template of a denoising stage, and the guarded denoiser that its sampler calls.

After each step the video's state is saved in its `VideoState`, so that an interrupted run resumes
there. The guard checks each state, and its repair events come before the step's event. The family
chooses the sampler and its inputs.
"""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from everyframe.core.events import Events, Note, Step
from everyframe.core.plan import Settings
from everyframe.core.quality import SamplingMethod
from everyframe.fast_paths.modules.deep_features import DeepFeatures
from everyframe.numerics.tensor_stats import value_range
from everyframe.parallel.communicator import SingleRank
from everyframe.runtime.batch_member import MEMBER
from everyframe.runtime.interface import VideoState
from everyframe.runtime.model_sharding import ModelPatch
from everyframe.runtime.stages.deep_cache import DeepCachedDenoise
from everyframe.runtime.stages.guard import Guard
from everyframe.runtime.stages.templates import ComponentStage, StageContext
from everyframe.samplers import multistep
from everyframe.samplers.base import Step as SamplerStep
from everyframe.samplers.error_budget import ErrorBudget
from everyframe.samplers.guidance import GuidanceShare
from everyframe.samplers.multistep import DiffusionPath
from everyframe.samplers.prediction import PredictedDenoise

_Context = TypeVar("_Context", bound=StageContext[Any])
_Inputs = TypeVar("_Inputs")


@dataclass(frozen=True)
class SamplerBatch:
    """Batches of a video that `count` ranks (usually 1) compute at the same time.

    `steps` are the steps of this rank's batch; the state after the last one includes all batches.
    `end` is the number of the video's finished steps then, counting those of each batch.
    """

    steps: Iterator[SamplerStep]
    end: int
    count: int = 1


class DenoiseStage(ComponentStage[_Context, _Inputs]):
    """Denoise each video in one batch or several, one step a sampler step.

    The stage resumes at any step. Its inputs hold what sampler and denoiser begin with.
    """

    name = "denoise"
    is_resumable = True

    @abstractmethod
    def denoiser(
        self, modules: Mapping[str, Any], inputs: _Inputs, device: str, settings: Settings
    ) -> Callable[..., Tensor]:
        """The ``denoise(x, t)`` of these inputs."""

    @abstractmethod
    def sample(
        self, denoise: Callable[..., Tensor], inputs: _Inputs, start: int
    ) -> Iterator[SamplerStep]:
        """The sampler's steps from `start` on."""

    def path(self, inputs: _Inputs) -> DiffusionPath:
        """The sampler's noise levels, for a family whose spec lists multistep solvers."""
        raise AssertionError(f"{type(self).__module__} lists no solvers")

    def complete(self, step: SamplerStep, inputs: _Inputs) -> SamplerStep:
        """A solver's step as `sample` gives it, where that changes the last one."""
        return step

    def shard(self, modules: Mapping[str, Any]) -> ModelPatch:
        """Patch the denoiser for the run, until removed; nothing by default."""
        return ModelPatch(SingleRank(), 1)

    @property
    def steps_per_video(self) -> int:
        """Number of steps of one video."""
        return self.context.settings.num_inference_steps

    @property
    def steps_per_batch(self) -> int:
        """Number of steps of one batch of a video."""
        return self.steps_per_video

    @property
    def components(self) -> tuple[str, ...]:
        """The components that denoise, in the order in which they are loaded."""
        return (self.component,)

    @abstractmethod
    def batches(
        self, modules: Mapping[str, Any], guard: Guard, video: VideoState
    ) -> Iterable[SamplerBatch]:
        """The video's batches from the one that contains its current step, begun at that step."""

    def guarded_steps(
        self,
        modules: Mapping[str, Any],
        guard: Guard,
        inputs: _Inputs,
        start: int,
        memory: Any = None,
    ) -> Iterator[SamplerStep]:
        """The sampler's steps from `start` on, with a denoiser that the guard watches.

        `memory` is the state of a lossy method after the step before.
        """
        device, method = self.context.device(self.component), self.context.settings.method
        is_cache = method is not None and method.is_cache
        features: DeepFeatures | None = None
        if is_cache:  # what a rank computes alone has other sizes than its share
            features = DeepFeatures(modules[self.component], lambda: guard.ranks.is_unsharded)
        share = GuidanceShare() if method is not None and method.holds_guidance else None

        def make(**changed: Any) -> Callable[..., Tensor]:
            settings = replace(guard.settings, **changed)
            denoise: Any = self.denoiser(modules, inputs, device, settings)
            if share is not None:
                denoise.share = share
            return denoise if features is None else features.beginning(denoise)

        if method is None:
            return self.sample(GuardedDenoiser(guard, make, start), inputs, start)
        make_unguided = partial(make, guidance_scale=1.0)
        is_guided = start < method.guided_steps(self.steps_per_batch)
        guarded = GuardedDenoiser(guard, make if is_guided else make_unguided, start)
        resumed = {"start": start, "memory": memory, "agree": self._agree}
        if share is not None:
            return self._held_steps(guarded, share, inputs, resumed)
        return self._lossy_steps(guarded, make_unguided, features, inputs, resumed)

    def _held_steps(
        self,
        guarded: GuardedDenoiser,
        share: GuidanceShare,
        inputs: Any,
        resumed: Mapping[str, Any],
    ) -> Iterator[SamplerStep]:
        """Steps of a solver that holds what guidance adds; none is held past the error's limit."""
        memory = resumed["memory"]
        held = frozenset(self._method.held_steps(self.steps_per_batch))
        if memory is not None:
            share.value = memory["guidance"]
        is_exact = memory is not None and memory["error"] < 0

        def denoise(*given: Tensor) -> Tensor:
            share.is_held = guarded.num_done in held and not is_exact
            return guarded(*given)

        for step in self._solver_steps(denoise, inputs, resumed):
            yield replace(step, memory={**step.memory, "guidance": share.value})
            guarded.num_done, is_exact = step.index + 1, step.memory["error"] < 0

    def _lossy_steps(
        self,
        guarded: GuardedDenoiser,
        make_unguided: Callable[[], Callable[..., Tensor]],
        features: DeepFeatures | None,
        inputs: _Inputs,
        resumed: Mapping[str, Any],
    ) -> Iterator[SamplerStep]:
        """Steps of a method that computes the denoiser in some of them."""
        method, num_steps = self._method, self.steps_per_batch
        predicted: PredictedDenoise | DeepCachedDenoise | None = None
        if method.is_solver:
            steps = self._solver_steps(guarded, inputs, resumed)
        else:
            if features is not None:
                predicted = DeepCachedDenoise(
                    guarded, features, method, num_steps, repeat=guarded.repeat, **resumed
                )
            else:
                skipped = guarded.check_prediction
                predicted = PredictedDenoise(guarded, method, num_steps, skipped=skipped, **resumed)
            steps = self._predicted_steps(predicted, inputs, resumed["start"])
        with features or nullcontext():
            for step in steps:
                yield step
                guarded.num_done = step.index + 1
                if guarded.num_done == method.guided_steps(num_steps) < num_steps:
                    guarded.make_by(make_unguided)
                    if isinstance(predicted, DeepCachedDenoise):
                        predicted.forget()

    def _solver_steps(
        self, denoise: Callable[..., Tensor], inputs: Any, resumed: Mapping[str, Any]
    ) -> Iterator[SamplerStep]:
        path = self.path(inputs)
        for step in multistep.sample(denoise, inputs.x, path, self._method, **resumed):
            yield self.complete(step, inputs)

    def _predicted_steps(
        self, predicted: PredictedDenoise | DeepCachedDenoise, inputs: _Inputs, start: int
    ) -> Iterator[SamplerStep]:
        for step in self.sample(predicted, inputs, start):
            own = {} if step.memory is None else {"sampler": step.memory}
            memory = {**predicted.memory, **own}
            yield replace(step, memory=memory, note=predicted.take_note())
            predicted.step = step.index + 1

    @property
    def _method(self) -> SamplingMethod:
        """The request's lossy method."""
        method = self.context.settings.method
        assert method is not None, "an exact run has none"
        return method

    def _agree(self, is_over: bool) -> bool:
        """What the lead rank sees: all ranks of a video take the same steps."""
        group = self.context.parallel.video_group
        return bool(group.broadcast_object(is_over, 0, "the error budget"))

    def dry_run(self, modules: Mapping[str, Any], device: str) -> object:
        """Make the first step on example inputs."""
        with self.shard(modules):
            inputs = self.examples(device)
            denoise = self.denoiser(modules, inputs, device, self.context.settings)
            return next(self.sample(denoise, inputs, 0)).x

    def num_steps(self, num_videos: int) -> int:
        """The steps of all videos."""
        return num_videos * self.steps_per_video

    def run(self, videos: Sequence[VideoState]) -> Events:
        """Fill each video's `latents`; those of several batches are joined along the first axis."""
        modules: dict[str, Any] = {}
        for name in self.components:
            modules[name] = yield from self.context.load(name)
        num_steps, total = self.steps_per_video, self.num_steps(len(videos))
        previewer = self.context.previewer()
        member = MEMBER.get()
        shared = None if member is None else member.denoising(modules, self.shard)
        with shared or self.shard(modules) as patch:
            unsharded = patch.unsharded if patch.group.size > 1 else None
            guard = self.context.guard(self.name, modules, unsharded, patch.group)
            for number, video in enumerate(videos):
                if video.step == num_steps:
                    continue  # done before the run was interrupted
                begun = time.perf_counter()
                guard.start_video(video)
                for batch in self.batches(modules, guard, video):
                    for step in batch.steps:
                        guard.latents(step.index + 1, step.x)
                        yield from self._notes(video, step)
                        yield from guard.events()
                        left = step.num_steps - 1 - step.index
                        end = video.step + 1 if left else batch.end
                        _store_step(video, step, end, num_steps)
                        now = time.perf_counter()
                        # Steps of other ranks' batches count as they continue.
                        done = number * num_steps + batch.end - left * batch.count
                        yield Step(self.name, done, total, video.seed, now - begun)
                        if previewer is not None:
                            progress = (video.step, num_steps)
                            preview = previewer.preview(video.seed, *progress, step.clean)
                            yield from () if preview is None else (preview,)
                        begun = now
        for video in videos:
            video.conditioning = None

    def _notes(self, video: VideoState, step: SamplerStep) -> Events:
        """What a lossy method says of a step, and of its error after the last one."""
        if step.note is not None:
            yield Note(step.note, in_record=True, seed=video.seed)
        method = self.context.settings.method
        if method is not None and step.index + 1 == step.num_steps:
            yield ErrorBudget(method.limit, error=step.memory["error"]).event(video.seed)


class VideoDenoiseStage(DenoiseStage[_Context, _Inputs]):
    """Denoise each video as a whole; its ranks call the denoiser together, with `sharding`."""

    sharding: ClassVar[type[Any]]  # a `ModelPatch` of a module and a `ParallelContext`

    @abstractmethod
    def inputs(self, video: VideoState, device: str) -> _Inputs:
        """The inputs of a video, at its current step."""

    def shard(self, modules: Mapping[str, Any]) -> ModelPatch:
        """Share the work of the denoiser among the ranks of a video, until removed."""
        patch: ModelPatch = self.sharding(modules[self.component], self.context.parallel)
        return patch

    def batches(
        self, modules: Mapping[str, Any], guard: Guard, video: VideoState
    ) -> tuple[SamplerBatch]:
        """The video."""
        inputs = self.inputs(video, self.context.device(self.component))
        steps = self.guarded_steps(modules, guard, inputs, video.step, video.sampler_state)
        return (SamplerBatch(steps, self.steps_per_video),)


def _store_step(video: VideoState, step: SamplerStep, done: int, num_steps: int) -> None:
    """Store the state after a step in its video, consistent whenever others can see it."""
    video.step = done
    video.latents, video.sampler_state = step.x, step.memory
    if step.index + 1 == step.num_steps:
        video.finished_batches = (*video.finished_batches, step.x.to("cpu"))
        video.latents = video.sampler_state = None
    if done == num_steps:
        video.latents = (
            torch.cat(video.finished_batches)
            if len(video.finished_batches) > 1
            else video.finished_batches[0]
        )
        video.finished_batches = ()


class GuardedDenoiser:
    """A guarded ``denoise``, which `make` builds again whenever the guard has changed a module.

    It caches results of modules for the text, so a change makes them stale. It is built with the
    guard's current `settings`, also after a memory fallback. `start` steps are already done;
    `num_done` counts them and each call; a caller that leaves out calls sets it.
    """

    def __init__(
        self, guard: Guard, make: Callable[[], Callable[..., Tensor]], start: int = 0
    ) -> None:
        self._guard = guard
        self._make = make
        self.num_done = start
        self._denoise: Callable[..., Tensor] = guard.with_fallbacks(start + 1, make)

    def make_by(self, make: Callable[[], Callable[..., Tensor]]) -> None:
        """Build another denoiser for the remaining steps."""
        self._make = make
        self._denoise = self._guard.with_fallbacks(self.num_done + 1, make)

    def repeat(self, *given: Tensor) -> None:
        """Make a call of an earlier step again, which is not counted."""
        done = self.num_done
        self(*given)
        self.num_done = done

    def check_prediction(self, answer: Tensor) -> None:
        """Note an answer that was predicted for the next step; the state after it is checked."""
        self._guard.note_output(self.num_done + 1, value_range(answer))

    def __call__(self, *given: Tensor) -> Tensor:
        step = self.num_done + 1

        def again() -> Tensor:
            self._denoise = self._make()
            return self._denoise(*given)

        # A run that resumes at a later step has the repairs of its first step.
        probe = self._guard.probe() if step == 1 else None
        member = None if probe is not None else MEMBER.get()
        with probe or (nullcontext() if member is None else member.meeting()):
            # A weak reference: a repeated call needs the memory of the denoiser that failed.
            compute = partial(weakref.proxy(self._denoise), *given)
            answer: Tensor = self._guard.with_fallbacks(step, compute, again)
        seen = value_range(answer)
        if self._guard.ranks.are_finite(seen):
            answer = self._guard.check_overflow(step, probe, answer, again)
        else:
            with self._guard.ranks.unsharded():
                search = partial(self._guard.repair, step, again)
                answer = self._guard.with_fallbacks(step, search)
            seen = value_range(answer)
        self._guard.note_output(step, seen)
        self.num_done = step
        return answer
