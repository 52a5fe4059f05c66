"""Multistep solvers against diffusers' own schedulers, and against the order that they claim."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    EDMDPMSolverMultistepScheduler,
    UniPCMultistepScheduler,
)
from torch import Tensor

from everyframe.core.quality import SOLVERS, SamplingMethod
from everyframe.samplers import euler_karras, flow_matching, iddpm, multistep, rectified_flow
from everyframe.samplers.base import Denoise
from everyframe.samplers.multistep import DiffusionPath

SHAPE = (1, 3, 2, 4, 4)


def start(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def clean(x: Tensor, level: float) -> Tensor:
    """An x0 that depends on state and level."""
    return torch.sin(x * 0.7 + level) * (1 - 0.3 * level) + 0.1 * x


def path_of(sigmas: Tensor, is_flow: bool = True) -> DiffusionPath:
    levels = tuple(sigmas.double().tolist())
    alphas = tuple(1 - each for each in levels) if is_flow else (1.0,) * len(levels)

    def predict(denoise: Denoise, x: Tensor, index: int) -> tuple[Tensor, Tensor]:
        return x.new_zeros(1), clean(x, levels[index])

    return DiffusionPath(alphas, levels, predict, is_flow=is_flow)


def solved(path: DiffusionPath, method: SamplingMethod, x: Tensor, **more: Any) -> Tensor:
    *_, last = multistep.sample(lambda x, t: x, x, path, method, **more)
    return last.x


def by_diffusers(scheduler: Any, x: Tensor, steps: int, answer: Callable[[Tensor, float], Tensor]):  # type: ignore[no-untyped-def]
    """The scheduler's own loop in float64, with its own sigmas."""
    scheduler.set_timesteps(steps)
    scheduler.sigmas = scheduler.sigmas.double()
    for index, t in enumerate(scheduler.timesteps):
        x = scheduler.step(answer(x, float(scheduler.sigmas[index])), t, x).prev_sample
    return x


@pytest.mark.parametrize("steps", [2, 6, 20])
@pytest.mark.parametrize(
    ("name", "kind", "more"),
    [
        ("dpm2m", DPMSolverMultistepScheduler, {"euler_at_final": True}),
        ("unipc", UniPCMultistepScheduler, {"solver_type": "bh2"}),
    ],
)
def test_flow_equals_diffusers(name: str, kind: Any, more: dict[str, Any], steps: int) -> None:
    scheduler = kind(
        use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction", **more
    )
    x = start()
    theirs = by_diffusers(scheduler, x, steps, lambda x, s: (x - clean(x, s)) / s)
    ours = solved(path_of(scheduler.sigmas), SamplingMethod(name, steps), x)
    # Their coefficients are float32 tensors; ours are float64 numbers.
    assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()


def test_edm_equals_diffusers() -> None:
    scheduler = EDMDPMSolverMultistepScheduler(
        sigma_min=0.02, sigma_max=80.0, sigma_data=0.5, euler_at_final=True
    )
    x = start() * 80

    def answer(x: Tensor, sigma: float) -> Tensor:
        skip = 0.25 / (sigma**2 + 0.25)
        return (clean(x, sigma) - skip * x) / (sigma * 0.5 / (sigma**2 + 0.25) ** 0.5)

    theirs = by_diffusers(scheduler, x, 12, answer)
    ours = solved(path_of(scheduler.sigmas, is_flow=False), SamplingMethod("dpm2m", 12), x)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_adams_bashforth_integrates_the_line_through_two_slopes() -> None:
    """Over steps of unequal size; the line is integrated by the midpoint, which is exact."""
    sigmas = torch.tensor([5.0, 3.0, 2.5, 0.75], dtype=torch.float64)
    slopes = [torch.full(SHAPE, value, dtype=torch.float64) for value in (1.0, -2.0, 4.0)]
    x = expected = start()
    states = []
    for i in range(3):
        states.append(expected)
        slope = slopes[i]
        if i:
            middle = (sigmas[i] + sigmas[i + 1]) / 2
            rise = (slopes[i] - slopes[i - 1]) / (sigmas[i] - sigmas[i - 1])
            slope = slopes[i] + rise * (middle - sigmas[i])
        expected = expected + slope * (sigmas[i + 1] - sigmas[i])

    def predict(denoise: Denoise, x: Tensor, index: int) -> tuple[Tensor, Tensor]:
        return x.new_zeros(1), states[index] - slopes[index] * sigmas[index]

    path = DiffusionPath((1.0,) * 4, tuple(sigmas.tolist()), predict)
    assert (solved(path, SamplingMethod("ab2", 3), x) - expected).abs().max() < 1e-12


