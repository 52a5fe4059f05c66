"""Stages of an Open-Sora run: text encoding, conditioning frames, denoising, decoding.

Each stage loads one component, uses it for every video and frees it when its generator ends, so
peak memory is that of the largest stage, not the sum. Upstream's loop is `scripts/inference.py` of
1.2; deliberate differences are noted at the code that differs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from everyframe.core.events import Event, FramesDecoded
from everyframe.families.opensora import sharding
from everyframe.families.opensora.denoiser import Denoiser, PromptEmbeds, timesteps_of
from everyframe.families.opensora.prompt_tokens import load_tokenizer
from everyframe.families.opensora.settings import PIECE, known_frames
from everyframe.families.opensora.spec import OpenSoraSpec
from everyframe.families.opensora.stdit import STDiT
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.families.opensora.text import TextEmbedding, embed, tokens_of
from everyframe.families.opensora.vae import ImageVAE, VideoVAE, decode_frames, encoded
from everyframe.families.opensora.vae_config import ImageVAEConfig, VideoVAEConfig
from everyframe.runtime import stages
from everyframe.runtime.guard import Guard
from everyframe.runtime.interface import VideoState
from everyframe.runtime.repairs import prompt_truncated_note
from everyframe.runtime.request_checks import FrameChunk
from everyframe.runtime.stages import DecodePieces, GuardedDenoiser, run_sharded_denoising
from everyframe.samplers import iddpm, noise, rectified_flow
from everyframe.samplers.base import Step as SamplerStep


@dataclass(frozen=True)
class OpenSoraContext(stages.StageContext[OpenSoraSpec]):
    """Shared by all stages of one clip: plan, model, ranks and clip number."""

    clip: int = 0

    @property
    def vae(self) -> ImageVAEConfig | VideoVAEConfig:
        """Config of the autoencoder."""
        return self.model.config.vae

    def goes_on(self) -> bool:
        """Whether this clip continues from the previous clip or from a given video."""
        return self.clip > 0 or "extend" in self.settings.given_frames

    def before(self, take: VideoState) -> Tensor | None:
        """Frames (T, H, W, 3) in 0..1 that this clip continues from; None if it starts anew.

        One frame if fewer than `known_frames` are available: a given video may be short.
        """
        if not self.goes_on():
            return None
        frames = take.tail
        if self.clip == 0:
            assert take.given.source is not None
            frames = stages.as_floats(take.given.source[-PIECE:])
        wanted = known_frames(self.model.config, self.settings)[0]
        tail: Tensor = frames[-wanted:] if len(frames) >= wanted else frames[-1:]
        return tail

    def latent_shape(self) -> tuple[int, int, int, int]:
        """(C, T, h, w) of one clip's latents."""
        settings = self.settings
        size = self.vae.latent_size(settings.num_frames, settings.height, settings.width)
        return (self.vae.latent_channels, *size)


@dataclass(frozen=True)
class TextEncodeStage:
    """Encode prompt and negative prompt with T5, once for all videos."""

    job: OpenSoraContext
    name: str = "text"
    component: str = "text_encoder"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One step per prompt."""
        return 1 + (self.job.settings.negative_prompt is not None)

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Set `text` of each video: one rank encodes and broadcasts."""
        world = self.job.teams.world
        told = yield from stages.on_lead_rank(world, self._encoded(takes), "the text is handed on")
        texts = [TextEmbedding(*each) for each in zip(told[::2], told[1::2], strict=True)]
        text = PromptEmbeds(texts[0], texts[1] if len(texts) > 1 else None)
        for take in takes:
            take.text = text

    def _encoded(self, takes: Sequence[VideoState]) -> Generator[Event, None, list[Tensor]]:
        job, model = self.job, self.job.model
        # Tokens first: a prompt that is too long is told before gigabytes are read.
        tokenizer = load_tokenizer(model.files.path("tokenizer"))
        length = model.config.denoiser.model_max_length
        tokens = tokens_of(tokenizer, job.settings, length)
        yield from (prompt_truncated_note(cut) for *_, cut in tokens if cut)
        encoder = yield from job.loaded(self.component)
        guard = job.guard(self.name, {self.component: encoder})
        device = job.device(self.component)
        calls = [partial(embed, encoder, ids, mask, device) for ids, mask, _ in tokens]
        texts = yield from stages.encode_once(self.name, guard, takes, calls)
        return [tensor for each in texts for tensor in (each.hidden, each.mask)]


