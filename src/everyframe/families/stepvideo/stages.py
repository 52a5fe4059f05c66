"""Stages of a Step-Video run: Step-LLM encoding, CLIP encoding, denoising, decoding.

Each stage loads one component, uses it for every video and frees it when its generator ends, so
peak memory is that of the largest stage, not the sum. Deliberate differences from upstream: the
seed determines the noise, pixels are not cropped, and no filter is applied to the video.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from everyframe.core.events import Event, Note
from everyframe.families.stepvideo import sharding
from everyframe.families.stepvideo.denoiser import Denoiser, PromptEmbeds
from everyframe.families.stepvideo.model import StepVideoModel
from everyframe.families.stepvideo.prompt_tokens import (
    clip_tokenizer,
    llm_tokenizer,
    texts_of,
    tokens_of,
)
from everyframe.families.stepvideo.settings import latent_shape
from everyframe.families.stepvideo.spec import StepVideoSpec
from everyframe.families.stepvideo.text import TextStates, clip_states, llm_states
from everyframe.families.stepvideo.vae import SeamBlender, StepVAE, decode_frames
from everyframe.runtime import stages
from everyframe.runtime.guard import Guard
from everyframe.runtime.interface import VideoState
from everyframe.runtime.request_checks import FrameChunk
from everyframe.runtime.stages import (
    DecodePieces,
    GuardedDenoiser,
    StageContext,
    run_sharded_denoising,
)
from everyframe.samplers import flow_matching, noise
from everyframe.samplers.base import Step as SamplerStep


@dataclass(frozen=True)
class LLMEncodeStage:
    """Encode prompt and negative prompt with Step-LLM, once for all videos."""

    job: StageContext[StepVideoSpec]
    name: str = "text"
    component: str = "step_llm"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One step per text."""
        return len(texts_of(self.job.settings))

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Set Step-LLM's states in `text` of each video: one rank encodes and broadcasts."""
        world = self.job.teams.world
        told = yield from stages.on_lead_rank(world, self._encoded(takes), "the text is handed on")
        states = [TextStates(*each) for each in zip(told[::2], told[1::2], strict=True)]
        for take in takes:
            take.text = _text(states)

    def _encoded(self, takes: Sequence[VideoState]) -> Generator[Event, None, list[Tensor]]:
        job, files, config = self.job, self.job.model.files, self.job.model.config
        # Tokens of both encoders first: what is too long is told before gigabytes are read.
        llm, clip = llm_tokenizer(files, config), clip_tokenizer(files, config)
        tokens, told = tokens_of(job.settings, llm, clip)
        yield from (Note(text, in_record=True) for text in told)
        model = yield from job.loaded(self.component)
        guard = job.guard(self.name, {self.component: model})
        calls = [partial(llm_states, model, each, job.device(self.component)) for each in tokens]
        states = yield from stages.encode_once(self.name, guard, takes, calls)
        masks = (each.mask for each in tokens)
        return [tensor for pair in zip(states, masks, strict=True) for tensor in pair]


@dataclass(frozen=True)
class CLIPEncodeStage:
    """Encode the same texts with CLIP."""

    job: StageContext[StepVideoSpec]
    name: str = "clip text"
    component: str = "clip"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One step per text."""
        return len(texts_of(self.job.settings))

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Add CLIP's states to `text` of each video: one rank encodes and broadcasts."""
        world = self.job.teams.world
        told = yield from stages.on_lead_rank(world, self._encoded(takes), "the text is handed on")
        begun: PromptEmbeds = takes[0].text
        whole = [
            replace(states, clip=clip) for states, clip in zip(begun.branches, told, strict=True)
        ]
        for take in takes:
            take.text = _text(whole)

    def _encoded(self, takes: Sequence[VideoState]) -> Generator[Event, None, list[Tensor]]:
        job = self.job
        tokenizer = clip_tokenizer(job.model.files, job.model.config)
        model = yield from job.loaded(self.component)
        guard = job.guard(self.name, {self.component: model})
        calls = [
            partial(clip_states, model, tokenizer.tokens(text), job.device(self.component))
            for text in texts_of(job.settings)
        ]
        return (yield from stages.encode_once(self.name, guard, takes, calls))


