"""Stage templates that families share: encode and decode, and what all stages have in common.

A stage is written once. Its run loads one component, uses it for every video and frees it when its
generator ends, with events, guard and ranks. Its dry run calls the same code on example inputs of
the plan's sizes. A family's stage gives the inputs of both and what is computed of them.

Read next: `denoise_stage.py`, `families/opensora/stages.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from everyframe.core.events import ComponentLoaded, Event, Events, FramesDecoded, Note, Step
from everyframe.core.plan import Plan, Settings
from everyframe.parallel.communicator import ONE, Communicator, ParallelContext
from everyframe.parallel.uneven_split import assign_pieces
from everyframe.precision.cast_hooks import map_tensors
from everyframe.runtime.components.component_cache import WarmComponents
from everyframe.runtime.interface import VideoState
from everyframe.runtime.loading import load_component, rewrite_parameters
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.runtime.previews.latent_previews import Previewer
from everyframe.runtime.previews.preview_fit import ColorFit
from everyframe.runtime.repair.rank_agreement import UnshardedCall
from everyframe.runtime.repair.repairs import prompt_truncated_note
from everyframe.runtime.stages import tiling
from everyframe.runtime.stages.decoder_check import check_decoder, middle
from everyframe.runtime.stages.frame_pieces import as_frames, distribute_pieces
from everyframe.runtime.stages.guard import Guard

_Model = TypeVar("_Model", bound=NativeModelSpec[Any, Any, Any])


@dataclass(frozen=True)
class StageContext(Generic[_Model]):
    """What the stages of one clip share: model, settings and ranks; a dry run has no `plan`."""

    model: _Model
    settings: Settings
    parallel: ParallelContext = ONE
    clip: int = 0
    plan: Plan | None = None

    def device(self, component: str) -> str:
        """Device of a component in a run."""
        assert self.plan is not None
        return self.plan.component(component).device

    def load(self, component: str) -> Generator[Event, None, Any]:
        """Load a component, and yield an event with the loading time."""
        assert self.plan is not None
        began = time.perf_counter()
        builder, part = self.model.builder, self.plan.component(component)

        def load() -> nn.Module:
            return load_component(
                part,
                partial(builder.take, component),
                *self.model.patched_weights(component),
                outputs=builder.outputs(component),
                supply=self.parallel.weights_group,
            )

        def rewrite(module: nn.Module, names: Collection[str]) -> bool:
            weights = self.model.patched_weights(component)
            return rewrite_parameters(part, *weights, module, names)

        patched = self.model.patched.patches.get(component, {})
        module = self.warm.component(component, load, rewrite, patched)
        yield ComponentLoaded(component, time.perf_counter() - began)
        return module

    @property
    def warm(self) -> WarmComponents:
        """Where components come from and go."""
        return self.model.warm or WarmComponents()

    def previewer(self) -> Previewer | None:
        """What makes the previews of the run; None if there are none."""
        assert self.plan is not None
        asked = self.plan.preview
        return None if asked is None else Previewer(asked, self.model.latent_space)

    def guard(
        self,
        stage: str,
        parts: Mapping[str, nn.Module],
        unsharded: UnshardedCall | None = None,
        group: Communicator = ONE.video_group,
    ) -> Guard:
        """The guard of these components in that stage; see `Guard`."""
        assert self.plan is not None
        return Guard(
            self.plan,
            stage,
            parts,
            savings=self.model.savings,
            unsharded=unsharded,
            group=group,
            free_others=self.warm.free_others,
        )


_Context = TypeVar("_Context", bound=StageContext[Any])
_Inputs = TypeVar("_Inputs")


@dataclass(frozen=True)
class ComponentStage(ABC, Generic[_Context, _Inputs]):
    """Base class of stages: what their run and their dry run have in common."""

    context: _Context
    name: ClassVar[str]
    component: ClassVar[str]
    is_resumable: ClassVar[bool] = False

    @abstractmethod
    def example_inputs(self, device: str) -> _Inputs:
        """Inputs of the plan's largest sizes, of zeros, where the run's own would be."""

    def compute(self, module: Any, inputs: _Inputs, device: str, settings: Settings) -> Any:
        """One call of the stage. `settings` have the memory savings of now."""
        raise NotImplementedError

    def examples(self, device: str) -> Any:
        """`example_inputs` in float32, whatever the default dtype of the caller is."""
        made = self.example_inputs(device)
        return map_tensors(made, lambda each: each.float() if each.is_floating_point() else each)

    def dry_run(self, modules: Mapping[str, Any], device: str) -> object:
        """Make one call on example inputs; `modules` are the stage's components by name."""
        settings = tiling.for_dry_run(self.context.settings)
        return self.compute(modules[self.component], self.examples(device), device, settings)

    def _make_compute(self, guard: Guard, module: Any, inputs: _Inputs) -> Callable[[], Any]:
        """`compute` with the guard's current settings."""
        device = self.context.device(self.component)
        return lambda: self.compute(module, inputs, device, guard.settings)

    def _load(self) -> Generator[Event, None, tuple[Any, Guard]]:
        module = yield from self.context.load(self.component)
        return module, self.context.guard(self.name, {self.component: module})

    def _step(
        self, guard: Guard, video: VideoState, step: int, total: int, call: Callable[[], Any]
    ) -> Generator[Event, None, Any]:
        begun = time.perf_counter()
        result = guard.call(step, call)
        yield from guard.events()
        yield Step(self.name, step, total, video.seed, time.perf_counter() - begun)
        return result


