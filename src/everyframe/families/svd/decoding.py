"""The autoencoder of a Stable Video Diffusion run: a picture becomes latents, latents frames.

An autoencoder marked `force_upcast` decodes in float32 too, where diffusers casts it back before.
Several ranks deal out the chunks. Read next: `stages.py` for the stages between,
`everyframe.families.tiles`, `everyframe.parallel.pieces`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from everyframe.core.events import Event, Frames, Loaded, Step, event_of
from everyframe.core.plan import Settings
from everyframe.families import tiles
from everyframe.families.family import Take
from everyframe.families.guarding import Guard
from everyframe.families.svd import pictures
from everyframe.families.svd.config import SVDConfig
from everyframe.families.svd.job import Job, Picture, given_picture
from everyframe.parallel.pieces import in_order, owners
from everyframe.samplers import noise


def encoded(
    vae: Any,
    config: SVDConfig,
    picture_BCHW: Tensor,
    settings: Settings,
    *,
    most_tiles: int | None = None,
) -> Tensor:
    """Latents (B, C, h, w) of pictures in -1..1, not scaled; in tiles if the settings say so."""
    side = settings.saving(tiles.ENCODE, 0)

    def encode(part: Tensor) -> Tensor:
        latents: Tensor = vae.encode(part).latent_dist.mode()
        return latents

    factor = config.spatial_factor
    return tiles.encode_in_tiles(encode, picture_BCHW, factor, side, most=most_tiles)


def decoded(
    vae: Any,
    config: SVDConfig,
    latents_TCHW: Tensor,
    settings: Settings,
    *,
    most_tiles: int | None = None,
) -> Tensor:
    """Pixels (T, 3, H, W) around -1..1 of latents that are decoded together."""
    side = settings.saving(tiles.DECODE, 0)
    together = {"num_frames": len(latents_TCHW)} if config.decodes_together else {}

    def decode(part: Tensor) -> Tensor:
        pixels: Tensor = vae.decode(part, **together).sample
        return pixels

    return tiles.decode_in_tiles(decode, latents_TCHW, side, most=most_tiles)


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
        guard = Guard(job.plan, self.name, {"vae": vae}, savings=job.savings)
        strength = float(job.settings.option("noise_aug_strength"))
        for number, take in enumerate(takes, start=1):
            begun = time.perf_counter()
            guard.take(take)
            picture = pictures.for_vae(given_picture(take), job.size, job.fit)
            if strength:
                picture = picture + strength * noise.plain_noise(take.seed, picture.shape)
            picture = picture.to(job.device("vae"))

            def encode(picture: Tensor = picture) -> Tensor:
                return encoded(vae, job.config, picture, guard.settings)

            latents = guard.call(number, encode)
            yield from guard.events()
            # Not scaled: the denoiser was trained on the encoder's own values here.
            take.known = Picture(take.known.embedding, latents.to("cpu", torch.float32))
            yield Step(self.name, number, len(takes), take.seed, time.perf_counter() - begun)


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
        given = np.asarray(given_picture(take))
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

        def decode() -> Tensor:
            # A chunk as it was planned, or in smaller ones where memory ran out.
            at_once = int(guard.settings.option("decode_chunk_size"))
            parts = torch.split(latents, at_once)
            return torch.cat([decoded(vae, config, part, guard.settings) for part in parts])

        pixels = guard.decoded(chunk, decode, latents, is_asked=is_asked)
        pixels = pixels.to("cpu", torch.float32)
        frames: Tensor = rearrange(pixels, "t c h w -> t h w c") / 2 + 0.5
        return frames.clamp(0, 1).contiguous()
