"""Stages of an Open-Sora run: text encoding, conditioning frames, denoising, decoding.

Upstream's loop is `scripts/inference.py` of 1.2; comments mark deliberate differences. The
templates are in `everyframe.runtime.stages.templates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from everyframe.core.events import Event, FramesDecoded
from everyframe.core.plan import Settings
from everyframe.families.opensora.denoiser import Denoiser, PromptEmbeds, timesteps_of
from everyframe.families.opensora.dry_run import is_conditioned
from everyframe.families.opensora.settings import PIECE, known_frames
from everyframe.families.opensora.sharding import Sharding
from everyframe.families.opensora.spec import OpenSoraSpec
from everyframe.families.opensora.text import TextEmbedding, embed, tokens_of
from everyframe.families.opensora.vae import ImageVAE, VideoVAE, decode_frames, encode_video
from everyframe.families.opensora.vae_config import ImageVAEConfig, VideoVAEConfig
from everyframe.families.t5_tokenizer import load_tokenizer
from everyframe.parallel.communicator import broadcastable
from everyframe.runtime.interface import VideoState
from everyframe.runtime.stages import templates
from everyframe.runtime.stages.denoise_stage import VideoDenoiseStage
from everyframe.runtime.stages.frame_pieces import as_floats
from everyframe.runtime.stages.guard import Guard
from everyframe.runtime.stages.templates import (
    LatentPiece,
    PromptEncodeStage,
    PromptTokens,
    StageContext,
    VideoEncodeStage,
)
from everyframe.samplers import iddpm, noise, rectified_flow
from everyframe.samplers.base import Step as SamplerStep
from everyframe.samplers.multistep import DiffusionPath


@dataclass(frozen=True)
class OpenSoraContext(StageContext[OpenSoraSpec]):
    """Shared by all stages of one clip."""

    @property
    def vae(self) -> ImageVAEConfig | VideoVAEConfig:
        """Config of the autoencoder."""
        return self.model.config.vae

    def is_continuation(self) -> bool:
        """Whether this clip continues from the previous clip or from a given video."""
        return self.clip > 0 or "extend" in self.settings.given_frames

    def before(self, video: VideoState) -> Tensor | None:
        """Frames (T, H, W, 3) in 0..1 that this clip continues from; None if it continues none.

        One frame if fewer than `known_frames` are available: a given video may be short.
        """
        if not self.is_continuation():
            return None
        frames = video.last_frames
        if self.clip == 0:
            assert video.inputs.source is not None
            frames = as_floats(video.inputs.source[-PIECE:])
        wanted = known_frames(self.model.config, self.settings)[0]
        tail: Tensor = frames[-wanted:] if len(frames) >= wanted else frames[-1:]
        return tail

    def latent_shape(self) -> tuple[int, int, int, int]:
        """(C, T, h, w) of one clip's latents."""
        settings = self.settings
        size = self.vae.latent_size(settings.num_frames, settings.height, settings.width)
        return (self.vae.latent_channels, *size)


#: The context of a dry run; see `NativeModelSpec.stage_call`.
Context = OpenSoraContext


class TextEncodeStage(PromptEncodeStage[OpenSoraContext]):
    """Encode prompt and negative prompt with T5."""

    @property
    def num_inputs(self) -> int:
        """The prompt and, if there is one, the negative prompt."""
        return 1 + (self.context.settings.negative_prompt is not None)

    def tokens(self) -> list[tuple[Tensor, Tensor, str]]:
        """T5's tokens of each text."""
        model = self.context.model
        tokenizer = load_tokenizer(model.files.path("tokenizer"))
        return tokens_of(tokenizer, self.context.settings, model.config.denoiser.model_max_length)

    def example_inputs(self, device: str) -> PromptTokens:
        """A text of full length."""
        length = self.context.model.config.denoiser.model_max_length
        ids = torch.zeros(1, length, dtype=torch.long)
        return PromptTokens(ids, torch.ones(1, length, dtype=torch.bool))

    def compute(
        self, module: Any, inputs: PromptTokens, device: str, settings: Settings
    ) -> TextEmbedding:
        """Hidden states of a text."""
        return embed(module, inputs.ids, inputs.mask, device)

    def store(self, videos: Sequence[VideoState], results: Sequence[TextEmbedding]) -> None:
        """Set `text` of each video."""
        for video in videos:
            video.text = PromptEmbeds(results[0], results[1] if len(results) > 1 else None)