class SharedEncodeStage(ComponentStage[_Context, _Inputs]):
    """Encode what all videos share: one step an input. One rank encodes and broadcasts."""

    @property
    @abstractmethod
    def num_inputs(self) -> int:
        """Number of inputs."""

    @abstractmethod
    def inputs(self, videos: Sequence[VideoState]) -> tuple[Sequence[_Inputs], Sequence[Event]]:
        """The inputs, and notes on them. A refusal comes before gigabytes are read."""

    @abstractmethod
    def store(self, videos: Sequence[VideoState], results: Sequence[Any]) -> None:
        """Give the results, one for each input, to the videos."""

    def num_steps(self, num_videos: int) -> int:
        """One step for each input."""
        return self.num_inputs

    def run(self, videos: Sequence[VideoState]) -> Events:
        """Encode, and store the results in each video."""
        world = self.context.parallel.world
        mine = (yield from self._encode(videos)) if world.is_lead else None
        self.store(videos, world.broadcast_tree(mine, 0, f"the {self.name} is broadcast"))

    def _encode(self, videos: Sequence[VideoState]) -> Generator[Event, None, list[Any]]:
        inputs, notes = self.inputs(videos)
        yield from notes
        warm, key, results = self.context.warm, None, None
        # A resumed stage may begin with fallbacks and repairs.
        if not any(video.has_history for video in videos):
            key, results = warm.find_encoded(self.component, self, inputs)
        if results is not None:
            for step, _ in enumerate(results, start=1):
                yield Step(self.name, step, len(results), videos[0].seed, 0.0)
            return list(results)
        results = yield from self._compute_all(videos, inputs)
        warm.keep_encoded(key, self.component, tuple(results))
        return results

    def _compute_all(
        self, videos: Sequence[VideoState], inputs: Sequence[_Inputs]
    ) -> Generator[Event, None, list[Any]]:
        module, guard = yield from self._load()
        results = []
        for step, each in enumerate(inputs, start=1):
            call = self._make_compute(guard, module, each)
            results.append((yield from self._step(guard, videos[0], step, len(inputs), call)))
        return results


@dataclass(frozen=True)
class PromptTokens:
    """Token ids and mask (1, L) of a text, on the host."""

    ids: Tensor
    mask: Tensor


class PromptEncodeStage(SharedEncodeStage[_Context, PromptTokens]):
    """Encode prompt and negative prompt with the model's one text encoder."""

    name = "text"
    component = "text_encoder"

    @abstractmethod
    def tokens(self) -> Sequence[tuple[Tensor, Tensor, str]]:
        """Ids and mask of each prompt, and the words of it that are cut ("" if none)."""

    def inputs(self, videos: Sequence[VideoState]) -> tuple[list[PromptTokens], list[Note]]:
        """Tokens of each prompt; notes on what is cut."""
        tokens = self.tokens()
        notes = [prompt_truncated_note(cut) for *_, cut in tokens if cut]
        return [PromptTokens(ids, mask) for ids, mask, _ in tokens], notes


class VideoEncodeStage(ComponentStage[_Context, _Inputs]):
    """Encode the conditioning frames of each video, with its repairs: one step a video.

    One rank of each video group encodes and broadcasts.
    """

    @abstractmethod
    def inputs(self, video: VideoState, device: str) -> _Inputs:
        """The inputs of a video."""

    def store(self, video: VideoState, result: Any) -> None:
        """Give the result to its video, by default as its `conditioning`."""
        video.conditioning = result

    def num_steps(self, num_videos: int) -> int:
        """One step for each video."""
        return num_videos

    def run(self, videos: Sequence[VideoState]) -> Events:
        """Encode, and store each video's result."""
        group = self.context.parallel.video_group
        mine = (yield from self._encode(videos)) if group.is_lead else None
        results = group.broadcast_tree(mine, 0, "given frames are broadcast")
        for video, result in zip(videos, results, strict=True):
            self.store(video, result)

    def _encode(self, videos: Sequence[VideoState]) -> Generator[Event, None, list[Any]]:
        module, guard = yield from self._load()
        device, results = self.context.device(self.component), []
        for step, video in enumerate(videos, start=1):
            guard.start_video(video)

            def encode(video: VideoState = video) -> Any:
                # The device may lack the memory for the inputs themselves.
                inputs = self.inputs(video, device)
                return self.compute(module, inputs, device, guard.settings)

            results.append((yield from self._step(guard, video, step, len(videos), encode)))
        return results


