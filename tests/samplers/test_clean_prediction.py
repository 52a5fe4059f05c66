"""The clean sample that a step predicts is found at every step, with a model that knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import diffusers
import pytest
import torch
from torch import Tensor

from everyframe.core.quality import SamplingMethod
from everyframe.samplers import euler_karras, flow_matching, iddpm, multistep, rectified_flow
from everyframe.samplers.base import Step
from everyframe.samplers.clean_prediction import predicted_clean

TRUTH = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(1, 2, 3, 2, 2)
X = torch.randn(TRUTH.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def by_karras() -> Iterator[Step]:
    sigmas = euler_karras.schedule(5, 0.002, 700.0)

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        sigma = torch.exp(4 * t[0])
        scale = torch.sqrt(sigma**2 + 1)
        return (x * scale / scale**2 - TRUTH) * scale / sigma

    return euler_karras.sample(denoise, X * 700, sigmas)


def by_flow(*, reverse: bool) -> Iterator[Step]:
    sigmas = flow_matching.schedule(5, 3.0, reverse=reverse)

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        return (TRUTH - x) / (1 - t[0]) if not reverse else (x - TRUTH) / t[0]

    return flow_matching.sample(denoise, X, sigmas)


def by_rectified_flow(method: str | None = None) -> Iterator[Step]:
    timesteps = rectified_flow.schedule(5)

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        return (TRUTH - x) / (t[0] / 1000)

    if method is not None:
        path = rectified_flow.path(timesteps)
        return multistep.sample(denoise, X, path, SamplingMethod(method, 3))
    return rectified_flow.sample(denoise, X, timesteps)


def by_masked_flow() -> Iterator[Step]:
    mask = torch.tensor([[0.0, 0.5, 1.0]])

    def denoise(x: Tensor, t: Tensor, active: Tensor) -> Tensor:
        return (TRUTH - x) / (t[0] / 1000)

    x = torch.where(mask[:, None, :, None, None] == 1, X, TRUTH)
    return rectified_flow.sample_masked(
        denoise, x, rectified_flow.schedule(5), mask, lambda step: X
    )


def by_iddpm() -> Iterator[Step]:
    plan = iddpm.schedule(5)
    kept = torch.cumprod(1 - plan.betas, dim=0)
    levels = dict(zip(plan.timestep_map.tolist(), kept.tolist(), strict=True))

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        signal = levels[int(t[0])]
        eps = (x - signal**0.5 * TRUTH) / (1 - signal) ** 0.5
        return torch.cat([eps, torch.zeros_like(eps)], dim=1)

    return iddpm.sample(denoise, X, plan, lambda step: X)


SAMPLERS: dict[str, Callable[[], Iterator[Step]]] = {
    "karras": by_karras,
    "flow": lambda: by_flow(reverse=False),
    "reversed flow": lambda: by_flow(reverse=True),
    "rectified flow": by_rectified_flow,
    "masked flow": by_masked_flow,
    "iddpm": by_iddpm,
    "ab2": lambda: by_rectified_flow("ab2"),
    "unipc": lambda: by_rectified_flow("unipc"),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_each_step_knows_the_clean_sample(name: str) -> None:
    steps = 0
    for step in SAMPLERS[name]():
        assert step.clean is not None
        torch.testing.assert_close(step.clean(), TRUTH, rtol=0, atol=1e-9)
        steps += 1
    assert steps == 5


SCHEDULERS = {
    "FlowMatchEulerDiscreteScheduler": {},
    "UniPCMultistepScheduler": {
        "prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0,
    },
    "DPMSolverMultistepScheduler": {"algorithm_type": "dpmsolver++"},
    "EulerDiscreteScheduler": {"prediction_type": "v_prediction", "use_karras_sigmas": True},
    "DDIMScheduler": {"prediction_type": "v_prediction"},
    "LCMScheduler": {},
    "EDMEulerScheduler": {},
}  # fmt: skip


def answer_for(scheduler: diffusers.SchedulerMixin, x: Tensor, t: Tensor, index: int) -> Tensor:
    """What a model that knows the truth answers, in the scheduler's own terms."""
    kind = scheduler.config.get("prediction_type", "epsilon")
    truth = TRUTH.float()
    if type(scheduler).__name__ == "EDMEulerScheduler":
        sigma, data = float(scheduler.sigmas[index]), scheduler.config.sigma_data
        skip = data**2 / (sigma**2 + data**2)
        return (truth - skip * x) / (sigma * data / (sigma**2 + data**2) ** 0.5)
    if hasattr(scheduler, "sigmas"):
        sigma = float(scheduler.sigmas[index])
        if kind == "v_prediction":
            return (x / (sigma**2 + 1) - truth) * (sigma**2 + 1) ** 0.5 / sigma
        alpha = 1.0
        if type(scheduler).__name__ == "DPMSolverMultistepScheduler":
            alpha, sigma = 1 / (sigma**2 + 1) ** 0.5, sigma / (sigma**2 + 1) ** 0.5
        return (x - alpha * truth) / sigma
    signal = float(scheduler.alphas_cumprod[int(t)])
    if kind == "v_prediction":
        return (signal**0.5 * x - truth) / (1 - signal) ** 0.5
    return (x - signal**0.5 * truth) / (1 - signal) ** 0.5


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_diffusers(name: str) -> None:
    scheduler = getattr(diffusers, name)(**SCHEDULERS[name])
    scheduler.set_timesteps(4)
    x = X.float() * float(getattr(scheduler, "init_noise_sigma", 1.0))
    for index, t in enumerate(scheduler.timesteps):
        scheduler.scale_model_input(x, t) if name.startswith("Euler") else x
        answer = answer_for(scheduler, x, t, index)
        before, x = x, scheduler.step(answer, t, x, return_dict=False)[0]
        found = predicted_clean(scheduler, answer, t, before)
        assert found is not None
        torch.testing.assert_close(found, TRUTH.float(), rtol=0, atol=2e-3)


def test_a_scheduler_that_is_not_understood_has_none() -> None:
    scheduler = diffusers.UniPCMultistepScheduler(predict_x0=False, solver_type="bh2")
    scheduler.set_timesteps(4)
    t = scheduler.timesteps[0]
    scheduler.step(X.float(), t, X.float())
    assert predicted_clean(scheduler, X.float(), t, X.float()) is None
