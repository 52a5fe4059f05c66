"""Text encoding and denoising stages of an inpainting run.

Frames are denoised in batches of `frames_at_once`, all with the same initial noise; frames with an
empty mask are skipped. The computation is that of diffusers'
`StableDiffusionControlNetInpaintPipeline`, frame by frame, except that the source itself replaces
the result outside of the mask at the end. The other stages are in `vae_stages.py`, the templates in
`everyframe.runtime.stages.templates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from everyframe.core.events import Event, event_of
from everyframe.core.plan import Settings
from everyframe.families.clip_tokenizer import load_tokenizer
from everyframe.families.inpaint.components import controlnet_name
from everyframe.families.inpaint.denoiser import ControlNetInputs, ControlNetScale, Denoiser
from everyframe.families.inpaint.stage_context import InpaintContext, batched
from everyframe.families.inpaint.text import embed, prompts_of, tokens_of
from everyframe.parallel.communicator import Communicator
from everyframe.runtime.interface import VideoState
from everyframe.runtime.memory.memory_fallbacks import cfg_batch_size
from everyframe.runtime.rank_shares import active_ranks
from everyframe.runtime.stages import denoise_stage
from everyframe.runtime.stages.denoise_stage import SamplerBatch
from everyframe.runtime.stages.guard import Guard
from everyframe.runtime.stages.templates import PromptEncodeStage, PromptTokens
from everyframe.samplers import diffusers_scheduler, noise
from everyframe.samplers.base import Step

#: The context of a dry run; see `NativeModelSpec.stage_call`.
Context = InpaintContext

#: What ranks wait for, in messages.
BROADCAST_ACTION = "batches of frames are broadcast"


def forward_events(group: Communicator, guard: Guard, events: Iterable[Event]) -> None:
    """Send the guard events of all other ranks to the lead rank's guard."""
    if group.size == 1:
        return
    gathered = group.all_gather_object(
        [] if group.is_lead else [each.to_json() for each in events], BROADCAST_ACTION
    )
    if group.is_lead:
        guard.hear(event_of(each) for one in gathered for each in one)


def steps_of_round(
    group: Communicator,
    guard: Guard,
    steps: Iterator[Step],
    ranks: Sequence[int],
    num_steps: int,
) -> Iterator[Step]:
    """Yield the steps of this rank's batch; the last one holds the results of all ranks.

    `ranks` are those with a batch in this round, in order. A rank without a batch has no `steps`
    and yields one step with the other ranks' results.
    """
    if group.size == 1:
        yield from steps
        return
    events: list[Event] = []
    last: Step | None = None
    error = None
    for step in steps:
        events += () if group.is_lead else guard.events()
        if step.index + 1 == num_steps:
            last, error = step, (step.memory or {}).get("error")
        else:
            yield step
    made = [
        group.broadcast_tree((last and last.x, error), rank, BROADCAST_ACTION) for rank in ranks
    ]
    forward_events(group, guard, events)
    whole = torch.cat([x for x, _ in made])
    errors = [each for _, each in made if each is not None]  # of a lossy method
    memory = {"error": max(errors, key=abs)} if errors else None
    yield Step(num_steps - 1, num_steps, last.t if last else torch.zeros(1), whole, memory)


class TextEncodeStage(PromptEncodeStage[InpaintContext]):
    """Encode prompt and negative prompt with CLIP."""

    @property
    def num_inputs(self) -> int:
        """Number of prompts."""
        return len(prompts_of(self.context.settings))

    def tokens(self) -> list[tuple[Tensor, Tensor, str]]:
        """CLIP's tokens of each prompt."""
        context = self.context
        tokenizer = load_tokenizer(context.model.files.path("tokenizer"))
        return tokens_of(tokenizer, context.settings, context.config.num_tokens)

    def example_inputs(self, device: str) -> PromptTokens:
        """A prompt of full length."""
        ids = torch.zeros(1, self.context.config.num_tokens, dtype=torch.long)
        return PromptTokens(ids, torch.ones_like(ids))

    def compute(self, module: Any, inputs: PromptTokens, device: str, settings: Settings) -> Tensor:
        """CLIP's hidden states (1, L, D)."""
        uses_mask = bool(self.context.config.text_encoder.get("use_attention_mask"))
        return embed(module, inputs.ids, inputs.mask, device=device, uses_mask=uses_mask)

    def store(self, videos: Sequence[VideoState], results: Sequence[Tensor]) -> None:
        """Set `text` of each video."""
        text = torch.cat([*results])
        for video in videos:
            video.text = text


