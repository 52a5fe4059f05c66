"""Open-Sora 2.0's ``denoise(x, t)``: model, both text encodings, condition and guidance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everyframe.core.plan import Settings
from everyframe.families.opensora2.conditions import GivenLatents
from everyframe.families.opensora2.config import OpenSora2Config
from everyframe.families.opensora2.guidance import BARE, guidance_of, time_shift
from everyframe.families.opensora2.mmdit import MMDiT
from everyframe.families.opensora2.settings import (
    FLUX_GUIDANCE,
    frame_tokens,
    is_conditioned,
    latent_shape,
)
from everyframe.ops.text_context import JointTextContext
from everyframe.parallel.communicator import broadcastable
from everyframe.runtime.memory.memory_fallbacks import cfg_batch_size
from everyframe.samplers import flow_matching


@broadcastable
@dataclass(frozen=True)
class TextStates:
    """T5's states (1, 512, D) of one text, and CLIP's pooled state (1, E), on the CPU."""

    t5: Tensor
    clip: Tensor | None = None


@dataclass(frozen=True)
class PromptEmbeds:
    """Encoded prompt, negative prompt if there is one, and prompt of a first picture."""

    texts: tuple[TextStates, ...]
    has_negative: bool

    @property
    def branches(self) -> tuple[TextStates, ...]:
        """Prompt and negative prompt."""
        return self.texts[: 1 + self.has_negative]

    @property
    def first_picture(self) -> TextStates:
        """The prompt of a first picture."""
        return self.texts[-1]


def timesteps_of(settings: Settings, config: OpenSora2Config) -> Tensor:
    """Timesteps of the sampler, from 1 to 0, shifted as requested, else by size and length."""
    shift = settings.option("flow_shift")
    if shift is None:
        shift = time_shift(frame_tokens(config, settings), latent_shape(config, settings)[1])
    return flow_matching.schedule(settings.num_inference_steps, shift, reverse=True)


class Denoiser:
    """``denoise(x, t)`` for the sampler: the guided velocity at t, 1 (noise) to 0 (data).

    Guidance differs between steps; the step is found by the nearest timestep. If memory is short,
    the plan runs the branches one after the other.
    """

    def __init__(
        self,
        model: MMDiT,
        text: PromptEmbeds,
        given: GivenLatents | None,
        settings: Settings,
        timesteps: Tensor,
        device: str,
    ) -> None:
        self._model, self._settings, self._timesteps = model, settings, timesteps
        self._given, self._device = given, device
        self._guidance = guidance_of(settings, is_conditioned=is_conditioned(settings))
        branches = text.branches
        if self._guidance.is_conditioned and len(branches) == 2:
            branches = (*branches, branches[1])
        self._context = _context(model, branches, device)
        self._cond: Tensor | None = None

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Guided velocity for x (1, C, T, h, w) and t (1,), float32 or wider."""
        now = self._guidance.at(self._step_of(t), x.shape[2])
        at_once = cfg_batch_size(self._settings, len(now.branches))
        outputs: list[Tensor] = []
        for start in range(0, len(now.branches), at_once):
            stop = min(start + at_once, len(now.branches))
            some = stop - start
            velocity: Tensor = self._model(
                x.expand(some, *x.shape[1:]),
                t.expand(some),
                self._context.rows(start, stop),
                cond=self._condition(x, now.branches[start:stop]),
            )
            outputs += torch.split(velocity, 1)
        return now.combine(outputs)

    def _step_of(self, t: Tensor) -> int:
        if t.device.type == "meta":
            return 0  # a dry run, whose first step has all branches
        return int((self._timesteps[:-1] - float(t[0])).abs().argmin())

    def _condition(self, x: Tensor, branches: tuple[tuple[int, bool], ...]) -> Tensor | None:
        """Conditions of these branches; None if no branch has one."""
        if self._given is None:
            return None
        if self._cond is None:
            self._cond = self._given.condition(x.shape[1:]).to(self._device, x.dtype)
        zeros = torch.zeros_like(self._cond)
        return torch.cat([zeros if branch == BARE else self._cond for branch in branches])


class FirstPictureDenoiser:
    """``denoise(x, t)`` of FLUX.1: one branch, whose guidance is an input of the network."""

    def __init__(self, model: MMDiT, text: PromptEmbeds, device: str) -> None:
        self._model = model
        self._context = _context(model, (text.first_picture,), device, FLUX_GUIDANCE)

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Velocity for x (1, C, 1, h, w) and t (1,)."""
        velocity: Tensor = self._model(x, t, self._context)
        return velocity


def _context(
    model: MMDiT, branches: tuple[TextStates, ...], device: str, guidance: float | None = None
) -> JointTextContext:
    pooled = [text.clip for text in branches if text.clip is not None]
    assert len(pooled) == len(branches), "the stage of CLIP comes before"
    t5 = torch.cat([text.t5 for text in branches]).to(device)
    guidances = None
    if guidance is not None:
        guidances = torch.full((len(branches),), guidance, dtype=torch.float32, device=device)
    return model.context(t5, torch.cat(pooled).to(device), guidances)
