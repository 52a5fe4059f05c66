"""Karras' noise levels and Euler steps against diffusers' `EulerDiscreteScheduler`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.samplers import euler_karras

SIGMAS: dict[str, float] = {"sigma_min": 0.002, "sigma_max": 700.0}


def scheduler(num_steps: int) -> Any:
    from diffusers import EulerDiscreteScheduler

    made = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
        prediction_type="v_prediction", timestep_spacing="leading", timestep_type="continuous",
        use_karras_sigmas=True, **SIGMAS,
    )  # fmt: skip
    made.set_timesteps(num_steps)
    return made


def model(x: Tensor, t: Tensor) -> Tensor:
    """Depends on both, and is no multiple of either."""
    return torch.tanh(x.roll(1, -1)) + torch.sin(t)[:, None] * x**2


@pytest.mark.parametrize("num_steps", [1, 2, 25, 50])
def test_schedule_is_that_of_diffusers(num_steps: int) -> None:
    wanted = scheduler(num_steps)
    sigmas = euler_karras.schedule(num_steps, **SIGMAS)
    assert sigmas.dtype == torch.float64
    # Both are float64 powers; diffusers rounds to float32 at the end.
    torch.testing.assert_close(sigmas.float(), wanted.sigmas, rtol=2e-7, atol=0)
    torch.testing.assert_close(euler_karras.start_scale(sigmas), wanted.init_noise_sigma)


@pytest.mark.parametrize("num_steps", [1, 2, 25])
def test_samples_are_those_of_diffusers(num_steps: int) -> None:
    theirs = scheduler(num_steps)
    noise = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    sigmas = euler_karras.schedule(num_steps, **SIGMAS)
    wanted = noise * theirs.init_noise_sigma
    steps = list(euler_karras.sample(model, noise * euler_karras.start_scale(sigmas), sigmas))
    assert len(steps) == num_steps
    for step, t in zip(steps, theirs.timesteps, strict=True):
        torch.testing.assert_close(step.t, t.expand(2))
        answer = model(theirs.scale_model_input(wanted, t), t.expand(2))
        wanted = theirs.step(answer, t, wanted).prev_sample
        # The same operations in the same order; a last bit of sigma may differ.
        torch.testing.assert_close(step.x, wanted, rtol=1e-5, atol=1e-5)


def test_it_finds_what_a_perfect_model_knows() -> None:
    """With v of a known x0 and noise, each state is ``x0 + sigma noise``: in float64, exactly."""
    generator = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 1, 9, dtype=torch.float64, generator=generator)
    sigmas = euler_karras.schedule(7, **SIGMAS)

    def perfect(x: Tensor, t: Tensor) -> Tensor:
        sigma = torch.exp(4 * t)[:, None]
        return (noise - sigma * x0) / torch.sqrt(sigma**2 + 1)

    start = x0 + sigmas[0] * noise
    for step in euler_karras.sample(perfect, start, sigmas):
        wanted = x0 + sigmas[step.index + 1] * noise
        torch.testing.assert_close(step.x, wanted, rtol=1e-10, atol=1e-10)


def test_it_goes_on_from_any_step() -> None:
    sigmas = euler_karras.schedule(5, **SIGMAS)
    whole = list(euler_karras.sample(model, torch.full((1, 3), 7.0), sigmas))
    rest = list(euler_karras.sample(model, whole[1].x, sigmas, start=2))
    assert [step.index for step in rest] == [2, 3, 4]
    assert torch.equal(rest[-1].x, whole[-1].x)


def test_half_precision_stays_finite() -> None:
    """700 squared is infinite in fp16: the state and its coefficients are float32."""
    sigmas = euler_karras.schedule(3, **SIGMAS)
    steps = list(euler_karras.sample(lambda x, t: x.half(), torch.ones(1, 3).half(), sigmas))
    assert all(step.x.dtype == torch.float32 and step.x.isfinite().all() for step in steps)
    assert not math.isfinite(torch.tensor(700.0).half().square().item())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((0, 0.002, 700.0), "1 step or more"),
        ((3, 0.0, 700.0), "above 0"),
        ((3, 5.0, 1.0), "must rise"),
    ],
)
def test_bad_schedules(given: tuple[int, float, float], text: str) -> None:
    with pytest.raises(InputError, match=text):
        euler_karras.schedule(*given)