@dataclass(frozen=True)
class SamplerInputs:
    """Inputs of the sampler for a batch of F frames, besides a new scheduler.

    Attributes:
        x: latents (F, 4, h, w) at the first step.
        networks: further inputs of the networks.
        known: latents pasted back after each step, for a UNet without mask input.
        seed, memory: the video's seed, and the scheduler's memory of earlier steps.
    """

    x: Tensor
    networks: ControlNetInputs
    known: diffusers_scheduler.KnownLatents | None = None
    seed: int = 0
    memory: Any = None


class DenoiseStage(denoise_stage.DenoiseStage[InpaintContext, SamplerInputs]):
    """Denoise: scheduler, guidance, ControlNets and UNet turn noise into latents (T, 4, h, w).

    Each rank denoises batches of frames of its own.
    """

    component = "unet"

    @property
    def components(self) -> tuple[str, ...]:
        """The ControlNets and the UNet."""
        nets = map(controlnet_name, range(len(self.context.config.controlnets)))
        return (*nets, self.component)

    @property
    def steps_per_video(self) -> int:
        """Scheduler steps of all batches."""
        return self.context.num_batches * self.context.num_timesteps

    @property
    def steps_per_batch(self) -> int:
        """Scheduler steps of a batch."""
        return self.context.num_timesteps

    def _agree(self, is_over: bool) -> bool:
        """Return this rank's own value: each batch has its own error budget."""
        return is_over

    def batches(
        self, modules: Mapping[str, Any], guard: Guard, video: VideoState
    ) -> Iterator[SamplerBatch]:
        """Yield the remaining batches of frames, in rounds of one batch per rank."""
        context, group = self.context, self.context.parallel.video_group
        steps, ranks = context.num_timesteps, active_ranks(group.weights)
        num_done, start = divmod(video.step, steps)
        left = islice(enumerate(batched(context.controls(video), context.together)), num_done, None)
        for batches in batched(left, len(ranks)):
            mine = [one for one, rank in zip(batches, ranks, strict=False) if rank == group.rank]
            # Only the first batch can be partly done; its rank continues it.
            begun = start if mine and mine[0][0] == num_done else 0
            sampled = (
                step
                for numbered in mine
                for step in self.guarded_steps(
                    modules,
                    guard,
                    self._inputs(video, *numbered, begun),
                    begun,
                    video.sampler_state if begun else None,
                )
            )
            last, count = batches[-1][0], len(batches)
            whole = steps_of_round(group, guard, sampled, ranks[:count], steps)
            yield SamplerBatch(whole, (last + 1) * steps, count)

    def _inputs(
        self, video: VideoState, number: int, batch: Sequence[Any], start: int
    ) -> SamplerInputs:
        """Inputs of batch `number` at step `start`; `batch` has each frame's control images."""
        context, known = self.context, video.conditioning
        first, device = number * context.together, context.device(self.component)
        frames = slice(first, first + len(batch))
        mask = known.mask[frames].to(device)
        source = None if known.source is None else known.source[frames].to(device)
        x, noised = self._begin(video, source, len(mask))
        takes_mask = context.config.takes_mask
        networks = ControlNetInputs(
            text=video.text.to(device),
            controls=tuple(control.to(device) for control in _controls(batch)),
            scales=_scales(context.settings),
            mask=mask if takes_mask else None,
            masked=known.masked[frames].to(device) if takes_mask else None,
        )
        put_back = None
        if not takes_mask:
            assert source is not None, "encoded for a UNet that takes no mask"
            put_back = diffusers_scheduler.KnownLatents(source, mask, noised)
        memory = None
        if start:
            x, memory = video.latents.to(device), video.sampler_state
            if context.settings.method is not None:  # its state contains the scheduler's
                memory = memory["sampler"]
        return SamplerInputs(x, networks, put_back, video.seed, memory)

    def _begin(self, video: VideoState, source: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        """Initial latents and their noise, (F, 4, h, w) each; the same for every frame."""
        context = self.context
        device = context.device(self.component)
        scheduler, timesteps = context.make_scheduler(device)
        start = video.start_noise
        if start is None:
            start = noise.start_noise(video.seed, context.latent_shape)[None]
        start = start.to(device).expand(count, -1, -1, -1)
        if context.mixes_source_in(video):
            assert source is not None, "encoded to begin with"
            return scheduler.add_noise(source, start, timesteps[:1]), start
        return start * scheduler.init_noise_sigma, start

    def example_inputs(self, device: str) -> SamplerInputs:
        """A batch with all ControlNets, each of them active."""
        context, config = self.context, self.context.config
        frames = context.largest_batch

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(frames, *shape, device=device)

        shape, takes_mask = context.latent_shape, config.takes_mask
        branches = 1 if context.settings.guidance_scale <= 1 else 2
        width = int(config.text_encoder.get("hidden_size", 512))
        networks = ControlNetInputs(
            text=torch.zeros(branches, config.num_tokens, width, device=device),
            controls=tuple(zeros(3, *context.geometry.padded) for _ in config.controlnets),
            scales=[ControlNetScale(1.0, 0.0, 1.0)] * len(config.controlnets),
            mask=zeros(1, *shape[1:]) if takes_mask else None,
            masked=zeros(*shape) if takes_mask else None,
        )
        return SamplerInputs(zeros(*shape), networks)

    def denoiser(
        self, modules: Mapping[str, Any], inputs: SamplerInputs, device: str, settings: Settings
    ) -> Denoiser:
        """UNet and ControlNets with their inputs and guidance."""
        *nets, unet = (modules[name] for name in self.components)
        return Denoiser(
            unet,
            nets,
            inputs.networks,
            guidance_scale=settings.guidance_scale,
            guess_mode=bool(settings.option("guess_mode")),
            num_steps=self.context.num_timesteps,
            branches_at_once=cfg_batch_size(settings, 2),
        )

    def sample(
        self, denoise: Callable[..., Tensor], inputs: SamplerInputs, start: int
    ) -> Iterator[Step]:
        """Steps of the checkpoint's scheduler."""
        scheduler, timesteps = self.context.make_scheduler(self.context.device(self.component))

        def generators(step: int) -> list[torch.Generator]:
            return [noise.generator(inputs.seed, "step", step) for _ in range(len(inputs.x))]

        inputs.networks.step = start
        for step in diffusers_scheduler.sample(
            denoise,
            inputs.x,
            scheduler,
            timesteps,
            known=inputs.known,
            generators=generators,
            start=start,
            memory=inputs.memory,
        ):
            inputs.networks.step = step.index + 1
            yield step

    def dry_run(self, modules: Mapping[str, Any], device: str) -> object:
        """Call the networks once, without a scheduler: diffusers' read values of meta tensors."""
        inputs = self.examples(device)
        denoise = self.denoiser(modules, inputs, device, self.context.settings)
        _, timesteps = self.context.make_scheduler("cpu")
        t = torch.zeros(len(inputs.x), dtype=timesteps.dtype, device=device)
        return denoise(inputs.x, t)


def _controls(batch: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the control images of each ControlNet, (F, C, H, W)."""
    for one in zip(*batch, strict=True):
        yield rearrange(torch.from_numpy(np.stack(one)), "f h w c -> f c h w").contiguous()


def _scales(settings: Settings) -> list[ControlNetScale]:
    """Scale of each ControlNet; the settings hold numbers for one, tuples for several."""
    names = ("controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end")
    values = [settings.option(name) for name in names]
    each = [value if isinstance(value, (tuple, list)) else (value,) for value in values]
    return [ControlNetScale(*numbers) for numbers in zip(*each, strict=True)]