@cache
def solved_in(steps: int, name: str) -> Tensor:
    # Away from both ends, where every solver takes a step of first order.
    sigmas = torch.linspace(0.9, 0.1, steps + 1, dtype=torch.float64)
    return solved(path_of(sigmas), SamplingMethod(name, steps), start())


@pytest.mark.parametrize("name", [each for each in SOLVERS if each != "abm2"])
def test_error_falls_with_the_square_of_the_step(name: str) -> None:
    true = solved_in(4000, "unipc")
    errors = [float((solved_in(steps, name) - true).norm()) for steps in (20, 40, 80)]
    orders = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert min(orders) > 1.7, (errors, orders)


def test_moulton_comes_to_the_samplers_own_steps_with_the_square_of_the_gap() -> None:
    """Not to the differential equation: all steps computed are Euler's, but for rounding."""
    x, sigmas = start(), torch.linspace(0.9, 0.1, 321, dtype=torch.float64)
    for index in range(320):
        x0 = clean(x, float(sigmas[index]))
        x = x + (x - x0) * ((sigmas[index + 1] - sigmas[index]) / sigmas[index])
    errors = [
        float((solved(path_of(sigmas), SamplingMethod("abm2", steps), start()) - x).norm())
        for steps in (20, 40, 80)
    ]
    orders = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert min(orders) > 1.7, (errors, orders)
    assert (solved(path_of(sigmas), SamplingMethod("abm2", 320), start()) - x).abs().max() < 1e-12