@dataclass(frozen=True)
class LatentPiece:
    """Latents of which one call decodes a piece: number `number` of the video's pieces."""

    latents: Tensor
    number: int = 0


class DecodeStage(ComponentStage[_Context, LatentPiece]):
    """Decode each video's latents in pieces, one step a piece; several ranks share them.

    `compute` returns pixels (T, C, H, W) around -1..1.
    """

    name = "decode"
    component = "vae"

    @property
    @abstractmethod
    def num_pieces(self) -> int:
        """Number of pieces of a video."""

    def inputs(self, video: VideoState, number: int, device: str) -> LatentPiece:
        """One piece of a video; by default all of its latents, of which one piece is decoded."""
        return LatentPiece(video.latents.to(device), number)

    def is_one_colour(self, video: VideoState) -> bool:
        """Whether its inputs are of one colour, so that its frames may well be."""
        return False

    def to_send(self, pixels_TCHW: Tensor) -> Tensor:
        """What a rank sends of a piece: frames (T, H, W, 3) in 0..1 on the host."""
        return as_frames(pixels_TCHW)

    def ready(self) -> Callable[[int, Tensor], Tensor]:
        """The `ready` of a video; see `decode_pieces`."""
        return lambda number, piece: piece

    def dry_run(self, modules: Mapping[str, Any], device: str) -> object:
        """Decode a piece of example latents, and move it to the host."""
        pixels: Any = super().dry_run(modules, device)
        return pixels.to("cpu", torch.float32)

    def num_steps(self, num_videos: int) -> int:
        """The pieces of all videos."""
        return num_videos * self.num_pieces

    def run(self, videos: Sequence[VideoState]) -> Events:
        """Yield the frames of each video; the first rank of a video receives all of them."""
        module, guard = yield from self._load()
        for number, video in enumerate(videos):
            guard.start_video(video)
            steps = range(number * self.num_pieces + 1, self.num_steps(len(videos)) + 1)
            self._check_decoder(module, guard, video, steps[0])
            fit = self._color_fit(video)
            for event in self.decode_video(module, guard, video, steps):
                if fit is not None and isinstance(event, FramesDecoded):
                    fit.add(event.frames)
                yield event
            yield from () if fit is None else fit.finish()
            video.latents = None

    def _check_decoder(self, module: nn.Module, guard: Guard, video: VideoState, step: int) -> None:
        device = self.context.device(self.component)

        def decode() -> Tensor:
            piece = self.inputs(video, 0, device)
            piece = replace(piece, latents=middle(piece.latents))
            pixels: Tensor = self.compute(module, piece, device, guard.settings)
            return pixels

        check_decoder(guard, module, decode, step, self.context.parallel.video_group)

    def _color_fit(self, video: VideoState) -> ColorFit | None:
        """What fits the colours of previews to this video, where they are not known."""
        plan, context = self.context.plan, self.context
        assert plan is not None
        is_wanted = plan.preview is not None and not plan.preview.source
        if not is_wanted or context.clip or video.inputs.source is not None:
            return None
        space = context.model.latent_space
        is_known = space.colors(reads=True) is not None  # its weights had not been hashed
        return None if is_known else ColorFit(space, video.latents, context.settings.num_frames)

    def decode_video(
        self, module: Any, guard: Guard, video: VideoState, steps: range
    ) -> Iterator[Event]:
        """Yield the frames of a video; `steps` are those of the stage that are left."""
        return self.decode_pieces(module, guard, video, steps, self.ready())

    def decode_pieces(
        self,
        module: Any,
        guard: Guard,
        video: VideoState,
        steps: range,
        ready: Callable[[int, Tensor], Tensor],
    ) -> Iterator[Event]:
        """Decode a video piece by piece, several ranks at once.

        ``ready(number, piece)`` gives the frames (T, H, W, 3) in 0..1 that are finished after a
        piece; the lead rank calls it.
        """
        device, group = self.context.device(self.component), self.context.parallel.video_group
        is_asked = self.is_one_colour(video)

        def decode(number: int) -> Tensor:
            inputs = self.inputs(video, number, device)
            call, at = self._make_compute(guard, module, inputs), steps[number]
            return self.to_send(guard.check_decoded(at, call, inputs.latents, is_asked=is_asked))

        begun, owners = time.perf_counter(), assign_pieces(self.num_pieces, group.weights)
        for number, (piece, events) in enumerate(distribute_pieces(group, guard, owners, decode)):
            seconds = time.perf_counter() - begun
            yield from events
            yield Step(self.name, steps[number], steps[-1], video.seed, seconds)
            frames = ready(number, piece)
            if len(frames):
                yield FramesDecoded(video.seed, len(frames), frames.numpy())
            begun = time.perf_counter()
