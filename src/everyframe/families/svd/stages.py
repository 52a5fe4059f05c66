"""Stages of a Stable Video Diffusion run: image embedding, image latents, denoising, decoding.

Each stage loads one component, uses it for every video and frees it when its generator ends. The
computation is that of diffusers' `StableVideoDiffusionPipeline`, step by step; only the source of
the initial noise differs. With several ranks, one encodes the image and broadcasts the result;
the frames of the UNet are split over all ranks (`sharding.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everyframe.core.events import Event
from everyframe.families.svd import denoiser, sharding
from everyframe.families.svd import vae as vae_calls
from everyframe.families.svd.config import SVDConfig
from everyframe.families.svd.denoiser import Denoiser, ImageConditioning
from everyframe.families.svd.settings import latent_shape
from everyframe.families.svd.spec import SVDSpec
from everyframe.families.svd.unet import VideoUNet
from everyframe.runtime import stages
from everyframe.runtime.guard import Guard
from everyframe.runtime.interface import VideoState
from everyframe.runtime.stages import DecodePieces, GuardedDenoiser, run_sharded_denoising
from everyframe.samplers import euler_karras, noise
from everyframe.samplers.base import Step as SamplerStep


@dataclass(frozen=True)
class SVDContext(stages.StageContext[SVDSpec]):
    """Shared by all stages: plan, model and ranks."""

    @property
    def config(self) -> SVDConfig:
        """The model's configs."""
        return self.model.config

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.settings.height, self.settings.width

    @property
    def fit(self) -> str:
        """How an image of another aspect ratio is fitted: crop, pad or stretch."""
        return str(self.settings.option("fit"))


def given_picture(take: VideoState) -> Any:
    """Conditioning image of a video: uint8 (1, H, W, 3)."""
    assert take.given.first is not None, "settled without a picture"
    return take.given.first


@dataclass(frozen=True)
class ImageEmbedStage:
    """Embed the image with CLIP, once for all videos."""

    job: SVDContext
    name: str = "image"
    component: str = "image_encoder"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One step: all videos share the image."""
        return 1

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Set the embedding in `known` of each video: one rank encodes and broadcasts."""
        world = self.job.teams.world
        told = yield from stages.on_lead_rank(
            world, self._encoded(takes), "the picture is handed on"
        )
        for take in takes:
            take.known = ImageConditioning(told[0])

    def _encoded(self, takes: Sequence[VideoState]) -> Generator[Event, None, list[Tensor]]:
        job = self.job
        encoder = yield from job.loaded(self.component)
        guard = job.guard(self.name, {self.component: encoder})
        shown = denoiser.for_clip(given_picture(takes[0]), job.size, job.fit)
        pixels = denoiser.clip_input(shown, job.config).to(job.device(self.component))

        def encode() -> Tensor:
            embeds: Tensor = encoder(pixel_values=pixels).image_embeds
            return embeds[:, None].to("cpu", torch.float32)

        return (yield from stages.encode_once(self.name, guard, takes, [encode]))


