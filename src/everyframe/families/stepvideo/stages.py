"""Stages of a Step-Video run: Step-LLM encoding, CLIP encoding, denoising, decoding.

Deliberate differences from upstream: the seed determines the noise, pixels are not cropped, and no
filter is applied to the video. The templates are in `everyframe.runtime.stages.templates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from everyframe.core.events import Note
from everyframe.core.plan import Settings
from everyframe.families.stepvideo.denoiser import Denoiser, PromptEmbeds
from everyframe.families.stepvideo.prompt_tokens import (
    clip_tokenizer,
    llm_tokenizer,
    texts_of,
    tokens_of,
)
from everyframe.families.stepvideo.settings import latent_shape
from everyframe.families.stepvideo.sharding import Sharding
from everyframe.families.stepvideo.spec import StepVideoSpec
from everyframe.families.stepvideo.text import (
    CLIP_LENGTH,
    LLM_LENGTH,
    TextStates,
    Tokens,
    clip_states,
    llm_states,
)
from everyframe.families.stepvideo.vae import SeamBlender, StepVAE, decode_frames
from everyframe.runtime.interface import VideoState
from everyframe.runtime.request_checks import FrameChunk
from everyframe.runtime.stages import templates
from everyframe.runtime.stages.denoise_stage import VideoDenoiseStage
from everyframe.runtime.stages.frame_pieces import as_frames
from everyframe.runtime.stages.templates import LatentPiece, SharedEncodeStage, StageContext
from everyframe.samplers import flow_matching, noise
from everyframe.samplers.base import Step as SamplerStep
from everyframe.samplers.multistep import DiffusionPath


@dataclass(frozen=True)
class StepVideoContext(StageContext[StepVideoSpec]):
    """Shared by all stages."""

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """(C, T, h, w) of a video's latents."""
        return latent_shape(self.model.config, self.settings)

    @property
    def pieces(self) -> tuple[FrameChunk, ...]:
        """Pieces in which a video is decoded."""
        return self.model.config.vae.pieces(self.settings.num_frames)


#: The context of a dry run; see `NativeModelSpec.stage_call`.
Context = StepVideoContext


class TextEncodeStage(SharedEncodeStage[StepVideoContext, Tokens]):
    """Encode prompt and negative prompt with one of the two encoders."""

    @property
    def num_inputs(self) -> int:
        """Number of texts."""
        return len(texts_of(self.context.settings))


class LLMEncodeStage(TextEncodeStage):
    """Encode prompt and negative prompt with Step-LLM."""

    name = "text"
    component = "step_llm"

    def inputs(self, videos: Sequence[VideoState]) -> tuple[list[Tokens], list[Note]]:
        """Step-LLM's tokens of each text; what is too long for either encoder is noted."""
        files, config = self.context.model.files, self.context.model.config
        llm, clip = llm_tokenizer(files, config), clip_tokenizer(files, config)
        tokens, notes = tokens_of(self.context.settings, llm, clip)
        return tokens, [Note(text, in_record=True) for text in notes]

    def example_inputs(self, device: str) -> Tokens:
        """A text of full length."""
        return _example_tokens(LLM_LENGTH)

    def compute(self, module: Any, inputs: Tokens, device: str, settings: Settings) -> TextStates:
        """Step-LLM's states of a text."""
        return TextStates(llm_states(module, inputs, device), inputs.mask)

    def store(self, videos: Sequence[VideoState], results: Sequence[TextStates]) -> None:
        """Set Step-LLM's states in `text` of each video."""
        for video in videos:
            video.text = _embeds(results)


class CLIPEncodeStage(TextEncodeStage):
    """Encode the same texts with CLIP."""

    name = "clip text"
    component = "clip"

    def inputs(self, videos: Sequence[VideoState]) -> tuple[list[Tokens], tuple[()]]:
        """CLIP's tokens of each text."""
        tokenizer = clip_tokenizer(self.context.model.files, self.context.model.config)
        return [tokenizer.tokens(text) for text in texts_of(self.context.settings)], ()

    def example_inputs(self, device: str) -> Tokens:
        """A text of full length."""
        return _example_tokens(CLIP_LENGTH)

    def compute(self, module: Any, inputs: Tokens, device: str, settings: Settings) -> Tensor:
        """CLIP's states of a text."""
        return clip_states(module, inputs, device)

    def store(self, videos: Sequence[VideoState], results: Sequence[Tensor]) -> None:
        """Add CLIP's states to `text` of each video."""
        begun: PromptEmbeds = videos[0].text
        whole = [replace(a, clip=b) for a, b in zip(begun.branches, results, strict=True)]
        for video in videos:
            video.text = _embeds(whole)


