"""Stages of an Open-Sora 2.0 run: T5, CLIP, given frames, denoising, decoding.

Upstream: `opensora/utils/sampling.py` and `inference.py`. Deliberate differences: timesteps and
latents are float32, given frames are encoded as the mean of their distribution and replace the
generated ones, and frames are rounded once. Stages of a first picture are in
`first_picture_stages`; the templates are in `everyframe.runtime.stages.templates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from everyframe.core.events import Event, FramesDecoded, Note
from everyframe.core.plan import Settings
from everyframe.families.opensora2 import vae
from everyframe.families.opensora2.conditions import GivenLatents
from everyframe.families.opensora2.denoiser import (
    Denoiser,
    PromptEmbeds,
    TextStates,
    timesteps_of,
)
from everyframe.families.opensora2.prompt_lengths import CLIP_LENGTH, T5_LENGTH
from everyframe.families.opensora2.prompts import TokenIds, clip_tokens, t5_tokens, texts_of
from everyframe.families.opensora2.settings import is_conditioned, is_guided, latent_shape
from everyframe.families.opensora2.sharding import Sharding
from everyframe.families.opensora2.spec import OpenSora2Spec
from everyframe.families.opensora2.vae_config import VAEConfig
from everyframe.runtime.interface import VideoState
from everyframe.runtime.stages import templates
from everyframe.runtime.stages.denoise_stage import VideoDenoiseStage
from everyframe.runtime.stages.frame_pieces import as_floats, as_frames
from everyframe.runtime.stages.guard import Guard
from everyframe.runtime.stages.templates import (
    LatentPiece,
    SharedEncodeStage,
    StageContext,
    VideoEncodeStage,
)
from everyframe.samplers import flow_matching, noise
from everyframe.samplers.base import Step as SamplerStep
from everyframe.samplers.multistep import DiffusionPath

#: Frames of a given video per event.
_SOURCE_FRAMES = 16


@dataclass(frozen=True)
class OpenSora2Context(StageContext[OpenSora2Spec]):
    """Shared by all stages."""

    @property
    def vae(self) -> VAEConfig:
        """Config of the autoencoder."""
        return self.model.config.vae

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """(C, T, h, w) of a video's latents."""
        return latent_shape(self.model.config, self.settings)


#: The context of a dry run; see `NativeModelSpec.stage_call`.
Context = OpenSora2Context


class _TextStage(SharedEncodeStage[OpenSora2Context, TokenIds]):
    """Encode prompt, negative prompt and the prompt of a first picture with one encoder."""

    length: int

    @property
    def num_inputs(self) -> int:
        """Number of texts."""
        return len(texts_of(self.context.settings))

    def example_inputs(self, device: str) -> TokenIds:
        """A text, all of which have the same length."""
        return TokenIds(torch.zeros(1, self.length, dtype=torch.long))


class TextEncodeStage(_TextStage):
    """Encode the texts with T5, including padding, with which the weights were trained."""

    name = "text"
    component = "text_encoder"
    length = T5_LENGTH

    def inputs(self, videos: Sequence[VideoState]) -> tuple[list[TokenIds], list[Note]]:
        """T5's tokens of each text; emits notes on truncation by either encoder."""
        files, settings = self.context.model.files, self.context.settings
        tokens, notes = t5_tokens(files.path("text_encoder"), settings)
        _, unseen = clip_tokens(files.path("clip"), settings)
        return tokens, [Note(text, in_record=True) for text in (*notes, *unseen)]

    def compute(self, module: Any, inputs: TokenIds, device: str, settings: Settings) -> TextStates:
        """T5's last states of a text."""
        states: Tensor = module(input_ids=inputs.ids.to(device)).last_hidden_state
        return TextStates(states.to("cpu", torch.float32))

    def store(self, videos: Sequence[VideoState], results: Sequence[TextStates]) -> None:
        """Set T5's states in `text` of each video."""
        has_negative = is_guided(self.context.settings)
        for video in videos:
            video.text = PromptEmbeds(tuple(results), has_negative)


class CLIPEncodeStage(_TextStage):
    """Encode the same texts with CLIP."""

    name = "clip text"
    component = "clip"
    length = CLIP_LENGTH

    def inputs(self, videos: Sequence[VideoState]) -> tuple[list[TokenIds], tuple[()]]:
        """CLIP's tokens of each text."""
        folder = self.context.model.files.path("clip")
        return clip_tokens(folder, self.context.settings)[0], ()

    def compute(self, module: Any, inputs: TokenIds, device: str, settings: Settings) -> Tensor:
        """CLIP's state (1, E) at the end token."""
        pooled: Tensor = module(input_ids=inputs.ids.to(device)).pooler_output
        return pooled.to("cpu", torch.float32)

    def store(self, videos: Sequence[VideoState], results: Sequence[Tensor]) -> None:
        """Add CLIP's states to `text` of each video."""
        begun: PromptEmbeds = videos[0].text
        whole = tuple(replace(a, clip=b) for a, b in zip(begun.texts, results, strict=True))
        for video in videos:
            video.text = replace(begun, texts=whole)