def _text(states: Sequence[TextStates]) -> PromptEmbeds:
    """Prompt embeddings and, with guidance, those of the negative prompt."""
    return PromptEmbeds(states[0], states[1] if len(states) > 1 else None)


@dataclass(frozen=True)
class DenoiseStage:
    """Denoise: sampler, guidance and denoiser turn noise into latents (1, C, T, h, w)."""

    job: StageContext[StepVideoSpec]
    name: str = "denoise"
    component: str = "denoiser"
    goes_on: bool = True

    def num_steps(self, num_takes: int) -> int:
        """Sampler steps of all videos."""
        return num_takes * self.job.settings.num_inference_steps

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Set `latents` of each video."""
        job, teams = self.job, self.job.teams
        model = yield from job.loaded(self.component)
        put_on = sharding.apply(model, teams.team, teams.groups, teams.way)
        sample = partial(self._sample, model)
        yield from run_sharded_denoising(self, job, model, put_on, takes, sample)

    def _sample(
        self, model: StepVideoModel, guard: Guard, take: VideoState
    ) -> Iterator[SamplerStep]:
        settings, device = self.job.settings, self.job.device(self.component)
        x, start = take.latents, take.step
        if not start:
            fresh = noise.start_noise(take.seed, latent_shape(self.job.model.config, settings))[
                None
            ]
            x = fresh if take.start_noise is None else take.start_noise

        def make() -> Denoiser:
            return Denoiser(model, take.text, guard.settings, device)

        sigmas = flow_matching.schedule(settings.num_inference_steps, settings.option("time_shift"))
        denoise = GuardedDenoiser(guard, make, start)
        yield from flow_matching.sample(denoise, x.to(device), sigmas, start=start)


@dataclass(frozen=True)
class DecodeStage:
    """Decode latents to frames, in the pieces that the autoencoder was trained on."""

    job: StageContext[StepVideoSpec]
    name: str = "decode"
    component: str = "vae"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One step per piece."""
        return num_takes * len(self._pieces)

    @property
    def _pieces(self) -> tuple[FrameChunk, ...]:
        return self.job.model.config.vae.pieces(self.job.settings.num_frames)

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Yield the frames of each video as they are finished; one frame waits at each seam.

        With several ranks, the pieces are distributed; the first rank receives all and blends the
        seams.
        """
        job, team = self.job, self.job.teams.team
        vae: StepVAE = yield from job.loaded(self.component)
        guard = job.guard(self.name, {self.component: vae})
        for place, take in enumerate(takes):
            decode = partial(self._decode, vae, guard, take)
            pieces = DecodePieces(
                len(self._pieces), decode, partial(self._ready, SeamBlender(dim=0))
            )
            yield from stages.decode_pieces(self.name, takes, place, guard, team, pieces)

    def _decode(
        self, vae: StepVAE, guard: Guard, take: VideoState, number: int, step: int
    ) -> Tensor:
        """Pixels (T, C, H, W) of one piece, on the host."""
        latents = take.latents.to(self.job.device(self.component))

        def decode() -> Tensor:
            # As it was planned, or in less where memory ran out.
            return decode_frames(vae, latents, self._pieces[number], guard.settings)

        return guard.decoded(step, decode, latents).to("cpu", torch.float32)

    def _ready(self, seams: SeamBlender, number: int, pixels_TCHW: Tensor) -> Tensor:
        """Frames that are finished once that piece is decoded."""
        is_last = number + 1 == len(self._pieces)
        return stages.as_frames(seams.add(pixels_TCHW, is_last=is_last))
