"""The stages of an Open-Sora run: text, given frames, denoising; `decoding.py` has the last.

Each loads one component, works on every take with it and lets go of it when its generator ends, so
that memory peaks at the largest stage and not at the sum. Upstream's loop is `scripts/inference.py`
of 1.2; what differs on purpose is written where it differs. Read next: `components.py`, `text.py`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from everyframe.core.events import Event
from everyframe.families import coding, job
from everyframe.families.denoising import GuardedDenoiser
from everyframe.families.family import Take
from everyframe.families.guarding import Guard
from everyframe.families.opensora import sharding
from everyframe.families.opensora.coding import encoded
from everyframe.families.opensora.denoise import Denoiser, Text, timesteps_of
from everyframe.families.opensora.family import OpenSoraModel
from everyframe.families.opensora.model import STDiT, STDiT3
from everyframe.families.opensora.settle import PIECE, known_frames
from everyframe.families.opensora.text import TextEmbedding, embed, tokens_of
from everyframe.families.opensora.tokens import load_tokenizer
from everyframe.families.opensora.vae import ImageVAE, VideoVAE
from everyframe.families.opensora.vae_config import ImageVAEConfig, VideoVAEConfig
from everyframe.families.stepping import denoised_in_step
from everyframe.families.telling import prompt_was_cut
from everyframe.samplers import iddpm, noise, rflow
from everyframe.samplers.step import Step as SamplerStep


@dataclass(frozen=True)
class Job(job.Job[OpenSoraModel]):
    """What all stages of one clip share: the plan, the model, the ranks, and which clip."""

    clip: int = 0

    @property
    def vae(self) -> ImageVAEConfig | VideoVAEConfig:
        """The autoencoder's sizes."""
        return self.model.sizes.vae

    def goes_on(self) -> bool:
        """Whether this clip begins with frames of the clip before it or of a given video."""
        return self.clip > 0 or "extend" in self.settings.given_frames

    def before(self, take: Take) -> Tensor | None:
        """The frames (T, H, W, 3) in 0..1 that this clip goes on from, if it goes on from any.

        One frame where there are fewer than `known_frames` wants: a given video may be short.
        """
        if not self.goes_on():
            return None
        frames = take.tail
        if self.clip == 0:
            assert take.given.source is not None
            frames = coding.as_floats(take.given.source[-PIECE:])
        wanted = known_frames(self.model.facts, self.settings)[0]
        tail: Tensor = frames[-wanted:] if len(frames) >= wanted else frames[-1:]
        return tail

    def latent_shape(self) -> tuple[int, int, int, int]:
        """(C, T, h, w) of one clip's latents."""
        settings = self.settings
        size = self.vae.latent_size(settings.num_frames, settings.height, settings.width)
        return (self.vae.latent_channels, *size)


@dataclass(frozen=True)
class TextStage:
    """Prompt and negative prompt through T5, once for all takes."""

    job: Job
    name: str = "text"
    component: str = "text_encoder"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One a prompt."""
        return 1 + (self.job.settings.negative_prompt is not None)

    def run(self, takes: Sequence[Take]) -> Iterator[Event]:
        """Fill each take's `text`: one rank encodes, the others are told."""
        world = self.job.teams.world
        told = yield from coding.from_lead(world, self._encoded(takes), "the text is handed on")
        texts = [TextEmbedding(*each) for each in zip(told[::2], told[1::2], strict=True)]
        text = Text(texts[0], texts[1] if len(texts) > 1 else None)
        for take in takes:
            take.text = text

    def _encoded(self, takes: Sequence[Take]) -> Generator[Event, None, list[Tensor]]:
        job, model = self.job, self.job.model
        place = model.files.tokenizer.path
        assert place is not None, "asked before it was fetched"
        # Tokens first: a prompt that is too long is told before gigabytes are read.
        tokenizer, length = load_tokenizer(place), model.sizes.denoiser.model_max_length
        tokens = tokens_of(tokenizer, job.settings, length)
        yield from (prompt_was_cut(cut) for *_, cut in tokens if cut)
        encoder = yield from job.loaded(self.component)
        guard = job.guard(self.name, {self.component: encoder})
        device = job.device(self.component)
        calls = [partial(embed, encoder, ids, mask, device) for ids, mask, _ in tokens]
        texts = yield from coding.encoded_once(self.name, guard, takes, calls)
        return [tensor for each in texts for tensor in (each.hidden, each.mask)]


