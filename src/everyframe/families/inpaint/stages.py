"""Text encoding and denoising stages of an inpainting run.

Each stage loads what it needs, uses it for every video and frees it when its generator ends.
Frames are denoised in batches of `frames_at_once`, all with the same initial noise; frames with an
empty mask are skipped. The computation is that of diffusers'
`StableDiffusionControlNetInpaintPipeline`, frame by frame, except that the source itself replaces
the result outside of the mask at the end. The other stages are in `vae_stages.py`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from everyframe.core.events import Event, event_of
from everyframe.core.plan import Settings
from everyframe.families.inpaint.components import controlnet_name
from everyframe.families.inpaint.denoiser import ControlNetInputs, ControlNetScale, Denoiser
from everyframe.families.inpaint.stage_context import InpaintContext, batched
from everyframe.families.inpaint.text import embed, load_tokenizer, prompts_of, tokens_of
from everyframe.parallel.communicator import Communicator
from everyframe.runtime import stages
from everyframe.runtime.guard import Guard
from everyframe.runtime.interface import VideoState
from everyframe.runtime.memory_fallbacks import cfg_batch_size
from everyframe.runtime.rank_shares import active_ranks
from everyframe.runtime.repairs import prompt_truncated_note
from everyframe.runtime.stages import GuardedDenoiser, SamplerBatch, run_denoising
from everyframe.samplers import diffusers_scheduler, noise
from everyframe.samplers.base import Step
from everyframe.samplers.base import Step as SamplerStep

_HANDED = "batches of frames are handed on"


def share(team: Communicator, mine: Sequence[Tensor] | None, rank: int) -> list[Tensor]:
    """Broadcast what `rank` computed for a batch; `mine` is that rank's own result."""
    return team.share(mine, rank, _HANDED)


def hear(team: Communicator, guard: Guard, events: Iterable[Event]) -> None:
    """Forward the other ranks' guard events to the first rank's guard."""
    if team.size == 1:
        return
    told = team.tell_all([] if team.is_lead else [each.to_json() for each in events], _HANDED)
    if team.is_lead:
        guard.hear(event_of(each) for one in told for each in one)


def in_round(
    team: Communicator,
    guard: Guard,
    steps: Iterator[Step],
    ranks: Sequence[int],
    num_steps: int,
) -> Iterator[Step]:
    """Steps of this rank's batch; the state after the last one is that of the whole round.

    `ranks` have a batch in this round, in their order. A rank without one (empty `steps`) builds
    one step from the other ranks' results.
    """
    if team.size == 1:
        yield from steps
        return
    events: list[Event] = []
    last: Step | None = None
    for step in steps:
        events += () if team.is_lead else guard.events()
        if step.index + 1 == num_steps:
            last = step
        else:
            yield step
    made = [share(team, [last.x] if last and rank == team.rank else None, rank) for rank in ranks]
    hear(team, guard, events)
    whole = torch.cat([one[0] for one in made])
    yield Step(num_steps - 1, num_steps, last.t if last else torch.zeros(1), whole)