@dataclass(frozen=True)
class GivenPixels:
    """Given frames (1, 3, T, H, W) in -1..1 at the beginning and at the end of a video."""

    first: Tensor | None = None
    last: Tensor | None = None


class ConditioningStage(VideoEncodeStage[OpenSora2Context, GivenPixels]):
    """Encode given pictures, or frames of a given video, with the autoencoder."""

    name = "given frames"
    component = "vae"

    def inputs(self, video: VideoState, device: str) -> GivenPixels:
        """The given pictures, or the clip's frames."""
        given, settings = video.inputs, self.context.settings
        first = None if given.first is None else as_floats(given.first)
        last = None if given.last is None else as_floats(given.last)
        if settings.option("first_frame"):
            first = video.last_frames  # of the stage that drew it
        if given.source is not None:
            frames = settings.option("given_clip")
            if settings.option("clip_at") == "head":
                first = as_floats(given.source[-frames:])
            else:
                last = as_floats(given.source[:frames])
        return GivenPixels(_as_pixels(first, device), _as_pixels(last, device))

    def example_inputs(self, device: str) -> GivenPixels:
        """All given pictures or frames."""
        settings = self.context.settings
        size = (1, 3, settings.option("given_clip") or 1, settings.height, settings.width)
        ends = (torch.zeros(size, device=device) if each else None for each in _ends(settings))
        return GivenPixels(*ends)

    def compute(
        self, module: Any, inputs: GivenPixels, device: str, settings: Settings
    ) -> GivenLatents:
        """Latents of the frames, on the host."""

        def encoded(pixels: Tensor | None) -> Tensor | None:
            if pixels is None:
                return None
            latents = vae.encode(module, self.context.vae, pixels, settings)
            return latents.to("cpu", torch.float32)

        return GivenLatents(encoded(inputs.first), encoded(inputs.last))


def _ends(settings: Settings) -> tuple[bool, bool]:
    """Whether the video's beginning is given, and its end."""
    if settings.option("given_clip"):
        is_head = settings.option("clip_at") == "head"
        return is_head, not is_head
    return settings.given_frames != ("last_image",), "last_image" in settings.given_frames


def _as_pixels(frames_THWC: Tensor | None, device: str) -> Tensor | None:
    """Pixels (1, C, T, H, W) in -1..1 of frames in 0..1."""
    if frames_THWC is None:
        return None
    return rearrange(frames_THWC, "t h w c -> 1 c t h w").to(device) * 2 - 1


@dataclass(frozen=True)
class SamplerInputs:
    """Inputs of the sampler: x (1, C, T, h, w), the text, and latents of given frames."""

    x: Tensor
    text: PromptEmbeds
    given: GivenLatents | None = None


class DenoiseStage(VideoDenoiseStage[OpenSora2Context, SamplerInputs]):
    """Denoise: sampler, guidance and denoiser turn noise into latents (1, C, T, h, w)."""

    component = "denoiser"
    sharding = Sharding

    def inputs(self, video: VideoState, device: str) -> SamplerInputs:
        """The video's noise, text and given frames."""
        x = video.latents if video.step else video.start_noise
        if x is None:
            x = noise.start_noise(video.seed, self.context.latent_shape)[None]
        return SamplerInputs(x.to(device), video.text, video.conditioning)

    def example_inputs(self, device: str) -> SamplerInputs:
        """All texts and all given frames."""
        settings, shape = self.context.settings, self.context.latent_shape
        config = self.context.model.config.denoiser
        text = TextStates(
            torch.zeros(1, T5_LENGTH, config.context_in_dim), torch.zeros(1, config.vec_in_dim)
        )
        has_negative = is_guided(settings)
        embeds = PromptEmbeds((text,) * (1 + has_negative), has_negative)
        given = None
        if is_conditioned(settings):
            frames = self.context.vae.latent_frames(settings.option("given_clip") or 1)
            zeros = torch.zeros(1, shape[0], frames, *shape[2:])
            given = GivenLatents(*(zeros if each else None for each in _ends(settings)))
        return SamplerInputs(torch.zeros(1, *shape, device=device), embeds, given)

    def denoiser(
        self, modules: Mapping[str, Any], inputs: SamplerInputs, device: str, settings: Settings
    ) -> Denoiser:
        """The model with its text, condition and guidance."""
        times = timesteps_of(settings, self.context.model.config)
        model = modules[self.component]
        return Denoiser(model, inputs.text, inputs.given, settings, times, device)

    def sample(
        self, denoise: Callable[..., Tensor], inputs: SamplerInputs, start: int
    ) -> Iterator[SamplerStep]:
        """Euler steps of flow matching; given pictures replace theirs in the last step's result."""
        times = timesteps_of(self.context.settings, self.context.model.config)
        for step in flow_matching.sample(denoise, inputs.x, times, start=start):
            yield self.complete(step, inputs)

    def path(self, inputs: SamplerInputs) -> DiffusionPath:
        """The timesteps of flow matching."""
        return flow_matching.path(timesteps_of(self.context.settings, self.context.model.config))

    def complete(self, step: SamplerStep, inputs: SamplerInputs) -> SamplerStep:
        """The step with the given pictures in its result."""
        is_last = step.index + 1 == step.num_steps
        if is_last and inputs.given is not None and not self._has_clip():
            return replace(step, x=inputs.given.paste(step.x))
        return step

    def _has_clip(self) -> bool:
        return bool(self.context.settings.option("given_clip"))