@broadcastable
@dataclass(frozen=True)
class ConditioningLatents:
    """Conditioning latents (1, C, T, h, w) and mask (1, T): 1 generate, 0 fixed, between edit."""

    latents: Tensor
    mask: Tensor


@dataclass(frozen=True)
class ConditioningPixels:
    """Frames (1, 3, T, H, W) in -1..1 that a clip begins with, and the one that it ends with."""

    first: Tensor | None = None
    last: Tensor | None = None


class ConditioningStage(VideoEncodeStage[OpenSoraContext, ConditioningPixels]):
    """Encode given images and the end of the previous clip with the autoencoder."""

    name = "given frames"
    component = "vae"

    def inputs(self, video: VideoState, device: str) -> ConditioningPixels:
        """The frames that the clip continues from or the given image, and its last image."""
        context, given = self.context, video.inputs
        first = context.before(video)
        if first is None and given.first is not None:
            first = as_floats(given.first)
        is_end = given.last is not None and context.clip == context.settings.chain - 1
        last = as_floats(given.last) if is_end else None
        return ConditioningPixels(
            None if first is None else _as_pixels(first).to(device),
            None if last is None else _as_pixels(last).to(device),
        )

    def example_inputs(self, device: str) -> ConditioningPixels:
        """As many frames as can be given: a piece at most."""
        settings = self.context.settings
        frames = min(settings.num_frames, PIECE)
        size = (1, 3, frames, settings.height, settings.width)
        return ConditioningPixels(torch.zeros(size, device=device))

    def compute(
        self,
        module: ImageVAE | VideoVAE,
        inputs: ConditioningPixels,
        device: str,
        settings: Settings,
    ) -> ConditioningLatents:
        """Latents and mask of a clip, on the host."""
        shape = self.context.latent_shape()
        latents = torch.zeros((1, *shape), dtype=torch.float32)
        mask = torch.ones((1, shape[1]), dtype=torch.float32)
        if inputs.first is not None:
            first = encode_video(module, inputs.first, settings)
            latents[:, :, : first.shape[2]] = first
            mask[:, : first.shape[2]] = settings.edit_strength
        if inputs.last is not None:
            # The last latent frame holds the last four frames of a piece and what came before
            # them. Upstream snaps a lone picture to the beginning of a piece, where it is not the
            # last frame; a piece that stands still ends in one that is.
            last_piece = self.context.vae.pieces(settings.num_frames)[-1].num_frames
            still = encode_video(module, inputs.last, settings, still=last_piece)
            latents[:, :, -1:] = still[:, :, -1:]
            mask[:, -1:] = settings.edit_strength
        return ConditioningLatents(latents, mask)


def _as_pixels(frames_THWC: Tensor) -> Tensor:
    """Pixels (1, C, T, H, W) in -1..1 of frames in 0..1."""
    return rearrange(frames_THWC, "t h w c -> 1 c t h w") * 2 - 1


@dataclass(frozen=True)
class SamplerInputs:
    """What sampling begins with: x (1, C, T, h, w), text, noise by step and mask (1, T) if any."""

    x: Tensor
    text: PromptEmbeds
    noise: Callable[[int], Tensor]
    mask: Tensor | None = None


def _noise(label: int, shape: tuple[int, ...], step: int) -> Tensor:
    return noise.step_noise(label, step, shape)[None]


