"""VAE stages of an inpainting run: source frames to latents, latents to frames.

Each stage reads the frames again, one batch at a time; between stages only latents are stored. The
noise that samples the autoencoder's posterior is the same for every frame, so still content stays
still.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from everyframe.core.events import AudioDecoded, Event, FramesDecoded, Note, Step
from everyframe.families.inpaint import vae as vae_calls
from everyframe.families.inpaint.inputs import WHITE
from everyframe.families.inpaint.stage_context import ConditioningLatents, InpaintContext, batched
from everyframe.families.inpaint.stages import hear, share
from everyframe.runtime import stages
from everyframe.runtime.guard import Guard
from everyframe.runtime.interface import VideoState
from everyframe.runtime.rank_shares import active_ranks, batch_owner
from everyframe.samplers import noise


@dataclass(frozen=True)
class SourceLatentStage:
    """Encode source and mask of every frame to latents, with separate noise for each video."""

    job: InpaintContext
    name: str = "given frames"
    component: str = "vae"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One step per batch of frames, for all videos."""
        return self.job.num_batches

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Set `known` of each video.

        With several ranks, the batches are distributed and every rank receives all results.
        """
        job, team = self.job, self.job.teams.team
        vae = yield from job.loaded(self.component)
        guard = job.guard(self.name, {self.component: vae})
        together, total = len(active_ranks(team.weights)), job.num_batches
        mine: dict[int, list[ConditioningLatents]] = {}
        happened: list[Event] = []
        for number, batch in enumerate(batched(job.painted(takes), job.together)):
            if batch_owner(number, team.weights) != team.rank:
                continue
            begun = time.perf_counter()
            source_FCHW, mask_FCHW = self._tensors(batch)
            mine[number] = []
            for take in takes:
                guard.take(take)
                encode = partial(self._encode, vae, guard, take, source_FCHW, mask_FCHW)
                mine[number].append(guard.call(number + 1, encode))
            told = [*guard.events()]
            happened += told
            yield from told
            done, seconds = min(number + together, total), time.perf_counter() - begun
            yield Step(self.name, done, total, takes[0].seed, seconds)
        hear(team, guard, happened)
        yield from guard.events()
        for place, take in enumerate(takes):
            pieces = [
                ConditioningLatents.of(
                    share(
                        team,
                        mine[number][place].tensors() if number in mine else None,
                        batch_owner(number, team.weights),
                    )
                )
                for number in range(total)
            ]
            take.known = ConditioningLatents.joined(pieces)

    def _tensors(self, batch: Sequence[tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
        """Source (F, 3, H, W) in -1..1 and mask (F, 1, H, W) of 0 and 1, padded."""
        geometry = self.job.geometry
        pictures = np.stack([geometry.pad(frame) for frame, _ in batch])
        masks = np.stack([geometry.pad(mask, with_edge=False) for _, mask in batch])
        source = stages.as_floats(pictures)
        white = torch.from_numpy(masks >= WHITE).to(torch.float32)
        return 2.0 * rearrange(source, "f h w c -> f c h w") - 1.0, white[:, None]

    def _encode(
        self, vae: Any, guard: Guard, take: VideoState, source_FCHW: Tensor, mask_FCHW: Tensor
    ) -> ConditioningLatents:
        config = self.job.config
        shape = self.job.latent_shape
        # In diffusers' order: the source's draw comes first, where it is drawn at all.
        draw = 0
        source = masked = None
        if not config.takes_mask or self.job.mixes_source_in(take):
            drawn = noise.plain_noise(take.seed, (1, *shape))
            source = self._latents(vae, guard, source_FCHW, drawn)
            draw = 1
        if config.takes_mask:
            picked = noise.plain_noise(take.seed, (1, *shape), draw)
            masked = self._latents(vae, guard, source_FCHW * (mask_FCHW < 0.5), picked)
        return ConditioningLatents(F.interpolate(mask_FCHW, size=shape[1:]), masked, source)

    def _latents(self, vae: Any, guard: Guard, picture_FCHW: Tensor, noise_1Chw: Tensor) -> Tensor:
        """Scaled latents of images; `noise_1Chw` samples the posterior."""
        config, given = self.job.config, picture_FCHW.to(self.job.device("vae"))
        mean, deviation = vae_calls.posterior(vae, given, config.spatial_factor, guard.settings)
        latents: Tensor = config.scaling_factor * (mean + deviation * noise_1Chw)
        return latents


@dataclass(frozen=True)
class DecodeStage:
    """Decode latents to frames, and restore the source outside of the mask."""

    job: InpaintContext
    name: str = "decode"
    component: str = "vae"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One step per batch of frames."""
        return num_takes * self.job.num_batches

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Yield the frames of each video.

        With several ranks, the batches are distributed; the first rank receives all frames.
        """
        vae = yield from self.job.loaded(self.component)
        guard = self.job.guard(self.name, {self.component: vae})
        total, done = self.num_steps(len(takes)), 0
        for take in takes:
            guard.take(take)
            yield from self._sound(takes, take)
            begun = time.perf_counter()
            for frames, is_painted, told in self._frames(vae, guard, takes, take, done):
                yield from told
                if is_painted:
                    done += 1
                    yield Step(self.name, done, total, take.seed, time.perf_counter() - begun)
                yield FramesDecoded(take.seed, len(frames), frames.numpy())
                begun = time.perf_counter()
            take.latents = None

    def _frames(
        self, vae: Any, guard: Guard, takes: Sequence[VideoState], take: VideoState, done: int
    ) -> Iterator[tuple[Tensor, bool, list[Event]]]:
        """Yield frames (F, H, W, 3) in 0..1, whether any was denoised, and events, per batch."""
        job, team = self.job, self.job.teams.team
        latents = take.latents.split(job.together)
        # The lot that is at hand, which of it was denoised, and the number of their batch.
        now: list[tuple[Any, Any]] = []
        painted: list[int] = []
        count = -1

        def owners() -> Iterator[int]:
            nonlocal count
            for lot in self._lots(takes):
                now[:] = lot
                painted[:] = [number for number, (_, mask) in enumerate(lot) if job.paints(mask)]
                count += bool(painted)
                yield batch_owner(max(count, 0), team.weights)

        def decode(_: int) -> Tensor:
            frames = stages.as_floats(np.stack([frame for frame, _ in now]))
            if painted:
                these = [now[number] for number in painted]
                step = done + count + 1
                frames[painted] = self._decode(vae, guard, step, latents[count], these)
            return frames

        for frames, told in stages.distribute_pieces(team, guard, owners(), decode):
            yield frames, bool(painted), told

    def _lots(self, takes: Sequence[VideoState]) -> Iterator[list[tuple[Any, Any]]]:
        """Yield all frames in order, in lists that hold one batch of denoised frames, or none."""
        job = self.job
        lot: list[tuple[Any, Any]] = []
        num_painted = 0
        for pair in job.frames(takes):
            lot.append(pair)
            num_painted += job.paints(pair[1])
            if num_painted in (0, job.together):
                yield lot
                lot, num_painted = [], 0
        if lot:
            yield lot

    def _sound(self, takes: Sequence[VideoState], take: VideoState) -> Iterator[Event]:
        """Yield the source's audio, if the result plays at the source's speed."""
        settings = self.job.settings
        inputs = self.job.inputs(takes)
        sound = inputs.sound(settings.num_frames)
        if sound is None:
            return
        assert inputs.source.fps is not None, "what has sound has a rate"
        if float(inputs.source.fps) != settings.fps:
            yield Note("the source's sound is left out, as the result plays at another speed")
            return
        yield AudioDecoded(take.seed, sound.rate, sound.seconds, sound.samples)

    def _decode(
        self,
        vae: Any,
        guard: Guard,
        number: int,
        latents: Tensor,
        batch: Sequence[tuple[Any, Any]],
    ) -> Tensor:
        """Frames (F, H, W, 3) in 0..1 at the result's size."""
        job = self.job
        scaled = (latents / job.config.scaling_factor).to(job.device("vae"))
        given = np.stack([frame for frame, _ in batch])
        is_asked = bool((given.max(axis=(1, 2)) == given.min(axis=(1, 2))).any())

        def decode() -> Tensor:
            # As it was planned, or in less where memory ran out.
            return vae_calls.decode(vae, scaled, guard.settings)

        made = stages.as_frames(guard.decoded(number, decode, scaled, is_asked=is_asked))
        made = made[:, : job.geometry.height, : job.geometry.width].contiguous()
        if job.settings.option("unblended"):
            return made
        source = stages.as_floats(given)
        grey = torch.from_numpy(np.stack([mask for _, mask in batch])).to(torch.float32)
        share = grey[..., None] / 255
        blended: Tensor = share * made + (1 - share) * source
        return blended