def _example_tokens(length: int) -> Tokens:
    ids = torch.zeros(1, length, dtype=torch.long)
    return Tokens(ids, torch.ones(1, length, dtype=torch.bool))


def _embeds(states: Sequence[TextStates]) -> PromptEmbeds:
    """Prompt embeddings and, with guidance, those of the negative prompt."""
    return PromptEmbeds(states[0], states[1] if len(states) > 1 else None)


@dataclass(frozen=True)
class SamplerInputs:
    """What sampling begins with: x (1, C, T, h, w) and the text."""

    x: Tensor
    text: PromptEmbeds


class DenoiseStage(VideoDenoiseStage[StepVideoContext, SamplerInputs]):
    """Denoise: sampler, guidance and denoiser turn noise into latents (1, C, T, h, w)."""

    component = "denoiser"
    sharding = Sharding

    def inputs(self, video: VideoState, device: str) -> SamplerInputs:
        """The video's noise and text."""
        x = video.latents if video.step else video.start_noise
        if x is None:
            x = noise.start_noise(video.seed, self.context.latent_shape)[None]
        return SamplerInputs(x.to(device), video.text)

    def example_inputs(self, device: str) -> SamplerInputs:
        """A text of full length; the negative prompt is shorter, so there is a mask."""
        llm, clip = self.context.model.config.denoiser.caption_channels

        def states(num_tokens: int) -> TextStates:
            mask = torch.arange(LLM_LENGTH, device="cpu")[None] < num_tokens
            return TextStates(
                torch.zeros(1, LLM_LENGTH, llm), mask, torch.zeros(1, CLIP_LENGTH, clip)
            )

        is_guided = self.context.settings.guidance_scale > 1
        text = PromptEmbeds(states(LLM_LENGTH), states(LLM_LENGTH // 4) if is_guided else None)
        return SamplerInputs(torch.zeros(1, *self.context.latent_shape, device=device), text)

    def denoiser(
        self, modules: Mapping[str, Any], inputs: SamplerInputs, device: str, settings: Settings
    ) -> Denoiser:
        """The model with its text and guidance."""
        return Denoiser(modules[self.component], inputs.text, settings, device)

    def sample(
        self, denoise: Callable[..., Tensor], inputs: SamplerInputs, start: int
    ) -> Iterator[SamplerStep]:
        """Euler steps of flow matching."""
        return flow_matching.sample(denoise, inputs.x, self._sigmas(), start=start)

    def path(self, inputs: SamplerInputs) -> DiffusionPath:
        """The sigmas of flow matching."""
        return flow_matching.path(self._sigmas())

    def _sigmas(self) -> Tensor:
        settings = self.context.settings
        return flow_matching.schedule(settings.num_inference_steps, settings.option("time_shift"))


class DecodeStage(templates.DecodeStage[StepVideoContext]):
    """Decode latents to frames, in the pieces that the autoencoder was trained on.

    The lead rank blends the seams, so one frame waits at each.
    """

    @property
    def num_pieces(self) -> int:
        """Number of pieces of a video."""
        return len(self.context.pieces)

    def example_inputs(self, device: str) -> LatentPiece:
        """The first piece."""
        return LatentPiece(torch.zeros(1, *self.context.latent_shape, device=device))

    def compute(
        self, module: StepVAE, inputs: LatentPiece, device: str, settings: Settings
    ) -> Tensor:
        """Pixels (T, C, H, W) of a piece."""
        return decode_frames(module, inputs.latents, self.context.pieces[inputs.number], settings)

    def to_send(self, pixels_TCHW: Tensor) -> Tensor:
        """Pixels on the host, as seams are blended of them."""
        return pixels_TCHW.to("cpu", torch.float32)

    def ready(self) -> Callable[[int, Tensor], Tensor]:
        """The finished frames: all but the last one of a piece, until its seam is blended."""
        return partial(self._blend, SeamBlender(dim=0))

    def _blend(self, seams: SeamBlender, number: int, pixels_TCHW: Tensor) -> Tensor:
        is_last = number + 1 == self.num_pieces
        return as_frames(seams.add(pixels_TCHW, is_last=is_last))