class DenoiseStage(VideoDenoiseStage[OpenSoraContext, SamplerInputs]):
    """Denoise: sampler, guidance and denoiser turn noise into latents."""

    component = "denoiser"
    sharding = Sharding

    def inputs(self, video: VideoState, device: str) -> SamplerInputs:
        """The video's noise, conditioning latents and text."""
        clip, shape, known = self.context.clip, self.context.latent_shape(), video.conditioning
        label = video.seed if clip == 0 else noise.derived_seed(video.seed, "clip", clip)
        x = video.latents
        if not video.step:
            x = video.start_noise
            if x is None:
                x = noise.start_noise(label, shape)[None]
            if known is not None:
                x = torch.where(known.mask[:, None, :, None, None] == 1, x, known.latents)

        mask = None if known is None else known.mask
        return SamplerInputs(x.to(device), video.text, partial(_noise, label, shape), mask)

    def example_inputs(self, device: str) -> SamplerInputs:
        """Texts of full length and, where frames are given, a first frame that is fixed."""
        config, settings = self.context.model.config, self.context.settings
        shape = (1, *self.context.latent_shape())
        length = config.denoiser.model_max_length
        hidden = torch.zeros(1, length, config.denoiser.caption_channels)
        prompt = TextEmbedding(hidden, torch.ones(1, length, dtype=torch.bool))
        mask = None
        if is_conditioned(settings):
            mask = torch.ones(1, shape[2])
            mask[:, 0] = settings.edit_strength
        return SamplerInputs(
            torch.zeros(shape, device=device),
            PromptEmbeds(prompt, None if settings.negative_prompt is None else prompt),
            partial(_noise, 0, shape[1:]),
            mask,
        )

    def denoiser(
        self, modules: Mapping[str, Any], inputs: SamplerInputs, device: str, settings: Settings
    ) -> Denoiser:
        """The model with its text and guidance."""
        config = self.context.model.config
        return Denoiser(modules[self.component], inputs.text, settings, config, device)

    def sample(
        self, denoise: Callable[..., Tensor], inputs: SamplerInputs, start: int
    ) -> Iterator[SamplerStep]:
        """IDDPM for 1.0, rectified flow for 1.2."""
        settings, config = self.context.settings, self.context.model.config
        if config.version == "1.0":
            plan = iddpm.schedule(settings.num_inference_steps)
            return iddpm.sample(denoise, inputs.x, plan, inputs.noise, start=start)
        timesteps = timesteps_of(settings, config)
        if inputs.mask is None:
            return rectified_flow.sample(denoise, inputs.x, timesteps, start=start)
        return rectified_flow.sample_masked(
            denoise, inputs.x, timesteps, inputs.mask, inputs.noise, start=start
        )

    def path(self, inputs: SamplerInputs) -> DiffusionPath:
        """Noise levels of the same samplers."""
        settings, config = self.context.settings, self.context.model.config
        if config.version == "1.0":
            return iddpm.path(iddpm.schedule(settings.num_inference_steps))
        return rectified_flow.path(timesteps_of(settings, config), inputs.mask)


class DecodeStage(templates.DecodeStage[OpenSoraContext]):
    """Decode latents to frames, in the pieces that the autoencoder was trained on."""

    @property
    def num_pieces(self) -> int:
        """Number of pieces of a clip."""
        return len(self.context.vae.pieces(self.context.settings.num_frames))

    def example_inputs(self, device: str) -> LatentPiece:
        """The first piece."""
        return LatentPiece(torch.zeros(1, *self.context.latent_shape(), device=device))

    def compute(
        self, module: ImageVAE | VideoVAE, inputs: LatentPiece, device: str, settings: Settings
    ) -> Tensor:
        """Pixels (T, C, H, W) of a piece."""
        piece = self.context.vae.pieces(settings.num_frames)[inputs.number]
        pixels = decode_frames(module, inputs.latents, piece, settings)
        return rearrange(pixels[0], "c t h w -> t c h w")

    def is_one_colour(self, video: VideoState) -> bool:
        """Whether one of the given images or the given video is."""
        given = (video.inputs.first, video.inputs.last, video.inputs.source)
        return any(each is not None and each.min() == each.max() for each in given)

    def decode_video(
        self, module: Any, guard: Guard, video: VideoState, steps: range
    ) -> Iterator[Event]:
        """Yield the new frames of a clip, and save its last frames for the next one.

        A given video comes first, as it is.
        """
        context, source = self.context, video.inputs.source
        if context.clip == 0 and source is not None:
            # In pieces: a long source in floats would need more memory than any stage.
            for start in range(0, len(source), PIECE):
                frames = as_floats(source[start : start + PIECE])
                yield FramesDecoded(video.seed, len(frames), frames.numpy())
        before = context.before(video) if context.parallel.video_group.is_lead else None
        new = _NewFrames(0 if before is None else len(before))
        yield from self.decode_pieces(module, guard, video, steps, new.ready)
        # Only if a clip follows: these are floats, for each of many videos.
        follows = context.clip + 1 < context.settings.chain
        video.last_frames = torch.cat(new.tail)[-PIECE:] if follows and new.tail else None


class _NewFrames:
    """Frames of a clip without the first `skip`, which belong to the previous clip; and its `tail`.

    The tail is the last two pieces: they hold the frames that the next clip continues from.
    """

    def __init__(self, skip: int) -> None:
        self._skip = skip
        self.tail: list[Tensor] = []

    def ready(self, _: int, piece_THWC: Tensor) -> Tensor:
        """New frames of the next piece."""
        self.tail = [*self.tail, piece_THWC][-2:]
        new = piece_THWC[min(self._skip, len(piece_THWC)) :]
        self._skip -= len(piece_THWC) - len(new)
        return new
