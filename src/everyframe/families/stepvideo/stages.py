"""The stages of a Step-Video run: Step-LLM, CLIP, denoising, decoding.

Each loads one component, works on every take with it and lets go of it when its generator ends, so
that memory peaks at the largest stage and not at the sum. What differs from upstream on purpose:
the seed reaches the noise, pixels are not cropped, and no filter is put on the video. Read next:
`components.py`, `denoise.py`, `text.py`.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from everyframe.core.events import Event, Frames, Loaded, Note, Step, event_of
from everyframe.core.plan import Plan, Settings
from everyframe.families.family import Take
from everyframe.families.guarding import Guard
from everyframe.families.latents import Piece
from everyframe.families.loading import load_component
from everyframe.families.stepping import Lot, denoised
from everyframe.families.stepvideo import sharding
from everyframe.families.stepvideo.checkpoint import Files
from everyframe.families.stepvideo.components import Sizes
from everyframe.families.stepvideo.denoise import Denoiser, Text
from everyframe.families.stepvideo.model import StepVideoModel
from everyframe.families.stepvideo.reading import (
    clip_tokenizer,
    llm_tokenizer,
    texts_of,
    tokens_of,
)
from everyframe.families.stepvideo.rehearsals import savings
from everyframe.families.stepvideo.settle import Facts, latent_shape
from everyframe.families.stepvideo.text import TextStates, clip_states, llm_states
from everyframe.families.stepvideo.vae import Seams, StepVAE
from everyframe.families.stepvideo.weights import KEYS
from everyframe.parallel.pieces import in_order, owners
from everyframe.parallel.team import ONE, Teams
from everyframe.samplers import flow_match, noise
from everyframe.samplers.step import Step as SamplerStep


@dataclass(frozen=True)
class Job:
    """What all stages share: the plan, the model's sizes and places, ranks."""

    plan: Plan
    sizes: Sizes
    files: Files
    facts: Facts
    teams: Teams = ONE

    @property
    def settings(self) -> Settings:
        """The plan's settings."""
        return self.plan.settings

    def device(self, component: str) -> str:
        """Where a component runs."""
        return self.plan.component(component).device

    def load(self, component: str) -> Any:
        """A component with its weights."""
        return load_component(
            self.plan.component(component),
            self.sizes.builder(component),
            self.files.weights(component),
            KEYS[component],
            outputs=self.sizes.outputs(component),
            supply=self.teams.supply,
        )


@dataclass(frozen=True)
class LLMStage:
    """Prompt and negative prompt through Step-LLM, once for all takes."""

    job: Job
    name: str = "text"
    component: str = "step_llm"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One a text."""
        return len(texts_of(self.job.settings))

    def run(self, takes: Sequence[Take]) -> Iterator[Event]:
        """Begin each take's `text`: one rank encodes, the others are told."""
        world = self.job.teams.world
        tensors: list[Tensor] | None = None
        if world.is_lead:
            encoded = yield from self._encoded(takes)
            tensors = [tensor for each in encoded for tensor in (each.llm, each.llm_mask)]
        told = world.share(tensors, 0, "the text is handed on")
        states = [TextStates(*told[i : i + 2]) for i in range(0, len(told), 2)]
        for take in takes:
            take.text = _text(states)

    def _encoded(self, takes: Sequence[Take]) -> Generator[Event, None, list[TextStates]]:
        job, began = self.job, time.perf_counter()
        # Tokens of both encoders first: what is too long is told before gigabytes are read.
        llm, clip = llm_tokenizer(job.files, job.sizes), clip_tokenizer(job.files, job.sizes)
        tokens, told = tokens_of(job.settings, llm, clip)
        yield from (Note(text, in_record=True) for text in told)
        model = job.load(self.component)
        yield Loaded(self.component, time.perf_counter() - began)
        guard = Guard(job.plan, self.name, {self.component: model})
        states = []
        for number, each in enumerate(tokens, start=1):
            begun = time.perf_counter()
            encode = partial(llm_states, model, each, job.device(self.component))
            states.append(TextStates(guard.call(number, encode), each.mask))
            yield from guard.events()
            seconds = time.perf_counter() - begun
            yield Step(self.name, number, len(tokens), takes[0].seed, seconds)
        return states


@dataclass(frozen=True)
class ClipStage:
    """The same texts through CLIP."""

    job: Job
    name: str = "clip text"
    component: str = "clip"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One a text."""
        return len(texts_of(self.job.settings))

    def run(self, takes: Sequence[Take]) -> Iterator[Event]:
        """Complete each take's `text`: one rank encodes, the others are told."""
        world = self.job.teams.world
        tensors = (yield from self._encoded(takes)) if world.is_lead else None
        told = world.share(tensors, 0, "the text is handed on")
        begun: Text = takes[0].text
        whole = [
            replace(states, clip=clip) for states, clip in zip(begun.branches, told, strict=True)
        ]
        for take in takes:
            take.text = _text(whole)

    def _encoded(self, takes: Sequence[Take]) -> Generator[Event, None, list[Tensor]]:
        job, began = self.job, time.perf_counter()
        tokenizer = clip_tokenizer(job.files, job.sizes)
        model = job.load(self.component)
        yield Loaded(self.component, time.perf_counter() - began)
        guard = Guard(job.plan, self.name, {self.component: model})
        found: list[Tensor] = []
        texts = texts_of(job.settings)
        for number, text in enumerate(texts, start=1):
            begun = time.perf_counter()
            encode = partial(clip_states, model, tokenizer.tokens(text), job.device(self.component))
            found.append(guard.call(number, encode))
            yield from guard.events()
            seconds = time.perf_counter() - begun
            yield Step(self.name, number, len(texts), takes[0].seed, seconds)
        return found