def test_moulton_sums_the_line_through_both_slopes() -> None:
    """A slope that is linear in sigma is known after two computed steps, whatever is left out."""
    sigmas = rectified_flow.schedule(24)[:, 0] / 1000
    x = start()

    def predict(denoise: Denoise, x: Tensor, index: int) -> tuple[Tensor, Tensor]:
        level = sigmas[index]
        return x.new_zeros(1), x - (2.0 - 3.0 * level) * level

    path = DiffusionPath(
        tuple((1 - sigmas).tolist()), tuple(sigmas.tolist()), predict, is_flow=True
    )
    expected = x
    for here, then in itertools.pairwise(sigmas):
        expected = expected + (2.0 - 3.0 * here) * (then - here)
    for method in (SamplingMethod("abm2", 3), SamplingMethod("abm2", 5, early_percent=150)):
        assert (solved(path, method, x) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", SOLVERS)
def test_computes_the_named_steps_only(name: str) -> None:
    method, calls = SamplingMethod(name, 5), []
    path = rectified_flow.path(rectified_flow.schedule(20))

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        calls.append(float(t[0]))
        return -x

    steps = list(multistep.sample(denoise, start(), path, method))
    assert len(steps) == 20
    expected = [rectified_flow.schedule(20)[i, 0].item() for i in method.computed_steps(20)]
    assert calls == pytest.approx(expected)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("limit", [None, 1e-6, 1e9])
def test_resumed_equals_unbroken(name: str, limit: float | None) -> None:
    method = SamplingMethod(name, 7, limit=limit)
    path = path_of(rectified_flow.schedule(24)[:, 0] / 1000)
    x = start(dtype=torch.float32)
    whole = list(multistep.sample(lambda x, t: x, x, path, method))
    assert (len({step.x.sum().item() for step in whole}) == 7) == (limit != 1e-6)
    for step in whole[:-1]:
        rest = list(
            multistep.sample(
                lambda x, t: x, step.x, path, method, start=step.index + 1, memory=step.memory
            )
        )
        assert torch.equal(rest[-1].x, whole[-1].x)
        assert [each.note for each in rest] == [each.note for each in whole[step.index + 1 :]]


def test_passing_the_limit_gives_exact_steps() -> None:
    """From the step that passes it, each one is the sampler's own Euler step."""
    timesteps = rectified_flow.schedule(24)
    path = rectified_flow.path(timesteps)
    denoise = lambda x, t: torch.sin(3 * x + t / 100)  # noqa: E731
    method = SamplingMethod("ab2", 8, limit=1e-9)
    steps = list(multistep.sample(denoise, start(), path, method))
    (noted,) = [step for step in steps if step.note]
    assert "all steps from here are exact" in str(noted.note)
    begin = steps[noted.index - 1].x
    *_, exact = rectified_flow.sample(denoise, begin, timesteps, start=noted.index)
    assert (steps[-1].x - exact.x).abs().max() < 1e-12


def test_all_ranks_follow_what_was_agreed() -> None:
    path = path_of(rectified_flow.schedule(24)[:, 0] / 1000)
    method = SamplingMethod("ab2", 8, limit=1e-9)
    asked = []

    def agree(is_over: bool) -> bool:
        asked.append(is_over)
        return False

    steps = list(multistep.sample(lambda x, t: x, start(), path, method, agree=agree))
    assert asked
    assert all(asked)
    assert not any(step.note for step in steps)


def test_all_steps_at_first_order_equal_the_samplers() -> None:
    """Each sampler's path describes the same levels and answers as its own loop."""
    x, method = start(), SamplingMethod("ab2", 2, limit=-1.0)

    def first_order(path: DiffusionPath, denoise: Denoise) -> Tensor:
        y = x
        for i in range(len(path.sigmas) - 1):
            _, x0 = path.predict(denoise, y, i)
            ratio = path.sigmas[i + 1] / path.sigmas[i]
            y = ratio * y + (path.alphas[i + 1] - ratio * path.alphas[i]) * x0
        return y

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        return torch.cos(x + t[0] / 1000)

    assert method.is_solver
    timesteps, rising = rectified_flow.schedule(9, shift=3.0), flow_matching.schedule(9, 5.0)
    karras = euler_karras.schedule(9, 0.02, 80.0)
    for path, steps in (
        (rectified_flow.path(timesteps), rectified_flow.sample(denoise, x, timesteps)),
        (flow_matching.path(rising), flow_matching.sample(denoise, x, rising)),
        (euler_karras.path(karras), euler_karras.sample(denoise, x, karras)),
    ):
        *_, last = steps
        assert (first_order(path, denoise) - last.x).abs().max() < 1e-6


def test_iddpm_path_is_ddim() -> None:
    """The first-order step along its path is DDIM's, without the learned variance."""
    plan = iddpm.schedule(8)
    path = iddpm.path(plan)
    kept = torch.cumprod(1 - plan.betas, dim=0)
    x = start()

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        return torch.cat([torch.sin(x + t[0] / 1000), torch.full_like(x, 7.0)], dim=1)

    t, x0 = path.predict(denoise, x, 0)
    assert t.tolist() == [999.0]
    noise = torch.sin(x + 0.999)
    assert torch.allclose(x0, (x - (1 - kept[-1]).sqrt() * noise) / kept[-1].sqrt())
    assert path.sigmas[-1] == 0
    assert path.alphas[-1] == 1
    assert path.alphas[1] == pytest.approx(float(kept[-2].sqrt()))


def test_given_frames_stay_as_they_are() -> None:
    timesteps = rectified_flow.schedule(12)
    mask = torch.tensor([[0.0, 1.0]])
    seen = []

    def denoise(x: Tensor, t: Tensor, active: Tensor) -> Tensor:
        seen.append(active.tolist())
        return torch.sin(x)

    x = start(dtype=torch.float32)
    path = rectified_flow.path(timesteps, mask)
    for name in SOLVERS:
        *_, last = multistep.sample(denoise, x, path, SamplingMethod(name, 4))
        assert torch.equal(last.x[:, :, 0], x[:, :, 0])
        assert not torch.equal(last.x[:, :, 1], x[:, :, 1])
    assert seen[0] == [[False, True]]
