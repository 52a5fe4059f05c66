"""The stages of a Stable Video Diffusion run: picture, its latents, denoising, decoding.

Each loads one component, works on every take with it and lets go of it when its generator ends.
What is computed is diffusers' `StableVideoDiffusionPipeline` step by step; what differs is that an
autoencoder marked `force_upcast` decodes in float32 too, and where start noise comes from.
Several ranks share a video: one encodes the picture and tells the others, all hold a part of the
UNet's frames, and chunks are dealt out to be decoded.
Read next: `pictures.py`, `sharding.py`, `samplers/euler_karras.py`.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from everyframe.core.events import Event, Frames, Loaded, Step, event_of
from everyframe.core.plan import Plan, Settings
from everyframe.families import tiles
from everyframe.families.family import Savings, Take
from everyframe.families.guarding import Guard
from everyframe.families.loading import load_component
from everyframe.families.stepping import denoised
from everyframe.families.svd import pictures, sharding
from everyframe.families.svd.checkpoint import Files
from everyframe.families.svd.components import Builders
from everyframe.families.svd.config import SVDConfig
from everyframe.families.svd.settle import latent_shape
from everyframe.families.svd.unet import VideoUNet
from everyframe.parallel.pieces import in_order, owners
from everyframe.parallel.team import ONE, Teams
from everyframe.samplers import euler_karras, noise
from everyframe.samplers.step import Step as SamplerStep


@dataclass(frozen=True)
class Job:
    """What all stages share: the plan, the model's configs and files, ranks."""

    plan: Plan
    builders: Builders
    files: Files
    savings: Savings | None = None
    teams: Teams = ONE

    @property
    def settings(self) -> Settings:
        """The plan's settings."""
        return self.plan.settings

    @property
    def config(self) -> SVDConfig:
        """The model's configs."""
        return self.builders.config

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.settings.height, self.settings.width

    @property
    def fit(self) -> str:
        """How a picture of other proportions is fitted."""
        return str(self.settings.option("fit"))

    def device(self, component: str) -> str:
        """Where a component runs."""
        return self.plan.component(component).device

    def load_vae(self) -> Any:
        """The autoencoder with its weights."""
        return load_component(
            self.plan.component("vae"),
            self.builders.vae,
            *self.files.weights("vae"),
            outputs=self.builders.outputs("vae"),
        )


@dataclass(frozen=True)
class Picture:
    """The given picture as the denoiser sees it: CLIP's embedding (1, 1, D), latents (1, C, h, w).

    `latents` is None until the autoencoder has run. Both in float32 on the CPU.
    """

    embedding: Tensor
    latents: Tensor | None = None


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
        mine: list[Tensor] | None = None
        if world.is_lead:
            mine = [(yield from self._encoded(takes))]
        embedding = world.share(mine, 0, "the picture is handed on")[0]
        for take in takes:
            take.known = Picture(embedding)

    def _encoded(self, takes: Sequence[Take]) -> Generator[Event, None, Tensor]:
        job, began = self.job, time.perf_counter()
        encoder = load_component(
            job.plan.component("image_encoder"),
            job.builders.image_encoder,
            *job.files.weights("image_encoder"),
        )
        yield Loaded("image_encoder", time.perf_counter() - began)
        begun = time.perf_counter()
        shown = pictures.for_clip(_given(takes[0]), job.size, job.fit)
        pixels = pictures.clip_input(shown, job.config).to(job.device("image_encoder"))
        guard = Guard(job.plan, self.name, {"image_encoder": encoder})
        embeds = guard.call(1, lambda: encoder(pixel_values=pixels).image_embeds)
        yield from guard.events()
        yield Step(self.name, 1, 1, takes[0].seed, time.perf_counter() - begun)
        embedding: Tensor = embeds[:, None].to("cpu", torch.float32)
        return embedding