@dataclass(frozen=True)
class DenoiseStage:
    """Denoise: sampler, guidance and UNet turn noise into latents (1, T, C, h, w)."""

    job: SVDContext
    name: str = "denoise"
    component: str = "unet"
    goes_on: bool = True

    def num_steps(self, num_takes: int) -> int:
        """Sampler steps of all videos."""
        return num_takes * self.job.settings.num_inference_steps

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Set `latents` of each video."""
        job, teams = self.job, self.job.teams
        unet = yield from job.loaded(self.component)
        put_on = sharding.apply(unet, teams.team, teams.groups)
        sample = partial(self._sample, unet)
        yield from run_sharded_denoising(self, job, unet, put_on, takes, sample)
        for take in takes:
            take.known = None

    def _sample(self, unet: VideoUNet, guard: Guard, take: VideoState) -> Iterator[SamplerStep]:
        job, config = self.job, self.job.config
        device = job.device(self.component)
        steps = job.settings.num_inference_steps
        sigmas = euler_karras.schedule(steps, config.sigma_min, config.sigma_max)

        def make() -> Denoiser:
            return Denoiser(unet, take.known, guard.settings, device)

        denoise = GuardedDenoiser(guard, make, take.step)
        if take.step:
            x = take.latents.to(device)
            return euler_karras.sample(denoise, x, sigmas, start=take.step)
        scale = euler_karras.start_scale(sigmas) if config.starts_scaled else sigmas[0].float()
        start = take.start_noise
        if start is None:
            start = noise.start_noise(take.seed, latent_shape(config, job.settings))[None]
        return euler_karras.sample(denoise, start.to(device) * scale, sigmas)


@dataclass(frozen=True)
class ImageLatentStage:
    """Encode the image, with a little noise added, to latents."""

    job: SVDContext
    name: str = "given frames"
    component: str = "vae"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One step per video: each has its own noise."""
        return num_takes

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Set the latents in `known` of each video: one rank encodes, its video group receives."""
        team = self.job.teams.team
        told = yield from stages.on_lead_rank(
            team, self._encoded(takes), "given frames are handed on"
        )
        for take, latents in zip(takes, told, strict=True):
            take.known = ImageConditioning(take.known.embedding, latents)

    def _encoded(self, takes: Sequence[VideoState]) -> Generator[Event, None, list[Tensor]]:
        vae = yield from self.job.loaded(self.component)
        guard = self.job.guard(self.name, {self.component: vae})
        encode = partial(self._latents, vae, guard)
        return (yield from stages.encode_per_video(self.name, guard, takes, encode))

    def _latents(self, vae: Any, guard: Guard, take: VideoState) -> Tensor:
        """Latents of the video's image, on the CPU.

        They are not scaled: the denoiser was trained on the encoder's raw values here.
        """
        job = self.job
        picture = denoiser.for_vae(given_picture(take), job.size, job.fit)
        strength = float(job.settings.option("noise_aug_strength"))
        if strength:
            picture = picture + strength * noise.plain_noise(take.seed, picture.shape)
        picture = picture.to(job.device(self.component))
        return vae_calls.encode(vae, job.config, picture, guard.settings).to("cpu", torch.float32)


@dataclass(frozen=True)
class DecodeStage:
    """Decode latents to frames, `decode_chunk_size` at once."""

    job: SVDContext
    name: str = "decode"
    component: str = "vae"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One step per chunk."""
        return num_takes * -(-self.job.settings.num_frames // self._chunk_size)

    @property
    def _chunk_size(self) -> int:
        return int(self.job.settings.option("decode_chunk_size"))

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Yield the frames of each video.

        With several ranks, the chunks are distributed; the first rank receives all frames.
        """
        team = self.job.teams.team
        vae = yield from self.job.loaded(self.component)
        guard = self.job.guard(self.name, {self.component: vae})
        for place, take in enumerate(takes):
            given = np.asarray(given_picture(take))
            # A picture of one colour may well give frames of one.
            is_asked = bool(given.min() == given.max())
            chunks = take.latents[0].split(self._chunk_size)
            decode = partial(self._decode, vae, guard, chunks, is_asked)
            pieces = DecodePieces(len(chunks), decode)
            yield from stages.decode_pieces(self.name, takes, place, guard, team, pieces)

    def _decode(
        self,
        vae: Any,
        guard: Guard,
        chunks_TCHW: Sequence[Tensor],
        is_asked: bool,
        number: int,
        step: int,
    ) -> Tensor:
        """Frames (T, H, W, 3) in 0..1 of chunk `number`."""
        config = self.job.config
        latents = chunks_TCHW[number] * (1 / config.scaling_factor)
        latents = latents.to(self.job.device(self.component))

        def decode() -> Tensor:
            # A chunk as it was planned, or in smaller ones where memory ran out.
            at_once = int(guard.settings.option("decode_chunk_size"))
            parts = torch.split(latents, at_once)
            return torch.cat(
                [vae_calls.decode(vae, config, part, guard.settings) for part in parts]
            )

        return stages.as_frames(guard.decoded(step, decode, latents, is_asked=is_asked))