def _text(states: Sequence[TextStates]) -> Text:
    """The prompt's and, where there is guidance, those of what is not wanted."""
    return Text(states[0], states[1] if len(states) > 1 else None)


@dataclass(frozen=True)
class DenoiseStage:
    """Noise becomes latents (1, C, T, h, w): the sampler, guidance and the denoiser."""

    job: Job
    name: str = "denoise"
    component: str = "denoiser"
    goes_on: bool = True

    def num_steps(self, num_takes: int) -> int:
        """The sampler's steps for each take."""
        return num_takes * self.job.settings.num_inference_steps

    def run(self, takes: Sequence[Take]) -> Iterator[Event]:
        """Fill each take's `latents`."""
        job, began = self.job, time.perf_counter()
        model = job.load(self.component)
        yield Loaded(self.component, time.perf_counter() - began)
        teams, parts = job.teams, {self.component: model}
        with sharding.apply(model, teams.team, teams.groups, teams.way) as put_on:
            apart = put_on.apart if teams.team.size > 1 else None
            guard = Guard(job.plan, self.name, parts, savings=savings, apart=apart)

            steps = job.settings.num_inference_steps

            def lots(take: Take) -> Iterator[Lot]:
                yield Lot(self._sample(model, guard, take), steps)

            yield from denoised(self.name, takes, steps, guard, lots)

    def _sample(self, model: StepVideoModel, guard: Guard, take: Take) -> Iterator[SamplerStep]:
        settings, device = self.job.settings, self.job.device(self.component)
        x, start = take.latents, take.step
        if not start:
            fresh = noise.start_noise(take.seed, latent_shape(self.job.facts, settings))[None]
            x = fresh if take.start_noise is None else take.start_noise

        def make() -> Denoiser:
            return Denoiser(model, take.text, guard.settings, device)

        sigmas = flow_match.schedule(settings.num_inference_steps, settings.option("time_shift"))
        denoise = guard.denoiser(make, start)
        yield from flow_match.sample(denoise, x.to(device), sigmas, start=start)


@dataclass(frozen=True)
class DecodeStage:
    """Latents become frames, in the pieces that the autoencoder was trained on."""

    job: Job
    name: str = "decode"
    component: str = "vae"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One a piece."""
        return num_takes * len(self._pieces())

    def _pieces(self) -> tuple[Piece, ...]:
        return self.job.facts.vae.pieces(self.job.settings.num_frames)

    def run(self, takes: Sequence[Take]) -> Iterator[Event]:
        """Yield the frames of each take as they are finished; one waits at each seam.

        Several ranks deal out the pieces; all come to their first one, which blends the seams.
        """
        job, began = self.job, time.perf_counter()
        vae: StepVAE = job.load(self.component)
        yield Loaded(self.component, time.perf_counter() - began)
        guard = Guard(job.plan, self.name, {self.component: vae})
        total, done, pieces = self.num_steps(len(takes)), 0, self._pieces()
        team = job.teams.team
        for take in takes:
            guard.take(take)
            begun = time.perf_counter()
            make = partial(self._piece, vae, guard, take)
            seams = Seams(dim=0)
            made = in_order(team, owners(len(pieces), team.weights), make, "frames are handed over")
            for number, (pixels, told) in enumerate(made, start=1):
                ready = seams.add(pixels, is_last=number == len(pieces))
                done += 1
                yield from map(event_of, told)
                now = time.perf_counter()
                yield Step(self.name, done, total, take.seed, now - begun)
                if len(ready):
                    yield Frames(take.seed, len(ready), _frames(ready).numpy())
                begun = time.perf_counter()
            take.latents = None

    def _piece(
        self, vae: StepVAE, guard: Guard, take: Take, number: int
    ) -> tuple[Tensor, list[Any]]:
        """One piece's pixels (T, C, H, W) on the host, and what happened meanwhile."""
        latents = take.latents.to(self.job.device(self.component))
        decode = partial(_decoded, vae, latents, self._pieces()[number])
        pixels = guard.decoded(number + 1, decode, latents)
        return pixels.to("cpu", torch.float32), [event.to_json() for event in guard.events()]


def _decoded(vae: StepVAE, latents: Tensor, piece: Piece) -> Tensor:
    """The pixels (T, C, H, W) of one piece."""
    return rearrange(vae.decode_piece(latents, piece)[0], "c t h w -> t c h w")


def _frames(pixels: Tensor) -> Tensor:
    """Frames (T, H, W, 3) in 0..1."""
    frames = rearrange(pixels, "t c h w -> t h w c")
    return (frames / 2 + 0.5).clamp(0, 1).contiguous()
