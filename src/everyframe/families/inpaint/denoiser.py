"""``denoise(x, t)`` of ControlNet inpainting: the ControlNets, the UNet, and guidance around them.

The order of operations is that of diffusers' `StableDiffusionControlNetInpaintPipeline`. What need
not be done isn't: a ControlNet that does not steer a step is not run in it.
Read next: `stages.py`, which loads the parts; `everyframe.samplers.scheduled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Steering:
    """How one ControlNet steers: its scale, and between which shares of the steps."""

    scale: float
    start: float
    end: float

    def scale_at(self, step: int, num_steps: int) -> float:
        """Its scale in a step; 0 before its start and after its end."""
        is_out = step / num_steps < self.start or (step + 1) / num_steps > self.end
        return 0.0 if is_out else self.scale


@dataclass(frozen=True, eq=False)
class Conditions:
    """What the networks see beside the latents, for F frames at once.

    text: (1 or 2, L, D), with guidance the negative prompt first.
    controls: (F, 3, H, W) for each ControlNet.
    mask, masked: (F, 1, h, w) and (F, 4, h, w), or None for a UNet that takes no mask.
    """

    text: Tensor
    controls: tuple[Tensor, ...]
    mask: Tensor | None = None
    masked: Tensor | None = None


class Denoiser:
    """The guided answer of the networks. `step` is the sampler's; the caller counts it up."""

    def __init__(
        self,
        unet: nn.Module,
        controlnets: Sequence[nn.Module],
        conditions: Conditions,
        steering: Sequence[Steering],
        *,
        guidance_scale: float,
        guess_mode: bool,
        num_steps: int,
    ) -> None:
        self.step = 0
        self._unet = unet
        self._controlnets = tuple(controlnets)
        self._steering = tuple(steering)
        self._guidance_scale = guidance_scale
        self._guess_mode = guess_mode
        self._num_steps = num_steps
        self._given = conditions
        self._branches = len(conditions.text)

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """The guided answer for scaled latents x (F, 4, h, w) and t (F,)."""
        given, frames = self._given, len(x)
        text = given.text.repeat_interleave(frames, dim=0)
        both, times = self._twice(x), t.repeat(self._branches)
        steered = self._steered(x, both, t, times, text)
        if given.mask is not None and given.masked is not None:
            both = torch.cat([both, self._twice(given.mask), self._twice(given.masked)], dim=1)
        answer: Tensor = self._unet(
            both, times, encoder_hidden_states=text, return_dict=False, **steered
        )[0]
        if self._branches == 1:
            return answer
        uncond, cond = answer.chunk(2)
        return uncond + self._guidance_scale * (cond - uncond)

    def _twice(self, tensor: Tensor) -> Tensor:
        """The same for each branch of guidance."""
        return torch.cat([tensor] * self._branches)

    def _steered(
        self, x: Tensor, both: Tensor, t: Tensor, times: Tensor, text: Tensor
    ) -> dict[str, Any]:
        """What the ControlNets add to the UNet's residuals, as its keywords; none, nothing."""
        cond_alone = self._guess_mode and self._branches == 2
        down: list[Tensor] = []
        mid: Tensor | None = None
        nets = zip(self._controlnets, self._given.controls, self._steering, strict=True)
        for net, control, steering in nets:
            scale = steering.scale_at(self.step, self._num_steps)
            if not scale:
                continue
            added, middle = net(
                x if cond_alone else both,
                t if cond_alone else times,
                encoder_hidden_states=text.chunk(2)[1] if cond_alone else text,
                controlnet_cond=control if self._guess_mode else self._twice(control),
                conditioning_scale=scale,
                guess_mode=self._guess_mode,
                return_dict=False,
            )
            down = [a + b for a, b in zip(down, added, strict=True)] if down else list(added)
            mid = middle if mid is None else mid + middle
        if mid is None:
            return {}
        if cond_alone:
            down = [torch.cat([torch.zeros_like(each), each]) for each in down]
            mid = torch.cat([torch.zeros_like(mid), mid])
        return {
            "down_block_additional_residuals": down,
            "mid_block_additional_residual": mid,
        }
