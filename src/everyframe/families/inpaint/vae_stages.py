"""VAE stages of an inpainting run: source frames to latents, latents to frames.

Each stage reads the frames again, one batch at a time; between stages only latents are stored.
Every frame's posterior is sampled with the same noise, so still content stays still.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from everyframe.core.events import AudioDecoded, Event, Events, FramesDecoded, Note, Step
from everyframe.core.plan import Settings
from everyframe.families.inpaint import vae as vae_calls
from everyframe.families.inpaint.inputs import WHITE
from everyframe.families.inpaint.stage_context import (
    ConditioningLatents,
    InpaintContext,
    batched,
)
from everyframe.families.inpaint.stages import BROADCAST_ACTION, forward_events
from everyframe.runtime.interface import VideoState
from everyframe.runtime.rank_shares import active_ranks, batch_owner
from everyframe.runtime.stages import tiling
from everyframe.runtime.stages.frame_pieces import as_floats, as_frames, distribute_pieces
from everyframe.runtime.stages.guard import Guard
from everyframe.runtime.stages.templates import ComponentStage
from everyframe.samplers import noise

#: The context of a dry run; see `NativeModelSpec.stage_call`.
Context = InpaintContext


@dataclass(frozen=True)
class SourceInputs:
    """A batch of F frames: source (F, 3, H, W) in -1..1 and mask (F, 1, H, W), on the host.

    `source_noise` and `masked_noise` (1, 4, h, w) sample the posteriors of the source and of the
    masked source; None if that one is not encoded.
    """

    source: Tensor
    mask: Tensor
    source_noise: Tensor | None
    masked_noise: Tensor | None


class SourceLatentStage(ComponentStage[InpaintContext, SourceInputs]):
    """Encode source and mask of every frame to latents, with separate noise for each video."""

    name = "given frames"
    component = "vae"

    def num_steps(self, num_videos: int) -> int:
        """One step per batch of frames, for all videos."""
        return self.context.num_batches

    def run(self, videos: Sequence[VideoState]) -> Events:
        """Set `conditioning` of each video.

        With several ranks, the batches are distributed and every rank receives all results.
        """
        context, group = self.context, self.context.parallel.video_group
        vae, guard = yield from self._load()
        together, total = len(active_ranks(group.weights)), context.num_batches
        mine: dict[int, list[ConditioningLatents]] = {}
        happened: list[Event] = []
        for number, batch in enumerate(batched(context.iter_painted(videos), context.together)):
            if batch_owner(number, group.weights) != group.rank:
                continue
            begun = time.perf_counter()
            tensors = self._tensors(batch)
            mine[number] = []
            for video in videos:
                guard.start_video(video)
                noises = self._noises(video.seed, is_mixed=context.mixes_source_in(video))
                encode = self._make_compute(guard, vae, SourceInputs(*tensors, *noises))
                mine[number].append(guard.call(number + 1, encode))
            events = [*guard.events()]
            happened += events
            yield from events
            done, seconds = min(number + together, total), time.perf_counter() - begun
            yield Step(self.name, done, total, videos[0].seed, seconds)
        forward_events(group, guard, happened)
        yield from guard.events()
        shared = [
            group.broadcast_tree(
                mine.get(number), batch_owner(number, group.weights), BROADCAST_ACTION
            )
            for number in range(total)
        ]
        for video, batches in zip(videos, zip(*shared, strict=True), strict=True):
            video.conditioning = ConditioningLatents.join(batches)

    def _noises(self, seed: int, *, is_mixed: bool) -> tuple[Tensor | None, Tensor | None]:
        """Noise of both posteriors; in diffusers' order, the source's is drawn first, if at all."""
        shape, takes_mask = (1, *self.context.latent_shape), self.context.config.takes_mask
        draws = int(not takes_mask or is_mixed)
        return (
            noise.plain_noise(seed, shape) if draws else None,
            noise.plain_noise(seed, shape, draws) if takes_mask else None,
        )

    def _tensors(self, batch: Sequence[tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
        """Source (F, 3, H, W) in -1..1 and mask (F, 1, H, W) of 0 and 1, padded."""
        geometry = self.context.geometry
        pictures = np.stack([geometry.pad(frame) for frame, _ in batch])
        masks = np.stack([geometry.pad(mask, with_edge=False) for _, mask in batch])
        source = as_floats(pictures)
        white = torch.from_numpy(masks >= WHITE).to(torch.float32)
        return 2.0 * rearrange(source, "f h w c -> f c h w") - 1.0, white[:, None]

    def example_inputs(self, device: str) -> SourceInputs:
        """A batch, or as many frames of it as the autoencoder encodes at once."""
        context = self.context
        frames = context.settings.saving(tiling.FRAMES, context.largest_batch)
        size = context.geometry.padded
        is_mixed = float(context.settings.option("strength")) < 1
        return SourceInputs(
            torch.zeros(min(frames, context.largest_batch), 3, *size),
            torch.zeros(min(frames, context.largest_batch), 1, *size),
            *self._noises(0, is_mixed=is_mixed),
        )

    def compute(
        self, module: Any, inputs: SourceInputs, device: str, settings: Settings
    ) -> ConditioningLatents:
        """Latents of the batch, on the host."""
        source = masked = None
        if inputs.source_noise is not None:
            source = self._latents(module, inputs.source, inputs.source_noise, device, settings)
        if inputs.masked_noise is not None:
            shown = inputs.source * (inputs.mask < 0.5)
            masked = self._latents(module, shown, inputs.masked_noise, device, settings)
        mask = F.interpolate(inputs.mask, size=self.context.latent_shape[1:])
        return ConditioningLatents(mask, masked, source)

    def _latents(
        self, vae: Any, picture_FCHW: Tensor, noise_1Chw: Tensor, device: str, settings: Settings
    ) -> Tensor:
        """Scaled latents of images; `noise_1Chw` samples the posterior."""
        config, given = self.context.config, picture_FCHW.to(device)
        mean, deviation = vae_calls.posterior(vae, given, config.spatial_factor, settings)
        latents: Tensor = config.scaling_factor * (mean + deviation * noise_1Chw)
        return latents


class DecodeStage(ComponentStage[InpaintContext, Tensor]):
    """Decode latents (F, 4, h, w) to frames, and restore the source outside of the mask."""

    name = "decode"
    component = "vae"

    def example_inputs(self, device: str) -> Tensor:
        """A batch, or as many frames of it as the autoencoder decodes at once."""
        context = self.context
        frames = context.settings.saving(tiling.FRAMES, context.largest_batch)
        shape = (min(frames, context.largest_batch), *context.latent_shape)
        return torch.zeros(shape, device=device)

    def compute(self, module: Any, inputs: Tensor, device: str, settings: Settings) -> Tensor:
        """Pixels (F, 3, H, W) around -1..1, on the host."""
        return vae_calls.decode(module, inputs, settings)

    def num_steps(self, num_videos: int) -> int:
        """One step per batch of frames."""
        return num_videos * self.context.num_batches

    def run(self, videos: Sequence[VideoState]) -> Events:
        """Yield the frames of each video.

        With several ranks, the batches are distributed; the first rank receives all frames.
        """
        vae, guard = yield from self._load()
        total, done = self.num_steps(len(videos)), 0
        for video in videos:
            guard.start_video(video)
            yield from self._audio(videos, video)
            begun = time.perf_counter()
            for frames, is_painted, events in self._frames(vae, guard, videos, video, done):
                yield from events
                if is_painted:
                    done += 1
                    yield Step(self.name, done, total, video.seed, time.perf_counter() - begun)
                yield FramesDecoded(video.seed, len(frames), frames.numpy())
                begun = time.perf_counter()
            video.latents = None

    def _frames(
        self, vae: Any, guard: Guard, videos: Sequence[VideoState], video: VideoState, done: int
    ) -> Iterator[tuple[Tensor, bool, list[Event]]]:
        """Yield frames (F, H, W, 3) in 0..1, whether any was denoised, and events, per batch."""
        context, group = self.context, self.context.parallel.video_group
        latents = video.latents.split(context.together)
        # The current frames, which of them were denoised, and their batch's number.
        now: list[tuple[Any, Any]] = []
        painted: list[int] = []
        count = -1

        def owners() -> Iterator[int]:
            nonlocal count
            for lot in self._lots(videos):
                now[:] = lot
                painted[:] = [
                    number for number, (_, mask) in enumerate(lot) if context.paints(mask)
                ]
                count += bool(painted)
                yield batch_owner(max(count, 0), group.weights)

        def decode(_: int) -> Tensor:
            frames = as_floats(np.stack([frame for frame, _ in now]))
            if painted:
                these = [now[number] for number in painted]
                step = done + count + 1
                frames[painted] = self._decode(vae, guard, step, latents[count], these)
            return frames

        for frames, events in distribute_pieces(group, guard, owners(), decode):
            yield frames, bool(painted), events

    def _lots(self, videos: Sequence[VideoState]) -> Iterator[list[tuple[Any, Any]]]:
        """Yield all frames in order, in lists with at most one batch of denoised frames."""
        context = self.context
        lot: list[tuple[Any, Any]] = []
        num_painted = 0
        for pair in context.frames(videos):
            lot.append(pair)
            num_painted += context.paints(pair[1])
            if num_painted in (0, context.together):
                yield lot
                lot, num_painted = [], 0
        if lot:
            yield lot

    def _audio(self, videos: Sequence[VideoState], video: VideoState) -> Iterator[Event]:
        """Yield the source's audio, if the result plays at the source's speed."""
        settings = self.context.settings
        inputs = self.context.inputs(videos)
        audio = inputs.audio(settings.num_frames)
        if audio is None:
            return
        assert inputs.source.fps is not None, "what has sound has a rate"
        if float(inputs.source.fps) != settings.fps:
            yield Note("the source's sound is left out, as the result plays at another speed")
            return
        yield AudioDecoded(video.seed, audio.rate, audio.seconds, audio.samples)

    def _decode(
        self,
        vae: Any,
        guard: Guard,
        number: int,
        latents: Tensor,
        batch: Sequence[tuple[Any, Any]],
    ) -> Tensor:
        """Frames (F, H, W, 3) in 0..1 at the result's size."""
        context = self.context
        scaled = (latents / context.config.scaling_factor).to(context.device("vae"))
        given = np.stack([frame for frame, _ in batch])
        is_asked = bool((given.max(axis=(1, 2)) == given.min(axis=(1, 2))).any())

        decode = self._make_compute(guard, vae, scaled)
        made = as_frames(guard.check_decoded(number, decode, scaled, is_asked=is_asked))
        made = made[:, : context.geometry.height, : context.geometry.width].contiguous()
        if context.settings.option("unblended"):
            return made
        source = as_floats(given)
        grey = torch.from_numpy(np.stack([mask for _, mask in batch])).to(torch.float32)
        share = grey[..., None] / 255
        blended: Tensor = share * made + (1 - share) * source
        return blended