@dataclass(frozen=True)
class EncodeStage:
    """The picture, with a little noise on it, through the autoencoder's encoder."""

    job: Job
    name: str = "given frames"
    component: str = "vae"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One a take: each has noise of its own."""
        return num_takes

    def run(self, takes: Sequence[Take]) -> Iterator[Event]:
        """Complete each take's `known`: one rank encodes, those that share its videos are told."""
        team = self.job.teams.team
        if team.is_lead:
            yield from self._encoded(takes)
        for take in takes:
            mine = [take.known.latents] if team.is_lead else None
            latents = team.share(mine, 0, "given frames are handed on")[0]
            take.known = Picture(take.known.embedding, latents)

    def _encoded(self, takes: Sequence[Take]) -> Iterator[Event]:
        job, began = self.job, time.perf_counter()
        vae = job.load_vae()
        yield Loaded("vae", time.perf_counter() - began)
        guard = Guard(job.plan, self.name, {"vae": vae})
        strength = float(job.settings.option("noise_aug_strength"))
        for number, take in enumerate(takes, start=1):
            begun = time.perf_counter()
            guard.take(take)
            picture = pictures.for_vae(_given(take), job.size, job.fit)
            if strength:
                picture = picture + strength * noise.plain_noise(take.seed, picture.shape)
            picture = picture.to(job.device("vae"))
            latents = guard.call(number, partial(_encoded, vae, picture))
            yield from guard.events()
            # Not scaled: the denoiser was trained on the encoder's own values here.
            take.known = Picture(take.known.embedding, latents.to("cpu", torch.float32))
            yield Step(self.name, number, len(takes), take.seed, time.perf_counter() - begun)


def _encoded(vae: Any, picture: Tensor) -> Tensor:
    latents: Tensor = vae.encode(picture).latent_dist.mode()
    return latents


def _decoded(vae: Any, config: SVDConfig, latents: Tensor) -> Tensor:
    together = {"num_frames": len(latents)} if config.decodes_together else {}
    pixels: Tensor = vae.decode(latents, **together).sample
    return pixels


def _given(take: Take) -> Any:
    assert take.given.first is not None, "settled without a picture"
    return take.given.first


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
        job, began = self.job, time.perf_counter()
        unet = load_component(
            job.plan.component("unet"),
            job.builders.unet,
            *job.files.weights("unet"),
            outputs=job.builders.outputs("unet"),
        )
        yield Loaded("unet", time.perf_counter() - began)
        team = job.teams.team
        with sharding.apply(unet, team, job.teams.groups) as put_on:
            apart = put_on.apart if team.size > 1 else None
            guard = Guard(job.plan, self.name, {"unet": unet}, savings=job.savings, apart=apart)

            def batches(take: Take) -> Iterator[Iterator[SamplerStep]]:
                yield self._sample(unet, guard, take)

            yield from denoised(self.name, takes, job.settings.num_inference_steps, guard, batches)
        for take in takes:
            take.known = None

    def _sample(self, unet: VideoUNet, guard: Guard, take: Take) -> Iterator[SamplerStep]:
        job, config = self.job, self.job.config
        device = job.device("unet")
        steps = job.settings.num_inference_steps
        sigmas = euler_karras.schedule(steps, config.sigma_min, config.sigma_max)

        def make() -> Denoiser:
            return Denoiser(unet, take.known, guard.settings, device)

        denoise = guard.denoiser(make, take.step)
        if take.step:
            x = take.latents.to(device)
            return euler_karras.sample(denoise, x, sigmas, start=take.step)
        scale = euler_karras.start_scale(sigmas) if config.starts_scaled else sigmas[0].float()
        start = take.start_noise
        if start is None:
            start = noise.start_noise(take.seed, latent_shape(config, job.settings))[None]
        return euler_karras.sample(denoise, start.to(device) * scale, sigmas)


