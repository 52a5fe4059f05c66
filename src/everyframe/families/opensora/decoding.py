"""The last stage of an Open-Sora run: latents become frames, piece by piece.

Pieces are those that the autoencoder was trained on; several ranks deal them out. Read next:
`stages.py` for the stages before, `everyframe.parallel.pieces`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from everyframe.core.events import Event, Frames, Loaded, Step, event_of
from everyframe.families.family import Take
from everyframe.families.guarding import Guard
from everyframe.families.opensora import coding
from everyframe.families.opensora.settle import PIECE
from everyframe.families.opensora.stages import Job, as_float
from everyframe.families.opensora.vae import ImageVAE, Piece, VideoVAE
from everyframe.parallel.pieces import in_order, owners


@dataclass(frozen=True)
class DecodeStage:
    """Latents become frames, in the pieces that the autoencoder was trained on."""

    job: Job
    name: str = "decode"
    component: str = "vae"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One a piece."""
        return num_takes * len(self.job.sizes.vae.pieces(self.job.settings.num_frames))

    def run(self, takes: Sequence[Take]) -> Iterator[Event]:
        """Yield the frames of each take that are new, and keep the end for the clip after.

        Several ranks deal out the pieces; all frames come to their first one.
        """
        job, team, began = self.job, self.job.teams.team, time.perf_counter()
        vae = job.load_vae()
        yield Loaded("vae", time.perf_counter() - began)
        guard = Guard(job.plan, self.name, {"vae": vae}, savings=job.savings)
        total, done = self.num_steps(len(takes)), 0
        for take in takes:
            guard.take(take)
            before = job.before(take) if team.is_lead else None
            skip = 0 if before is None else len(before)
            if job.clip == 0 and take.given.source is not None:
                # Piece by piece: a long source as floats would be larger than any stage.
                for start in range(0, len(take.given.source), PIECE):
                    source = as_float(take.given.source[start : start + PIECE])
                    yield Frames(take.seed, len(source), source.numpy())
            begun = time.perf_counter()
            tail: list[Tensor] = []
            for frames, told in self._pieces(vae, guard, take):
                tail = [*tail, frames][-2:]
                now = time.perf_counter()
                done += 1
                yield from map(event_of, told)
                yield Step(self.name, done, total, take.seed, now - begun)
                new = frames[min(skip, len(frames)) :]
                skip -= len(frames) - len(new)
                if len(new):
                    yield Frames(take.seed, len(new), new.numpy())
                begun = time.perf_counter()
            take.latents = None
            # Only where a clip follows: these are floats, one lot for each of many videos.
            follows = job.clip + 1 < job.settings.chain
            take.tail = torch.cat(tail)[-PIECE:] if follows and tail else None

    def _pieces(
        self, vae: ImageVAE | VideoVAE, guard: Guard, take: Take
    ) -> Iterator[tuple[Tensor, list[Any]]]:
        """Frames (T, H, W, 3) in 0..1 and what happened, piece by piece, where they come to."""
        team = self.job.teams.team
        latents = take.latents.to(self.job.plan.component("vae").device)
        given = (take.given.first, take.given.last, take.given.source)
        is_asked = any(each is not None and each.min() == each.max() for each in given)
        pieces = vae.pieces(self.job.settings.num_frames)

        def make(number: int) -> tuple[Tensor, list[Any]]:
            decode = partial(_decoded, vae, guard, latents, pieces[number])
            pixels = guard.decoded(number + 1, decode, latents, is_asked=is_asked)
            frames = rearrange(pixels, "t c h w -> t h w c").to("cpu", torch.float32)
            return (frames / 2 + 0.5).clamp(0, 1), [event.to_json() for event in guard.events()]

        return in_order(team, owners(len(pieces), team.weights), make, "frames are handed over")


def _decoded(vae: ImageVAE | VideoVAE, guard: Guard, latents: Tensor, piece: Piece) -> Tensor:
    """The pixels (T, C, H, W) of one piece."""
    # As it was planned, or in less where memory ran out.
    pixels = coding.decoded(vae, latents, piece, guard.settings)
    return rearrange(pixels[0], "c t h w -> t c h w")