@dataclass(frozen=True)
class Known:
    """Given frames as latents (1, C, T, h, w), and mask (1, T): 1 make, 0 keep, between edit."""

    latents: Tensor
    mask: Tensor


@dataclass(frozen=True)
class GivenStage:
    """Given pictures, and the end of the clip before, through the autoencoder's encoder."""

    job: Job
    name: str = "given frames"
    component: str = "vae"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One a take."""
        return num_takes

    def run(self, takes: Sequence[Take]) -> Iterator[Event]:
        """Fill each take's `known`: one rank encodes, those that share its videos are told."""
        team = self.job.teams.team
        told = yield from coding.from_lead(team, self._encoded(takes), "given frames are handed on")
        for take, *known in zip(takes, told[::2], told[1::2], strict=True):
            take.known = Known(*known)

    def _encoded(self, takes: Sequence[Take]) -> Generator[Event, None, list[Tensor]]:
        vae = yield from self.job.loaded(self.component)
        guard = self.job.guard(self.name, {self.component: vae})
        encode = partial(self._known, vae, guard)
        known = yield from coding.encoded_each(self.name, guard, takes, encode)
        return [tensor for each in known for tensor in (each.latents, each.mask)]

    def _known(self, vae: ImageVAE | VideoVAE, guard: Guard, take: Take) -> Known:
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
            latents[:, :, :1] = encode(coding.as_floats(take.given.first))
            mask[:, :1] = job.settings.edit_strength
        if take.given.last is not None and job.clip == job.settings.chain - 1:
            # The last latent frame holds the last four frames of a piece and what came before
            # them. Upstream snaps a lone picture to the beginning of a piece, where it is not the
            # last frame; a piece that stands still ends in one that is.
            last_piece = job.vae.pieces(job.settings.num_frames)[-1].num_frames
            still = encode(coding.as_floats(take.given.last), last_piece)
            latents[:, :, -1:] = still[:, :, -1:]
            mask[:, -1:] = job.settings.edit_strength
        return Known(latents, mask)

    def _encode(
        self,
        vae: ImageVAE | VideoVAE,
        guard: Guard,
        frames_THWC: Tensor,
        still: int | None = None,
    ) -> Tensor:
        """Frames in 0..1 to latents (1, C, T, h, w), float32 on the CPU.

        With `still`, one frame as if it stood still for so many.
        """
        video = rearrange(frames_THWC, "t h w c -> 1 c t h w") * 2 - 1
        video = video.to(self.job.device(self.component))
        return encoded(vae, video, guard.settings, still=still)


@dataclass(frozen=True)
class DenoiseStage:
    """Noise becomes latents: the sampler, guidance and the denoiser."""

    job: Job
    name: str = "denoise"
    component: str = "denoiser"
    goes_on: bool = True

    def num_steps(self, num_takes: int) -> int:
        """The sampler's steps for each take."""
        return num_takes * self.job.settings.num_inference_steps

    def run(self, takes: Sequence[Take]) -> Iterator[Event]:
        """Fill each take's `latents`."""
        job, teams = self.job, self.job.teams
        model = yield from job.loaded(self.component)
        put_on = sharding.apply(model, teams.team, teams.groups)
        sample = partial(self._sample, model)
        yield from denoised_in_step(self, job, model, put_on, takes, sample)

    def _sample(self, model: STDiT | STDiT3, guard: Guard, take: Take) -> Iterator[SamplerStep]:
        job, settings, facts = self.job, self.job.settings, self.job.model.facts
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
            return Denoiser(model, take.text, guard.settings, facts, device)

        denoise = GuardedDenoiser(guard, make, start)
        if facts.version == "1.0":
            plan = iddpm.schedule(settings.num_inference_steps)
            yield from iddpm.sample(denoise, x, plan, fresh, start=start)
            return
        timesteps = timesteps_of(settings, facts)
        if take.known is None:
            yield from rflow.sample(denoise, x, timesteps, start=start)
            return
        mask = take.known.mask.to(device)
        if not start:
            x = torch.where(mask[:, None, :, None, None] == 1, x, take.known.latents.to(device))
        yield from rflow.sample_masked(denoise, x, timesteps, mask, fresh, start=start)