class Denoiser:
    """``denoise(x, t)`` for the sampler: the UNet with the picture and guidance inside.

    Guidance rises from frame to frame, from `min_guidance_scale` to `max_guidance_scale`. The
    unconditional branch sees zeros in place of the picture, its embedding and its latents; frame
    rate, motion and noise are told to both. Where memory is short the plan has them computed one
    after the other.
    """

    def __init__(self, unet: VideoUNet, picture: Picture, settings: Settings, device: str) -> None:
        assert picture.latents is not None, "the encoding stage comes before"
        self._unet = unet
        # Frame rates were counted from 0 in training.
        told = (
            settings.fps - 1,
            settings.option("motion_bucket_id"),
            settings.option("noise_aug_strength"),
        )
        told_BN = torch.tensor([told], dtype=torch.float32)
        embedding, latents_BCHW = picture.embedding, picture.latents
        self._guidance_TCHW: Tensor | None = None
        self._at_once = settings.saving("branches_at_once", 2)
        if settings.guidance_scale > 1:
            low, high = settings.option("min_guidance_scale"), settings.guidance_scale
            rising = torch.linspace(low, high, settings.num_frames, dtype=torch.float32)
            self._guidance_TCHW = rising[:, None, None, None].to(device)
            embedding = torch.cat([torch.zeros_like(embedding), embedding])
            latents_BCHW = torch.cat([torch.zeros_like(latents_BCHW), latents_BCHW])
            told_BN = told_BN.expand(2, -1)
        embedding_BD = embedding[:, 0].to(device)
        self._context = unet.context(embedding_BD, told_BN.to(device), settings.num_frames)
        still = latents_BCHW[:, None].expand(-1, settings.num_frames, -1, -1, -1)
        self._picture_BTCHW = still.to(device)

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """The guided v for scaled x (1, T, C, h, w) and t (1,)."""
        branches = range(len(self._picture_BTCHW))
        lots = [branches[i : i + self._at_once] for i in branches[:: self._at_once]]
        answers = [self._answer(x, t, slice(lot.start, lot.stop)) for lot in lots]
        if self._guidance_TCHW is None:
            return answers[0]
        uncond, cond = torch.cat(answers).chunk(2)
        return uncond + self._guidance_TCHW * (cond - uncond)

    def _answer(self, x: Tensor, t: Tensor, rows: slice) -> Tensor:
        """The UNet's answer for some of the branches."""
        picture_BTCHW = self._picture_BTCHW[rows].to(x.dtype)
        branches = len(picture_BTCHW)
        answer: Tensor = self._unet(
            torch.cat([x.expand(branches, *x.shape[1:]), picture_BTCHW], dim=2),
            t.expand(branches),
            self._context.rows(rows),
        )
        return answer


@dataclass(frozen=True)
class DecodeStage:
    """Latents become frames, `decode_chunk_size` of them at once."""

    job: Job
    name: str = "decode"
    component: str = "vae"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One a chunk."""
        chunk = int(self.job.settings.option("decode_chunk_size"))
        return num_takes * -(-self.job.settings.num_frames // chunk)

    def run(self, takes: Sequence[Take]) -> Iterator[Event]:
        """Yield the frames of each take. Several ranks deal out the chunks; the first has all."""
        job, began = self.job, time.perf_counter()
        vae = job.load_vae()
        yield Loaded("vae", time.perf_counter() - began)
        total, done = self.num_steps(len(takes)), 0
        guard = Guard(job.plan, self.name, {"vae": vae}, savings=job.savings)
        for take in takes:
            begun = time.perf_counter()
            guard.take(take)
            for frames, told in self._chunks(vae, guard, take, done):
                done += 1
                now = time.perf_counter()
                yield from map(event_of, told)
                yield Step(self.name, done, total, take.seed, now - begun)
                yield Frames(take.seed, len(frames), frames.numpy())
                begun = time.perf_counter()
            take.latents = None

    def _chunks(
        self, vae: Any, guard: Guard, take: Take, done: int
    ) -> Iterator[tuple[Tensor, list[Any]]]:
        """Frames (T, H, W, 3) in 0..1 and what happened, chunk by chunk, where they come to."""
        team = self.job.teams.team
        given = np.asarray(_given(take))
        # A picture of one colour may well give frames of one.
        is_asked = bool(given.min() == given.max())
        chunks = take.latents[0].split(int(self.job.settings.option("decode_chunk_size")))

        def make(number: int) -> tuple[Tensor, list[Any]]:
            step = done + number + 1
            frames = self._decode(vae, guard, step, chunks[number], is_asked=is_asked)
            return frames, [event.to_json() for event in guard.events()]

        return in_order(team, owners(len(chunks), team.weights), make, "frames are handed over")

    def _decode(
        self, vae: Any, guard: Guard, chunk: int, latents_TCHW: Tensor, *, is_asked: bool
    ) -> Tensor:
        """Frames (T, H, W, 3) in 0..1 of one chunk."""
        config = self.job.config
        latents = (latents_TCHW * (1 / config.scaling_factor)).to(self.job.device("vae"))
        side = guard.settings.saving(tiles.NAME, 0)

        def decode() -> Tensor:
            # A chunk as it was planned, or in smaller ones where memory ran out.
            at_once = int(guard.settings.option("decode_chunk_size"))
            return torch.cat(
                [
                    tiles.decode_in_tiles(partial(_decoded, vae, config), part, side)
                    for part in torch.split(latents, at_once)
                ]
            )

        pixels = guard.decoded(chunk, decode, latents, is_asked=is_asked)
        pixels = pixels.to("cpu", torch.float32)
        frames: Tensor = rearrange(pixels, "t c h w -> t h w c") / 2 + 0.5
        return frames.clamp(0, 1).contiguous()
