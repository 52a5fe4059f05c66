"""Guidance and the ControlNets around the UNet: what the plan may change, and what it may not."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from everyframe.families.inpaint.denoiser import ControlNetInputs, ControlNetScale, Denoiser


def net(x: Tensor, t: Tensor, **given: Any) -> tuple[list[Tensor], Tensor]:
    """Adds what it is given: its control, its text and the strength that it is asked for."""
    seen = given["controlnet_cond"].mean((1, 2, 3)) + given["encoder_hidden_states"].mean((1, 2))
    added = x * (seen * given["conditioning_scale"])[:, None, None, None]
    return [added], added + t[:, None, None, None]


def unet(x: Tensor, t: Tensor, **given: Any) -> tuple[Tensor]:
    """The first channels and the others, the text and what the ControlNets add."""
    sums = x[:, :4] + x[:, 4:].sum(1, keepdim=True) + t[:, None, None, None]
    sums = sums * given["encoder_hidden_states"].mean((1, 2))[:, None, None, None]
    for added in given.get("down_block_additional_residuals", ()):
        sums = sums + 2 * added
    return (sums + 3 * given.get("mid_block_additional_residual", 0),)


def answer(branches: int, guess: bool, at_once: int, step: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    conditions = ControlNetInputs(
        text=torch.randn(branches, 5, 6, generator=draw),
        controls=(torch.randn(2, 3, 8, 8, generator=draw), torch.rand(2, 3, 8, 8, generator=draw)),
        scales=[ControlNetScale(0.5, 0.0, 0.5), ControlNetScale(2.0, 0.5, 1.0)],
        mask=torch.ones(2, 1, 4, 4),
        masked=torch.randn(2, 4, 4, 4, generator=draw),
        step=step,
    )
    denoise = Denoiser(
        unet, [net, net], conditions,
        guidance_scale=3.0, guess_mode=guess, num_steps=2, branches_at_once=at_once,
    )  # fmt: skip
    return denoise(torch.randn(2, 4, 4, 4, generator=draw), torch.tensor([5.0, 5.0]))


@pytest.mark.parametrize(
    ("branches", "guess", "step"), list(product((1, 2), (False, True), (0, 1)))
)
def test_branches_one_after_the_other_give_the_same(branches: int, guess: bool, step: int) -> None:
    """Each row of the stand-ins is computed by itself, so nothing but rounding of sums is left."""
    together, apart = (answer(branches, guess, at_once, step) for at_once in (2, 1))
    torch.testing.assert_close(apart, together)


def test_a_controlnet_steers_between_its_shares_of_the_steps() -> None:
    steering = ControlNetScale(0.8, 0.25, 0.75)
    assert [steering.scale_at(step, 4) for step in range(4)] == [0.0, 0.8, 0.8, 0.0]
    assert not torch.allclose(answer(2, False, 2, step=0), answer(2, False, 2, step=1))