@dataclass(frozen=True)
class ConditioningLatents:
    """Conditioning latents (1, C, T, h, w) and mask (1, T): 1 generate, 0 fixed, between edit."""

    latents: Tensor
    mask: Tensor


@dataclass(frozen=True)
class ConditioningStage:
    """Encode given images and the end of the previous clip with the autoencoder."""

    job: OpenSoraContext
    name: str = "given frames"
    component: str = "vae"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One step per video."""
        return num_takes

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Set `known` of each video: one rank encodes and broadcasts within its video group."""
        team = self.job.teams.team
        told = yield from stages.on_lead_rank(
            team, self._encoded(takes), "given frames are handed on"
        )
        for take, *known in zip(takes, told[::2], told[1::2], strict=True):
            take.known = ConditioningLatents(*known)

    def _encoded(self, takes: Sequence[VideoState]) -> Generator[Event, None, list[Tensor]]:
        vae = yield from self.job.loaded(self.component)
        guard = self.job.guard(self.name, {self.component: vae})
        encode = partial(self._known, vae, guard)
        known = yield from stages.encode_per_video(self.name, guard, takes, encode)
        return [tensor for each in known for tensor in (each.latents, each.mask)]

    def _known(
        self, vae: ImageVAE | VideoVAE, guard: Guard, take: VideoState
    ) -> ConditioningLatents:
        job = self.job
        encode = partial(self._encode, vae, guard)
        shape = job.latent_shape()
        latents = torch.zeros((1, *shape))
        mask = torch.ones((1, shape[1]))
        before = job.before(take)
        if before is not None:
            encoded = encode(before)
            latents[:, :, : encoded.shape[2]] = encoded
            mask[:, : encoded.shape[2]] = job.settings.edit_strength
        elif take.given.first is not None:
            latents[:, :, :1] = encode(stages.as_floats(take.given.first))
            mask[:, :1] = job.settings.edit_strength
        if take.given.last is not None and job.clip == job.settings.chain - 1:
            # The last latent frame holds the last four frames of a piece and what came before
            # them. Upstream snaps a lone picture to the beginning of a piece, where it is not the
            # last frame; a piece that stands still ends in one that is.
            last_piece = job.vae.pieces(job.settings.num_frames)[-1].num_frames
            still = encode(stages.as_floats(take.given.last), last_piece)
            latents[:, :, -1:] = still[:, :, -1:]
            mask[:, -1:] = job.settings.edit_strength
        return ConditioningLatents(latents, mask)

    def _encode(
        self,
        vae: ImageVAE | VideoVAE,
        guard: Guard,
        frames_THWC: Tensor,
        still: int | None = None,
    ) -> Tensor:
        """Encode frames in 0..1 to latents (1, C, T, h, w), float32 on the CPU.

        `still` repeats one frame that many times.
        """
        video = rearrange(frames_THWC, "t h w c -> 1 c t h w") * 2 - 1
        video = video.to(self.job.device(self.component))
        return encoded(vae, video, guard.settings, still=still)


