"""The single stage of a pipeline: load it, then call it once per video for frames and sound.

The call runs in a thread that pauses between events (`call_thread.py`), with hooks for steps
(`step_tracking.py`) and the guard (`guard.py`). An out-of-memory error leads to a retry with less
memory (`oom_fallback.py`). Several ranks all make the call and split the denoisers' work
(`cfg_parallel.py`, `sequence_parallel.py`); the lead rank alone encodes and decodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from everyframe.checkpoints.patched_file import Patches
from everyframe.core.events import AudioDecoded, Event, Events, FramesDecoded, Note, Output, Step
from everyframe.core.plan import Plan, Settings
from everyframe.diffusers_pipelines.call_arguments import arguments
from everyframe.diffusers_pipelines.calls.call import no_progress_bars
from everyframe.diffusers_pipelines.calls.call_errors import beyond_memory, explained
from everyframe.diffusers_pipelines.calls.call_outputs import (
    Array,
    beyond_range,
    check_finite,
    frames_of,
    num_videos_of,
    sound_of,
)
from everyframe.diffusers_pipelines.calls.call_results import CallOutOfMemory, Made, generators_in
from everyframe.diffusers_pipelines.calls.call_thread import Calling, run_in_thread
from everyframe.diffusers_pipelines.calls.compiled_calls import hooks_around_graphs
from everyframe.diffusers_pipelines.calls.global_generators import (
    GlobalGenerators,
    restore_torch,
    states_of_torch,
)
from everyframe.diffusers_pipelines.calls.module_calls import (
    BroadcastReplayLog,
    DenoiserReplay,
    EncodeOnLeadRank,
    encoders,
)
from everyframe.diffusers_pipelines.calls.patched_weights import held_for_run
from everyframe.diffusers_pipelines.calls.step_previews import StepPreviews
from everyframe.diffusers_pipelines.calls.step_tracking import StepTracker
from everyframe.diffusers_pipelines.constant_results import cache_constants
from everyframe.diffusers_pipelines.files.checkpoint import PipelineFiles
from everyframe.diffusers_pipelines.files.components import STAGE
from everyframe.diffusers_pipelines.guard import PipelineGuard
from everyframe.diffusers_pipelines.guarded_calls import GuardedCallHooks
from everyframe.diffusers_pipelines.inputs import call_options
from everyframe.diffusers_pipelines.inputs.defaults import denoisers
from everyframe.diffusers_pipelines.inputs.image_forms import call_with_pictures, to_rgb
from everyframe.diffusers_pipelines.inputs.signature import CallSignature
from everyframe.diffusers_pipelines.library_patches import float32_noise, quietly
from everyframe.diffusers_pipelines.loading import load, set_guidance
from everyframe.diffusers_pipelines.lossy.lossy_calls import lossy_calls
from everyframe.diffusers_pipelines.oom_fallback import PipelineOomFallbacks
from everyframe.diffusers_pipelines.parallel import sequence_parallel
from everyframe.diffusers_pipelines.parallel.cfg_detection import CfgBranches
from everyframe.diffusers_pipelines.parallel.cfg_parallel import CfgParallel
from everyframe.hardware.cpu import cpu_threads
from everyframe.hardware.device_loss import is_device_loss
from everyframe.hardware.memory import is_out_of_memory
from everyframe.parallel.communicator import ONE, ParallelContext
from everyframe.runtime.components.component_cache import WarmComponents
from everyframe.runtime.interface import MemorySavings, VideoState
from everyframe.runtime.memory.oom_fallback import together
from everyframe.runtime.previews.latent_space import LatentSpace
from everyframe.runtime.repair.rank_agreement import UnshardedCall

Emit = Callable[[Event], None]

_MIXED = Note(
    "something drew from torch's, numpy's or Python's own random generator while another run was "
    "at work in this process; the seed alone may not give this video again",
    in_record=True,
)


@dataclass(frozen=True)
class PipelineStage:
    """The stage that loads and calls a pipeline.

    Attributes:
        own: parameters that only this pipeline has.
        files: checkpoint to load the pipeline from; None if the caller has loaded `pipe`.
        savings: the family's memory savings.
        branches: guidance branches to split across ranks; None if they are not split.
        calling: how a caller's pipeline is called; by default in a thread of its own.
        patches: patches of a caller's pipeline by component; those of `files` are in them.
        latents: the latents of its denoiser, for previews.
        warm: components of earlier runs.
    """

    plan: Plan
    interface: CallSignature
    own: Mapping[str, Any]
    files: PipelineFiles | None = None
    pipe: Any = None
    savings: MemorySavings | None = None
    parallel: ParallelContext = ONE
    branches: CfgBranches | None = None
    calling: Calling | None = None
    patches: Mapping[str, Patches] = field(default_factory=dict)
    latents: LatentSpace | None = None
    warm: WarmComponents = field(default_factory=WarmComponents)
    name: ClassVar[str] = STAGE
    # Its answers are saved call by call, and served again when it is called again.
    is_resumable: ClassVar[bool] = False

    @property
    def component(self) -> str:
        """The largest component; all are loaded."""
        return max(self.plan.components, key=lambda part: part.weight_bytes).name

    @property
    def _is_shared(self) -> bool:
        """Whether several ranks make the same video."""
        return self.parallel.video_group.size > 1

    def num_steps(self, num_videos: int) -> int:
        """Requested steps over all videos."""
        return num_videos * self.plan.settings.num_inference_steps

    def run(self, videos: Sequence[VideoState]) -> Events:
        """Yield the frames of each video, and its sound if it has any."""
        with ExitStack() as stack:
            pipe, group = self.pipe, self.parallel.video_group
            if pipe is None:
                assert self.files is not None
                found: list[Any] = []
                leads = group.is_lead
                yield from quietly(load(self.plan, self.files, found, self.warm, encodes=leads))
                pipe = found.pop()
            else:
                stack.enter_context(held_for_run(pipe, self.patches))
            stack.enter_context(no_progress_bars(pipe))
            set_guidance(pipe, self.interface, self.plan.settings)
            owned = {} if self.pipe is not None else _modules(pipe)
            fallbacks = PipelineOomFallbacks(
                self.plan, pipe, owned, self.savings, self.warm.free_others
            )
            shared = sequence_parallel.apply_to_all(_modules(pipe), self.parallel)
            ready = _Ready(pipe, self.plan.device.torch_name, fallbacks, shared)
            for each in ready.shared.values():
                stack.callback(each.remove)
            if self._is_shared:
                stack.enter_context(self._encode_once(_modules(pipe)))
            for number, video in enumerate(videos):
                if self._is_shared:
                    video.replay_log = BroadcastReplayLog(group, video.replay_log)
                yield from self._video(
                    partial(self._call, ready, video, number, len(videos)), video
                )

    def _encode_once(self, modules: Mapping[str, nn.Module]) -> EncodeOnLeadRank:
        """Context: the lead rank encodes for all ranks."""
        found = {name: modules[name] for name in encoders(modules)}
        return EncodeOnLeadRank(found, self.parallel.video_group, self.plan.device.torch_name)

    def _video(self, call: Callable[[Emit], Made], video: VideoState) -> Iterator[Event]:
        threads = partial(cpu_threads, self.plan.num_threads)
        calling = self.calling or partial(run_in_thread, within=threads)
        made: Made = yield from calling(call)
        # Of several pictures or embeddings, too.
        is_list = call_options.gives_list(self.own) or len(made.videos) > 1
        for number, (frames, sound) in enumerate(made.videos):
            index = number if is_list else None
            yield from self._events(video.seed, frames, sound, index)
        if made.output is not None:
            yield Output(video.seed, made.output)

    def _events(
        self, seed: int, frames: Array, sound: tuple[Array, int] | None, index: int | None
    ) -> Iterator[Event]:
        """Events of one video of a call."""
        settings = self.plan.settings
        asked = (settings.num_frames, settings.height, settings.width)
        if frames.shape[:3] != asked:
            yield Note(
                f"the pipeline made {frames.shape[0]} frames of {frames.shape[2]}x"
                f"{frames.shape[1]}, not {asked[0]} of {asked[2]}x{asked[1]}",
                in_record=True,
                seed=seed,
            )
        if beyond := beyond_range(frames):
            yield Note(beyond, in_record=True, seed=seed)
        # Before the frames: whoever writes them ends with the last one.
        if sound is not None:
            samples, rate = sound
            yield AudioDecoded(seed, rate, samples.shape[-1] / rate, samples, index)
        yield FramesDecoded(seed, len(frames), frames, index)

    def _call(
        self, ready: _Ready, video: VideoState, number: int, num_videos: int, hand: Emit
    ) -> Made:
        """Call the pipeline for one video; retry with less memory after an out-of-memory error.

        A retry replays earlier denoiser answers. Several ranks do not retry here, but together.

        Raises:
            CannotRunError: no memory fallback is left.
            DistributedOutOfMemoryError: one of several ranks ran out of memory.
        """
        begun, last_step = time.perf_counter(), 0
        previews = StepPreviews.of(self.plan, self.latents)
        given = call_options.states_of(self.own)
        generators = GlobalGenerators(ready.devices, (generator for generator, _ in given))

        def emit(event: Event) -> None:
            with generators.put_back():
                hand(event)

        def on_step(step: int, num_steps: int) -> None:
            nonlocal begun, last_step
            now = time.perf_counter()
            if step > last_step:  # else it was reported before the pipeline was called again
                last_step = step
                done, total = number * num_steps + step, num_videos * num_steps
                emit(Step(self.name, done, total, video.seed, now - begun))
                for event in (
                    () if previews is None else previews.preview(video.seed, step, num_steps)
                ):
                    emit(event)
            begun = time.perf_counter()

        for fallback in () if self._is_shared else ready.fallbacks.resumed(video):
            why = "out of memory here in the interrupted run; using the same fallback again"
            emit(fallback.event(self.name, 0, f"{self.name}: {why}", video.seed))
        while True:
            for generator, state in given:
                generator.set_state(state)
            with generators.seeded(video.seed):
                made = self._attempt(ready, video, previews, on_step, emit)
            if not isinstance(made, CallOutOfMemory):
                if generators.is_mixed:
                    hand(_MIXED)
                return made
            if self._is_shared:
                at = (made.at,) if made.at else ()
                raise together(self.name, made.step, at, made.place, made.message)
            if not ready.fallbacks.free_others():
                less = ready.fallbacks.at(0, made.at)
                if less is None:
                    tried, is_in_memory = ready.fallbacks.tried, self.pipe is not None
                    raise beyond_memory(made, tried, is_in_memory=is_in_memory)
                why = f"{made.place}: out of memory ({made.message})"
                why = f"{why}; calling it again with less memory"
                emit(less.event(self.name, made.step, why, video.seed))
            if video.replay_log is not None:
                video.replay_log.again()

    def _attempt(
        self,
        ready: _Ready,
        video: VideoState,
        previews: StepPreviews | None,
        on_step: Callable[[int, int], None],
        emit: Emit,
    ) -> Made | CallOutOfMemory:
        pipe, settings, group = ready.pipe, ready.fallbacks.settings, self.parallel.video_group
        modules = _modules(pipe)
        denoising = {name: modules[name] for name in denoisers(modules)}
        others = [module for name, module in modules.items() if name not in denoising]
        scheduler = getattr(pipe, "scheduler", None)
        watch = StepTracker(denoising, others, scheduler, settings.num_inference_steps, on_step)
        guard = partial(PipelineGuard, self.plan, modules, watch, video, watch.read_by(emit))
        around, branches = GuardedCallHooks(watch, video), self.branches
        inner, outer = lossy_calls(
            self.plan, denoising, watch, scheduler, self.parallel, branches, video.seed, emit
        )
        with (
            hooks_around_graphs(modules.values()),
            watch,
            nullcontext() if previews is None else previews.listening(scheduler),
            # A pipeline in memory draws in its own dtype, as its call does for its owner.
            float32_noise() if self.pipe is None else nullcontext(),
            cache_constants(self.plan, denoising, watch, self.parallel),
            inner,
            CfgParallel(denoising, branches, self.parallel, around) if branches else nullcontext(),
            DenoiserReplay(denoising, watch, video, at_once=branches is None),
            outer,
            guard(ready.unsharded, group, keeps_storage=ready.fallbacks.keeps_storage) as guarded,
        ):
            around.guarded = guarded
            try:
                result = self._result(ready, settings, video, watch, emit)
            except (
                ArithmeticError, AssertionError, AttributeError, ImportError, LookupError,
                MemoryError, NameError, RuntimeError, TypeError, ValueError,
            ) as error:  # fmt: skip
                if is_device_loss(error):
                    raise
                if not is_out_of_memory(error):
                    name, notes = self.interface.class_name, self.plan.notes
                    raise explained(error, watch.begun, name, self.own, notes) from error
                # Returned and not raised: a traceback would keep the failed call's tensors alive.
                return CallOutOfMemory(str(error).partition("\n")[0], guarded.at, watch.begun)
            watch.finish()
            if not group.is_lead:  # the first of these ranks has them
                return Made(())
            output = result if call_options.wants_output(self.own) else None
            if self.own.get("output_type") == call_options.LATENTS:
                check_finite(result, self.name)
                return Made((), output)
            numbers = range(num_videos_of(result))
            videos = [(frames_of(result, each), sound_of(result, pipe, each)) for each in numbers]
            for frames, _ in videos:
                guarded.check_frames(frames)
            for event in () if previews is None else previews.fit(videos[0][0]):
                emit(event)
        return Made(videos, output)

    def _result(
        self, ready: _Ready, settings: Settings, video: VideoState, watch: StepTracker, emit: Emit
    ) -> Any:
        """The pipeline's output; images that it refuses are passed again in RGB."""
        before = states_of_torch(ready.devices)
        states: list[tuple[torch.Generator, torch.Tensor]] = []

        def call(video: VideoState) -> Any:
            decodes = self.parallel.video_group.is_lead
            given = arguments(self.interface, settings, video, self.own, decodes=decodes)
            states.extend((each, each.get_state()) for each in generators_in(given.values()))
            return ready.pipe(**given)

        def as_plain(pictures: Mapping[str, Any]) -> Any:
            restore_torch(before)  # as if nothing had been drawn yet
            for generator, state in states:
                generator.set_state(state)
            changed = {**video.inputs.as_given, **pictures}
            return call(replace(video, inputs=replace(video.inputs, as_given=changed)))

        given = video.inputs.as_given
        pictures = {name: given[name] for name in ("image", "last_image") if name in given}
        if self._is_shared:  # other ranks would not know of a second call
            return as_plain(to_rgb(pictures))
        return call_with_pictures(
            partial(call, video),
            as_plain,
            pictures,
            has_begun=lambda: watch.begun > 0,
            on_note=lambda text: emit(Note(text)),
        )


@dataclass(frozen=True)
class _Ready:
    """A loaded pipeline with its memory fallbacks and sequence-parallel patches."""

    pipe: Any
    device: str
    fallbacks: PipelineOomFallbacks
    shared: Mapping[str, sequence_parallel.SequenceParallelTransformer]

    @property
    def devices(self) -> set[torch.device]:
        """Devices of its weights, and the execution device."""
        modules = _modules(self.pipe).values()
        found = {each.device for module in modules for each in module.parameters()}
        return {*found, torch.device(self.device)}

    @property
    def unsharded(self) -> dict[str, UnshardedCall]:
        """For each split component, a context that runs it whole on this rank."""
        return {name: each.unsharded for name, each in self.shared.items()}


def _modules(pipe: Any) -> dict[str, nn.Module]:
    """The pipeline's modules by component name."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
