"""ControlNet inpainting's ``denoise(x, t)``: the ControlNets, the UNet and guidance.

The order of operations is that of diffusers' `StableDiffusionControlNetInpaintPipeline`, without
redundant work: a ControlNet does not run in steps outside of its interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everyframe.samplers.guidance import guided


@dataclass(frozen=True)
class ControlNetScale:
    """Scale of one ControlNet, and the interval (shares of the steps) in which it applies."""

    scale: float
    start: float
    end: float

    def scale_at(self, step: int, num_steps: int) -> float:
        """Scale in a step; 0 outside of the interval."""
        is_out = step / num_steps < self.start or (step + 1) / num_steps > self.end
        return 0.0 if is_out else self.scale


@dataclass(eq=False)
class ControlNetInputs:
    """Inputs of the networks besides the latents, for F frames at once.

    Attributes:
        text: (1 or 2, L, D); with guidance the negative prompt comes first.
        controls, scales: (F, 3, H, W) and scale of each ControlNet.
        mask, masked: (F, 1, h, w) and (F, 4, h, w), or None for a UNet without mask input.
        step: the sampler's step; the caller of the denoiser increments it.
    """

    text: Tensor
    controls: tuple[Tensor, ...]
    scales: Sequence[ControlNetScale]
    mask: Tensor | None = None
    masked: Tensor | None = None
    step: int = 0


class Denoiser:
    """Guided output of the networks.

    If memory is short, the plan runs the guidance branches one after the other.
    """

    def __init__(
        self,
        unet: Any,
        controlnets: Sequence[Any],
        conditions: ControlNetInputs,
        *,
        guidance_scale: float,
        guess_mode: bool,
        num_steps: int,
        branches_at_once: int = 2,
    ) -> None:
        self._unet = unet
        self._controlnets = tuple(controlnets)
        self._guidance_scale = guidance_scale
        self._guess_mode = guess_mode
        self._num_steps = num_steps
        self._given = conditions
        self._batch_size = branches_at_once

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Guided output for scaled latents x (F, 4, h, w) and t (F,)."""

        def predict(start: int, stop: int) -> Tensor:
            given, branches = self._given, range(start, stop)
            text = given.text[start:stop].repeat_interleave(len(x), dim=0)
            seen = _repeat(x, len(branches))
            if given.mask is not None and given.masked is not None:
                mask, masked = (_repeat(each, len(branches)) for each in (given.mask, given.masked))
                seen = torch.cat([seen, mask, masked], dim=1)
            answer: Tensor = self._unet(
                seen,
                t.repeat(len(branches)),
                encoder_hidden_states=text,
                return_dict=False,
                **self._control_residuals(x, t, text, branches),
            )[0]
            return answer

        return guided(predict, len(self._given.text), self._batch_size, self._guidance_scale)

    def _control_residuals(
        self, x: Tensor, t: Tensor, text: Tensor, branches: range
    ) -> dict[str, Any]:
        """ControlNet residuals for the UNet, as its keyword arguments; empty without an active one.

        In guess mode only the prompt's branch is steered; with guidance this is the second.
        """
        is_guided = len(self._given.text) == 2
        unsteered = 0 if branches.start else 1
        unsteered = unsteered if self._guess_mode and is_guided else 0
        count = len(branches) - unsteered
        if not count:
            return {}
        down: list[Tensor] = []
        mid: Tensor | None = None
        given = self._given
        nets = zip(self._controlnets, given.controls, given.scales, strict=True)
        for net, control, steering in nets:
            scale = steering.scale_at(given.step, self._num_steps)
            if not scale:
                continue
            added, middle = net(
                _repeat(x, count),
                t.repeat(count),
                encoder_hidden_states=text[unsteered * len(x) :],
                controlnet_cond=_repeat(control, count),
                conditioning_scale=scale,
                guess_mode=self._guess_mode,
                return_dict=False,
            )
            down = [a + b for a, b in zip(down, added, strict=True)] if down else list(added)
            mid = middle if mid is None else mid + middle
        if mid is None:
            return {}
        if unsteered:
            down = [torch.cat([torch.zeros_like(each), each]) for each in down]
            mid = torch.cat([torch.zeros_like(mid), mid])
        return {
            "down_block_additional_residuals": down,
            "mid_block_additional_residual": mid,
        }


def _repeat(tensor: Tensor, count: int) -> Tensor:
    """Repeat (F, ...) for each branch: (count F, ...)."""
    return torch.cat([tensor] * count) if count > 1 else tensor