@dataclass(frozen=True)
class TextEncodeStage:
    """Encode prompt and negative prompt with CLIP, once for all videos."""

    job: InpaintContext
    name: str = "text"
    component: str = "text_encoder"
    goes_on: bool = False

    def num_steps(self, num_takes: int) -> int:
        """One step per prompt."""
        return len(prompts_of(self.job.settings))

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Set `text` of each video: one rank encodes and broadcasts."""
        world = self.job.teams.world
        told = yield from stages.on_lead_rank(world, self._encoded(takes), "the text is handed on")
        text = torch.cat(told)
        for take in takes:
            take.text = text

    def _encoded(self, takes: Sequence[VideoState]) -> Generator[Event, None, list[Tensor]]:
        job = self.job
        tokenizer = load_tokenizer(job.model.files.path("tokenizer"))
        # Tokens first: a prompt that is too long is told before gigabytes are read.
        tokens = tokens_of(tokenizer, job.settings, job.config.num_tokens)
        yield from (prompt_truncated_note(cut) for *_, cut in tokens if cut)
        encoder = yield from job.loaded(self.component)
        guard = job.guard(self.name, {self.component: encoder})
        device = job.device(self.component)
        uses_mask = bool(job.config.text_encoder.get("use_attention_mask"))
        calls = [
            partial(embed, encoder, ids, mask, device=device, uses_mask=uses_mask)
            for ids, mask, _ in tokens
        ]
        return (yield from stages.encode_once(self.name, guard, takes, calls))


@dataclass(frozen=True)
class DenoiseStage:
    """Denoise: scheduler, guidance, ControlNets and UNet turn noise into latents (T, 4, h, w)."""

    job: InpaintContext
    name: str = "denoise"
    component: str = "unet"
    goes_on: bool = True

    def num_steps(self, num_takes: int) -> int:
        """Scheduler steps of each batch of frames of each video."""
        return num_takes * self.job.num_batches * self.job.num_timesteps

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Set `latents` of each video."""
        job = self.job
        nets: dict[str, nn.Module] = {}
        for name in map(controlnet_name, range(len(job.config.controlnets))):
            nets[name] = yield from job.loaded(name)
        unet = yield from job.loaded(self.component)
        guard = job.guard(self.name, {**nets, self.component: unet})
        lots = partial(self._lots, unet, [*nets.values()], guard)
        steps = job.num_batches * job.num_timesteps
        yield from run_denoising(self.name, takes, steps, guard, lots)
        for take in takes:
            take.known = None

    def _lots(
        self, unet: nn.Module, nets: Sequence[nn.Module], guard: Guard, take: VideoState
    ) -> Iterator[SamplerBatch]:
        """Yield the batches of frames not yet done, one round of all ranks after the other."""
        job, team = self.job, self.job.teams.team
        steps, ranks = job.num_timesteps, active_ranks(team.weights)
        num_done, start = divmod(take.step, steps)
        left = islice(enumerate(batched(job.controls(take), job.together)), num_done, None)
        for batches in batched(left, len(ranks)):
            mine = [one for one, rank in zip(batches, ranks, strict=False) if rank == team.rank]
            # What was begun is the first one; who has it goes on with it.
            begun = start if mine and mine[0][0] == num_done else 0
            sampled = (
                step
                for number, batch in mine
                for step in self._sampled(unet, nets, guard, take, (number, batch), begun)
            )
            last, count = batches[-1][0], len(batches)
            whole = in_round(team, guard, sampled, ranks[:count], steps)
            yield SamplerBatch(whole, (last + 1) * steps, count)

    def _sampled(
        self,
        unet: nn.Module,
        nets: Sequence[nn.Module],
        guard: Guard,
        take: VideoState,
        numbered: tuple[int, Sequence[Any]],
        start: int,
    ) -> Iterator[SamplerStep]:
        """Steps of one batch: its number, and per frame the control images."""
        number, batch = numbered
        first = number * self.job.together
        frames = slice(first, first + len(batch))
        job, known = self.job, take.known
        device = job.device("unet")
        scheduler, timesteps = job.scheduled(device)
        mask = known.mask[frames].to(device)
        source = None if known.source is None else known.source[frames].to(device)
        x, noised = self._begin(take, scheduler, timesteps, source, len(mask))
        if start:
            x = take.latents.to(device)
        takes_mask = job.config.takes_mask
        conditions = ControlNetInputs(
            text=take.text.to(device),
            controls=tuple(control.to(device) for control in _controls(batch)),
            mask=mask if takes_mask else None,
            masked=known.masked[frames].to(device) if takes_mask else None,
        )
        done = start
        made: list[Denoiser] = []

        def make() -> Denoiser:
            made[:] = [_denoiser(unet, nets, conditions, guard.settings, len(timesteps))]
            made[0].step = done
            return made[0]

        put_back = None
        if not takes_mask:
            assert source is not None, "encoded for a UNet that takes no mask"
            put_back = diffusers_scheduler.KnownLatents(source, mask, noised)

        def generators(step: int) -> list[torch.Generator]:
            return [noise.generator(take.seed, "step", step) for _ in range(len(mask))]

        watched = GuardedDenoiser(guard, make, start)
        for step in diffusers_scheduler.sample(
            watched,
            x,
            scheduler,
            timesteps,
            known=put_back,
            generators=generators,
            start=start,
            memory=take.memory if start else None,
        ):
            done = made[0].step = step.index + 1
            yield step

    def _begin(
        self, take: VideoState, scheduler: Any, timesteps: Tensor, source: Tensor | None, count: int
    ) -> tuple[Tensor, Tensor]:
        """Initial latents and their noise, (F, 4, h, w) each; the same for every frame."""
        job = self.job
        start = take.start_noise
        if start is None:
            start = noise.start_noise(take.seed, job.latent_shape)[None]
        start = start.to(job.device("unet")).expand(count, -1, -1, -1)
        if job.mixes_source_in(take):
            assert source is not None, "encoded to begin with"
            return scheduler.add_noise(source, start, timesteps[:1]), start
        return start * scheduler.init_noise_sigma, start


def _controls(batch: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the control images of each ControlNet, (F, C, H, W)."""
    for one in zip(*batch, strict=True):
        yield rearrange(torch.from_numpy(np.stack(one)), "f h w c -> f c h w").contiguous()


def _denoiser(
    unet: nn.Module,
    nets: Sequence[nn.Module],
    conditions: ControlNetInputs,
    settings: Settings,
    num_steps: int,
) -> Denoiser:
    return Denoiser(
        unet,
        nets,
        conditions,
        _steering(settings),
        guidance_scale=settings.guidance_scale,
        guess_mode=bool(settings.option("guess_mode")),
        num_steps=num_steps,
        branches_at_once=cfg_batch_size(settings, 2),
    )


def _steering(settings: Settings) -> list[ControlNetScale]:
    """Scale of each ControlNet; the settings hold numbers for one, tuples for several."""
    names = ("controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end")
    values = [settings.option(name) for name in names]
    each = [value if isinstance(value, (tuple, list)) else (value,) for value in values]
    return [ControlNetScale(*numbers) for numbers in zip(*each, strict=True)]
