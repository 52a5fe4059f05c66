"""The last stage of an Open-Sora run: latents become frames, piece by piece.

Pieces are those that the autoencoder was trained on; several ranks deal them out. Read next:
`stages.py` for the stages before, `everyframe.parallel.pieces`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from everyframe.core.events import Event, Frames
from everyframe.families import coding
from everyframe.families.coding import Pieces
from everyframe.families.family import Take
from everyframe.families.guarding import Guard
from everyframe.families.opensora.coding import decoded
from everyframe.families.opensora.settle import PIECE
from everyframe.families.opensora.stages import Job
from everyframe.families.opensora.vae import ImageVAE, Piece, VideoVAE


@dataclass(frozen=True)
class DecodeStage:
    """Latents become frames, in the pieces that the autoencoder was trained on."""

    job: Job
    name: str = "decode"
    component: str = "vae"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One a piece."""
        return num_takes * len(self.job.vae.pieces(self.job.settings.num_frames))

    def run(self, takes: Sequence[Take]) -> Iterator[Event]:
        """Yield the frames of each take that are new, and keep the end for the clip after.

        Several ranks deal out the pieces; all frames come to their first one.
        """
        job, team = self.job, self.job.teams.team
        vae = yield from job.loaded(self.component)
        guard = job.guard(self.name, {self.component: vae})
        for place, take in enumerate(takes):
            if job.clip == 0 and take.given.source is not None:
                # Piece by piece: a long source as floats would be larger than any stage.
                for start in range(0, len(take.given.source), PIECE):
                    source = coding.as_floats(take.given.source[start : start + PIECE])
                    yield Frames(take.seed, len(source), source.numpy())
            before = job.before(take) if team.is_lead else None
            new = _New(0 if before is None else len(before))
            pieces = self._pieces(vae, guard, take, new)
            yield from coding.decoded(self.name, takes, place, guard, team, pieces)
            # Only where a clip follows: these are floats, one lot for each of many videos.
            follows = job.clip + 1 < job.settings.chain
            take.tail = torch.cat(new.tail)[-PIECE:] if follows and new.tail else None

    def _pieces(self, vae: ImageVAE | VideoVAE, guard: Guard, take: Take, new: _New) -> Pieces:
        latents = take.latents.to(self.job.device(self.component))
        given = (take.given.first, take.given.last, take.given.source)
        is_asked = any(each is not None and each.min() == each.max() for each in given)
        pieces = vae.pieces(self.job.settings.num_frames)

        def decode(number: int, step: int) -> Tensor:
            call = partial(_decoded, vae, guard, latents, pieces[number])
            return coding.as_frames(guard.decoded(step, call, latents, is_asked=is_asked))

        return Pieces(len(pieces), decode, new.of)


class _New:
    """The frames of a clip without the first `skip`, which are the clip's before; and its `tail`.

    That is the last two pieces, in which the frames lie that a clip after it goes on from.
    """

    def __init__(self, skip: int) -> None:
        self._skip = skip
        self.tail: list[Tensor] = []

    def of(self, _: int, piece_THWC: Tensor) -> Tensor:
        """Those of the next piece."""
        self.tail = [*self.tail, piece_THWC][-2:]
        new = piece_THWC[min(self._skip, len(piece_THWC)) :]
        self._skip -= len(piece_THWC) - len(new)
        return new


def _decoded(vae: ImageVAE | VideoVAE, guard: Guard, latents: Tensor, piece: Piece) -> Tensor:
    """The pixels (T, C, H, W) of one piece."""
    # As it was planned, or in less where memory ran out.
    pixels = decoded(vae, latents, piece, guard.settings)
    return rearrange(pixels[0], "c t h w -> t c h w")
