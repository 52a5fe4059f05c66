"""The stages of a Stable Video Diffusion run: the picture's meaning, and denoising.

Each loads one component, works on every take with it and lets go of it when its generator ends.
What is computed is diffusers' `StableVideoDiffusionPipeline` step by step; what differs is where
start noise comes from. Several ranks share a video: one encodes the picture and tells the others,
all hold a part of the UNet's frames. The stages with the autoencoder are in `decoding.py`.
Read next: `denoiser.py`, `pictures.py`, `sharding.py`, `samplers/euler_karras.py`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from everyframe.core.events import Event
from everyframe.families import coding
from everyframe.families.denoising import GuardedDenoiser
from everyframe.families.family import Take
from everyframe.families.guarding import Guard
from everyframe.families.stepping import denoised_in_step
from everyframe.families.svd import pictures, sharding
from everyframe.families.svd.denoiser import Denoiser
from everyframe.families.svd.job import Job, Picture, given_picture
from everyframe.families.svd.settle import latent_shape
from everyframe.families.svd.unet import VideoUNet
from everyframe.samplers import euler_karras, noise
from everyframe.samplers.step import Step as SamplerStep


@dataclass(frozen=True)
class ImageStage:
    """The picture through CLIP, once for all takes."""

    job: Job
    name: str = "image"
    component: str = "image_encoder"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One: the picture is everybody's."""
        return 1

    def run(self, takes: Sequence[Take]) -> Iterator[Event]:
        """Begin each take's `known`: one rank encodes, the others are told."""
        world = self.job.teams.world
        told = yield from coding.from_lead(world, self._encoded(takes), "the picture is handed on")
        for take in takes:
            take.known = Picture(told[0])

    def _encoded(self, takes: Sequence[Take]) -> Generator[Event, None, list[Tensor]]:
        job = self.job
        encoder = yield from job.loaded(self.component)
        guard = job.guard(self.name, {self.component: encoder})
        shown = pictures.for_clip(given_picture(takes[0]), job.size, job.fit)
        pixels = pictures.clip_input(shown, job.config).to(job.device(self.component))

        def encode() -> Tensor:
            embeds: Tensor = encoder(pixel_values=pixels).image_embeds
            return embeds[:, None].to("cpu", torch.float32)

        return (yield from coding.encoded_once(self.name, guard, takes, [encode]))


@dataclass(frozen=True)
class DenoiseStage:
    """Noise becomes latents (1, T, C, h, w): the sampler, guidance and the UNet."""

    job: Job
    name: str = "denoise"
    component: str = "unet"
    goes_on: bool = True

    def num_steps(self, num_takes: int) -> int:
        """The sampler's steps for each take."""
        return num_takes * self.job.settings.num_inference_steps

    def run(self, takes: Sequence[Take]) -> Iterator[Event]:
        """Fill each take's `latents`."""
        job, teams = self.job, self.job.teams
        unet = yield from job.loaded(self.component)
        put_on = sharding.apply(unet, teams.team, teams.groups)
        sample = partial(self._sample, unet)
        yield from denoised_in_step(self, job, unet, put_on, takes, sample)
        for take in takes:
            take.known = None

    def _sample(self, unet: VideoUNet, guard: Guard, take: Take) -> Iterator[SamplerStep]:
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
