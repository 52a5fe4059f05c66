"""The autoencoder of a Stable Video Diffusion run: a picture becomes latents, latents frames.

An autoencoder marked `force_upcast` decodes in float32 too, where diffusers casts it back before.
Several ranks deal out the chunks. Read next: `stages.py` for the stages between,
`everyframe.families.tiles`, `everyframe.parallel.pieces`.
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
from everyframe.core.plan import Settings
from everyframe.families import coding, tiles
from everyframe.families.coding import Pieces
from everyframe.families.family import Take
from everyframe.families.guarding import Guard
from everyframe.families.svd import pictures
from everyframe.families.svd.config import SVDConfig
from everyframe.families.svd.job import Job, Picture, given_picture
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
        told = yield from coding.from_lead(team, self._encoded(takes), "given frames are handed on")
        for take, latents in zip(takes, told, strict=True):
            take.known = Picture(take.known.embedding, latents)

    def _encoded(self, takes: Sequence[Take]) -> Generator[Event, None, list[Tensor]]:
        vae = yield from self.job.loaded(self.component)
        guard = self.job.guard(self.name, {self.component: vae})
        encode = partial(self._latents, vae, guard)
        return (yield from coding.encoded_each(self.name, guard, takes, encode))

    def _latents(self, vae: Any, guard: Guard, take: Take) -> Tensor:
        """Of the take's picture, on the CPU.

        Not scaled: the denoiser was trained on the encoder's own values here.
        """
        job = self.job
        picture = pictures.for_vae(given_picture(take), job.size, job.fit)
        strength = float(job.settings.option("noise_aug_strength"))
        if strength:
            picture = picture + strength * noise.plain_noise(take.seed, picture.shape)
        picture = picture.to(job.device(self.component))
        return encoded(vae, job.config, picture, guard.settings).to("cpu", torch.float32)


@dataclass(frozen=True)
class DecodeStage:
    """Latents become frames, `decode_chunk_size` of them at once."""

    job: Job
    name: str = "decode"
    component: str = "vae"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One a chunk."""
        return num_takes * -(-self.job.settings.num_frames // self._chunk_size)

    @property
    def _chunk_size(self) -> int:
        return int(self.job.settings.option("decode_chunk_size"))

    def run(self, takes: Sequence[Take]) -> Iterator[Event]:
        """Yield the frames of each take. Several ranks deal out the chunks; the first has all."""
        team = self.job.teams.team
        vae = yield from self.job.loaded(self.component)
        guard = self.job.guard(self.name, {self.component: vae})
        for place, take in enumerate(takes):
            given = np.asarray(given_picture(take))
            # A picture of one colour may well give frames of one.
            is_asked = bool(given.min() == given.max())
            chunks = take.latents[0].split(self._chunk_size)
            decode = partial(self._decode, vae, guard, chunks, is_asked)
            pieces = Pieces(len(chunks), decode)
            yield from coding.decoded(self.name, takes, place, guard, team, pieces)

    def _decode(
        self,
        vae: Any,
        guard: Guard,
        chunks_TCHW: Sequence[Tensor],
        is_asked: bool,
        number: int,
        step: int,
    ) -> Tensor:
        """Frames (T, H, W, 3) in 0..1 of the chunk of that number."""
        config = self.job.config
        latents = chunks_TCHW[number] * (1 / config.scaling_factor)
        latents = latents.to(self.job.device(self.component))

        def decode() -> Tensor:
            # A chunk as it was planned, or in smaller ones where memory ran out.
            at_once = int(guard.settings.option("decode_chunk_size"))
            parts = torch.split(latents, at_once)
            return torch.cat([decoded(vae, config, part, guard.settings) for part in parts])

        return coding.as_frames(guard.decoded(step, decode, latents, is_asked=is_asked))