@dataclass(frozen=True)
class DenoiseStage:
    """Denoise: sampler, guidance and denoiser turn noise into latents."""

    job: OpenSoraContext
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
        put_on = sharding.apply(model, teams.team, teams.groups)
        sample = partial(self._sample, model)
        yield from run_sharded_denoising(self, job, model, put_on, takes, sample)

    def _sample(
        self, model: STDiT | STDiT3, guard: Guard, take: VideoState
    ) -> Iterator[SamplerStep]:
        job, settings, config = self.job, self.job.settings, self.job.model.config
        device = job.device(self.component)
        shape = job.latent_shape()
        label = take.seed if job.clip == 0 else noise.derived_seed(take.seed, "clip", job.clip)

        def fresh(step: int) -> Tensor:
            return noise.step_noise(label, step, shape)[None]

        x, start = take.latents, take.step
        if not start:
            given = take.start_noise
            x = noise.start_noise(label, shape)[None] if given is None else given
        x = x.to(device)

        def make() -> Denoiser:
            return Denoiser(model, take.text, guard.settings, config, device)

        denoise = GuardedDenoiser(guard, make, start)
        if config.version == "1.0":
            plan = iddpm.schedule(settings.num_inference_steps)
            yield from iddpm.sample(denoise, x, plan, fresh, start=start)
            return
        timesteps = timesteps_of(settings, config)
        if take.known is None:
            yield from rectified_flow.sample(denoise, x, timesteps, start=start)
            return
        mask = take.known.mask.to(device)
        if not start:
            x = torch.where(mask[:, None, :, None, None] == 1, x, take.known.latents.to(device))
        yield from rectified_flow.sample_masked(denoise, x, timesteps, mask, fresh, start=start)


@dataclass(frozen=True)
class DecodeStage:
    """Decode latents to frames, in the pieces that the autoencoder was trained on."""

    job: OpenSoraContext
    name: str = "decode"
    component: str = "vae"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One step per piece."""
        return num_takes * len(self.job.vae.pieces(self.job.settings.num_frames))

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Yield the new frames of each video, and save its last frames for the next clip.

        With several ranks, the pieces are distributed; the first rank receives all frames.
        """
        job, team = self.job, self.job.teams.team
        vae = yield from job.loaded(self.component)
        guard = job.guard(self.name, {self.component: vae})
        for place, take in enumerate(takes):
            if job.clip == 0 and take.given.source is not None:
                # Piece by piece: a long source as floats would be larger than any stage.
                for start in range(0, len(take.given.source), PIECE):
                    source = stages.as_floats(take.given.source[start : start + PIECE])
                    yield FramesDecoded(take.seed, len(source), source.numpy())
            before = job.before(take) if team.is_lead else None
            new = _New(0 if before is None else len(before))
            pieces = self._pieces(vae, guard, take, new)
            yield from stages.decode_pieces(self.name, takes, place, guard, team, pieces)
            # Only where a clip follows: these are floats, one lot for each of many videos.
            follows = job.clip + 1 < job.settings.chain
            take.tail = torch.cat(new.tail)[-PIECE:] if follows and new.tail else None

    def _pieces(
        self, vae: ImageVAE | VideoVAE, guard: Guard, take: VideoState, new: _New
    ) -> DecodePieces:
        latents = take.latents.to(self.job.device(self.component))
        given = (take.given.first, take.given.last, take.given.source)
        is_asked = any(each is not None and each.min() == each.max() for each in given)
        pieces = vae.pieces(self.job.settings.num_frames)

        def decode(number: int, step: int) -> Tensor:
            call = partial(_decoded, vae, guard, latents, pieces[number])
            return stages.as_frames(guard.decoded(step, call, latents, is_asked=is_asked))

        return DecodePieces(len(pieces), decode, new.of)


class _New:
    """Frames of a clip without the first `skip`, which belong to the previous clip; and its `tail`.

    The tail is the last two pieces: they hold the frames that the next clip continues from.
    """

    def __init__(self, skip: int) -> None:
        self._skip = skip
        self.tail: list[Tensor] = []

    def of(self, _: int, piece_THWC: Tensor) -> Tensor:
        """New frames of the next piece."""
        self.tail = [*self.tail, piece_THWC][-2:]
        new = piece_THWC[min(self._skip, len(piece_THWC)) :]
        self._skip -= len(piece_THWC) - len(new)
        return new


def _decoded(vae: ImageVAE | VideoVAE, guard: Guard, latents: Tensor, piece: FrameChunk) -> Tensor:
    """Decode one piece to pixels (T, C, H, W)."""
    # As it was planned, or in less where memory ran out.
    pixels = decode_frames(vae, latents, piece, guard.settings)
    return rearrange(pixels[0], "c t h w -> t c h w")