class DecodeStage(templates.DecodeStage[OpenSora2Context]):
    """Decode latents to frames in upstream's tiles, which the lead rank blends."""

    def _blender(self) -> vae.TileBlender:
        return vae.TileBlender(self.context.vae.decode_tiles(), self.context.latent_shape[1:])

    @property
    def num_pieces(self) -> int:
        """Number of tiles of a video."""
        return len(self._blender().corners)

    def inputs(self, video: VideoState, number: int, device: str) -> LatentPiece:
        """The latents of one tile."""
        blender = self._blender()
        tile = blender.cut(video.latents, blender.corners[number])
        return LatentPiece(tile.to(device), number)

    def example_inputs(self, device: str) -> LatentPiece:
        """The first tile."""
        zeros = torch.zeros(1, *self.context.latent_shape, device=device)
        return LatentPiece(self._blender().cut(zeros, (0, 0, 0)))

    def compute(self, module: Any, inputs: LatentPiece, device: str, settings: Settings) -> Tensor:
        """Pixels (T, C, H, W) of a tile."""
        pixels = vae.decode_tile(module, self.context.vae, inputs.latents, settings)
        return rearrange(pixels[0], "c t h w -> t c h w")

    def is_one_colour(self, video: VideoState) -> bool:
        """True: a tile of one colour is no fault, a whole frame might be."""
        return self.num_pieces > 1

    def to_send(self, pixels_TCHW: Tensor) -> Tensor:
        """Pixels on the host, where tiles are blended."""
        return pixels_TCHW.to("cpu", torch.float32)

    def ready(self) -> Callable[[int, Tensor], Tensor]:
        """Frames that this tile completes, if any."""
        return partial(_blend, self._blender())

    def decode_video(
        self, module: Any, guard: Guard, video: VideoState, steps: range
    ) -> Iterator[Event]:
        """Yield the frames of a video, with those of a given video before or after them."""
        source, settings = video.inputs.source, self.context.settings
        if source is None:
            yield from super().decode_video(module, guard, video, steps)
            return
        known = settings.option("given_clip")
        is_head = settings.option("clip_at") == "head"
        if is_head:
            yield from _source_frames(video, source)
        new = _NewFrames(self.ready(), settings.num_frames, known, is_head=is_head)
        yield from self.decode_pieces(module, guard, video, steps, new.ready)
        if not is_head:
            yield from _source_frames(video, source)


def _blend(blender: vae.TileBlender, number: int, pixels_TCHW: Tensor) -> Tensor:
    tile = rearrange(pixels_TCHW, "t c h w -> 1 c t h w")
    frames = blender.add(blender.corners[number], tile)
    if frames is None:
        return torch.empty(0)
    return as_frames(rearrange(frames[0], "c t h w -> t c h w"))


def _source_frames(video: VideoState, source: Any) -> Iterator[FramesDecoded]:
    """Yield the given video's frames in pieces, since a long video in floats is large."""
    for start in range(0, len(source), _SOURCE_FRAMES):
        frames = as_floats(source[start : start + _SOURCE_FRAMES])
        yield FramesDecoded(video.seed, len(frames), frames.numpy())


class _NewFrames:
    """New frames of a video: without the given video's frames at its head or tail."""

    def __init__(
        self, ready: Callable[[int, Tensor], Tensor], total: int, known: int, *, is_head: bool
    ) -> None:
        self._ready, self._at = ready, 0
        self._new = range(known, total) if is_head else range(total - known)

    def ready(self, number: int, piece: Tensor) -> Tensor:
        """New frames that a piece completes."""
        frames = self._ready(number, piece)
        start, self._at = self._at, self._at + len(frames)
        low = min(max(self._new.start - start, 0), len(frames))
        return frames[low : max(self._new.stop - start, low)]
