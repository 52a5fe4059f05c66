"""`abm2` in diffusers pipelines: against the families' solver, and against the exact run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import everyframe
from everyframe.core.errors import InputError
from everyframe.core.events import ErrorEstimated, Event
from everyframe.core.quality import SamplingMethod, parse_method
from everyframe.diffusers_pipelines.calls.step_tracking import StepTracker
from everyframe.diffusers_pipelines.lossy.answer_prediction import PredictedAnswers
from everyframe.diffusers_pipelines.lossy.call_budget import CallBudget
from everyframe.diffusers_pipelines.lossy.euler_correction import CorrectedAnswers, why_no_euler
from everyframe.engine.calibration_methods import candidates
from everyframe.planning.resolve import prepare
from everyframe.samplers import multistep
from everyframe.samplers.base import Denoise
from everyframe.samplers.multistep import DiffusionPath
from helpers.diagonals import diagonal
from helpers.resumed_pipelines import check_resumed_equals_unbroken
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

STEPS = 12
SHAPE = (1, 3, 2, 4, 4)
GUIDANCE = 3.0
ASKED: dict[str, Any] = {
    "prompt": "a red circle", "seed": 1, "num_inference_steps": STEPS, "guidance_scale": GUIDANCE,
    "output": "float", **tiny_pipelines.CALLS["ltx"],
}  # fmt: skip


class Velocity(nn.Module):
    """A smooth velocity in closed form; `shift` stands for the prompt."""

    def forward(self, x: Tensor, timestep: Tensor, shift: Tensor) -> tuple[Tensor]:
        s = timestep.double().reshape(-1, *[1] * (x.ndim - 1)) / 1000
        shift = shift.reshape(-1, *[1] * (x.ndim - 1))
        return (torch.sin(0.7 * x + 2 * s + shift) + 0.3 * x * torch.cos(3 * s),)


def scheduler_of(**config: Any) -> Any:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **config})
    scheduler.set_timesteps(STEPS)
    scheduler.sigmas = scheduler.sigmas.double()
    return scheduler


def start() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def guided(both: tuple[Tensor, Tensor]) -> Tensor:
    return both[0] + GUIDANCE * (both[1] - both[0])


def branches(module: nn.Module, x: Tensor, t: Tensor, is_batch: bool) -> tuple[Tensor, Tensor]:
    """Answers without and with the prompt, by one call or by two."""
    shifts = torch.tensor([0.0, 0.4], dtype=torch.float64)
    if is_batch:
        two = module(torch.cat([x, x]), t.expand(2), shifts)[0]
        return two[:1], two[1:]
    one, other = (module(x, t.expand(1), shift)[0] for shift in shifts)
    return one, other


def by_pipeline(
    method: SamplingMethod, scheduler: Any, *, is_batch: bool = False, begin: int = 0
) -> tuple[Tensor, list[Event], int]:
    """A pipeline's loop in float64: latents, events and the number of computed calls."""
    module, events, x = Velocity(), list[Event](), start()
    calls: list[int] = []
    if begin:
        scheduler.set_begin_index(begin)
    watch = StepTracker({"transformer": module}, [], scheduler, STEPS, lambda *_: None)
    budget = CallBudget(method, STEPS - begin, bool, 1, events.append)
    made: PredictedAnswers = (
        CorrectedAnswers({"transformer": module}, watch, method, budget, scheduler)
        if method.name == "abm2"
        else PredictedAnswers({"transformer": module}, watch, method, budget)
    )
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    with watch, made:
        for t in scheduler.timesteps[begin:]:
            answer = guided(branches(module, x, t, is_batch))
            # It rounds the sample to float32, so that it gets none: its step is added to ours.
            x = x + scheduler.step(answer, t, torch.zeros_like(x)).prev_sample
    handle.remove()
    return x, events, len(calls)


def by_family(method: SamplingMethod, sigmas: Tensor) -> Tensor:
    """The families' own solver along the same levels; rising ones are Mochi's."""
    levels = tuple(sigmas.tolist())
    is_rising = levels[0] < levels[-1]
    taus = tuple(1 - s for s in levels) if is_rising else levels

    def predict(denoise: Denoise, x: Tensor, index: int) -> tuple[Tensor, Tensor]:
        t = torch.tensor([levels[index] * 1000], dtype=torch.float32)
        slope = guided(branches(Velocity(), x, t, False)) * (-1 if is_rising else 1)
        return t, x - taus[index] * slope

    path = DiffusionPath(tuple(1 - tau for tau in taus), taus, predict, is_flow=True)
    *_, last = multistep.sample(lambda x, t: x, start(), path, method)
    return last.x


def named(text: str) -> SamplingMethod:
    found = parse_method(text).sampling
    assert found is not None
    return found


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("name", ["abm2@2", "abm2@4", "abm2@5w3", "abm2@6e130", "abm2@11"])
def test_it_lands_where_the_families_solver_lands(name: str, is_batch: bool) -> None:
    method, scheduler = named(name), scheduler_of()
    found, events, calls = by_pipeline(method, scheduler, is_batch=is_batch)
    expected = by_family(method, scheduler.sigmas)
    # Rounding of float64, which twelve steps with guidance enlarge.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert calls == method.num_computed * (1 if is_batch else 2)
    (estimate,) = events
    assert isinstance(estimate, ErrorEstimated)
    taylor, *_ = by_pipeline(named(f"taylor1{name[4:]}"), scheduler_of(), is_batch=is_batch)
    assert (taylor - expected).abs().max() > 1e-4, "a run without the corrector is another one"


@pytest.mark.parametrize("config", [{"shift_terminal": 0.1}, {"invert_sigmas": True}])
def test_other_schedules_of_the_same_scheduler(config: dict[str, Any]) -> None:
    method, scheduler = named("abm2@5"), scheduler_of(**config)
    found, *_ = by_pipeline(method, scheduler)
    expected = by_family(method, scheduler.sigmas)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_it_comes_closer_to_the_exact_run_than_predicted_answers() -> None:
    exact, *_ = by_pipeline(named(f"taylor1@{STEPS}"), scheduler_of())
    for computed in ("4", "6", "8"):
        errors = {
            name: float((by_pipeline(named(name + computed), scheduler_of())[0] - exact).norm())
            for name in ("abm2@", "taylor1@")
        }
        assert 0 < errors["abm2@"] < errors["taylor1@"], computed


def test_a_schedule_that_begins_later() -> None:
    method, scheduler = named("abm2@4"), scheduler_of()
    found, *_ = by_pipeline(method, scheduler, begin=3)
    expected = by_family(method, scheduler_of().sigmas[3:])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_all_steps_computed_are_the_exact_bits() -> None:
    found, *_ = by_pipeline(named(f"abm2@{STEPS}"), scheduler_of())
    x, scheduler = start(), scheduler_of()
    for t in scheduler.timesteps:
        step = scheduler.step(guided(branches(Velocity(), x, t, False)), t, torch.zeros_like(x))
        x = x + step.prev_sample
    assert torch.equal(found, x)


def test_a_spent_budget_computes_the_rest_without_corrections() -> None:
    method = SamplingMethod("abm2", 4, limit=1e-9)
    found, events, calls = by_pipeline(method, scheduler_of())
    # Two answers give the first estimate at the third computed step, which is the sixth.
    assert calls == 2 * (2 + STEPS - 6)
    assert len(events) == 2
    torch.testing.assert_close(found, by_family(method, scheduler_of().sigmas), rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def folder(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("ltx")


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def frames(pipe: Any, **more: Any) -> Any:
    return everyframe.run(pipe, **{**ASKED, **more}).frames


def smooth(pipe: Any) -> Any:
    """The pipeline with a velocity in closed form, since random weights are not smooth."""
    pipe = copy.deepcopy(pipe)

    def forward(
        hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **_: Any
    ) -> tuple[Tensor]:
        shift = encoder_hidden_states.double().mean(dim=(1, 2))
        return (Velocity()(hidden_states, timestep, shift)[0].float(),)

    pipe.transformer.forward = forward
    return pipe


def test_a_pipeline_comes_closer_than_by_predicted_answers(pipe: Any) -> None:
    """With crowded steps. Evenly spaced ones of LTX's uneven schedule are not always closer."""
    pipe = smooth(pipe)
    exact = frames(pipe)
    for places in ("6e130", "8e130", "10e130"):
        errors = {
            name: float(np.square(frames(pipe, quality=f"{name}@{places}") - exact).mean())
            for name in ("abm2", "taylor1")
        }
        assert 0 < errors["abm2"] < errors["taylor1"], places


def test_all_steps_computed_are_a_pipelines_exact_bits(pipe: Any) -> None:
    np.testing.assert_array_equal(frames(pipe, quality=f"abm2@{STEPS}"), frames(pipe))


def test_the_pipeline_in_files_gives_the_same(pipe: Any, folder: Path) -> None:
    found = everyframe.generate(**ASKED, model=str(folder), quality="abm2@5").frames
    np.testing.assert_allclose(found, frames(pipe, quality="abm2@5"), atol=1e-5)


def test_nothing_is_left_over_for_the_next_video(pipe: Any) -> None:
    two = everyframe.run(pipe, **{**ASKED, "num_videos": 2, "quality": "abm2@4"})
    for seed, video in zip((1, 2), two, strict=True):
        np.testing.assert_array_equal(video.frames, frames(pipe, seed=seed, quality="abm2@4"))


@pytest.mark.parametrize(("after", "limit"), diagonal([1, 5, 8], [1e-9, None]))
def test_resumed_equals_unbroken(
    pipe: Any, after: int, limit: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))
    method = SamplingMethod("abm2", 4, limit=limit)
    check_resumed_equals_unbroken(pipe, ASKED, method, after)


def test_it_is_what_calibrate_measures(folder: Path) -> None:
    request = everyframe.Request(
        **{**{k: v for k, v in ASKED.items() if k != "output"}, "model": str(folder)}
    )
    prepared = prepare(request)
    found = candidates(request, prepared.model, prepared.plan.settings)
    sampling = [each.sampling for each in found if each.sampling is not None]
    assert {each.name for each in sampling} == {"abm2"}
    assert not any(each.has_partial_guidance for each in sampling)
    assert {each.early_percent for each in sampling} == {100, 130}


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [("wan", "UniPCMultistepScheduler"), ("animatediff", "DDIMScheduler")],
)
def test_other_schedulers_are_refused_by_name(name: str, scheduler: str, tmp_path: Path) -> None:
    getattr(tiny_pipelines, name)(tmp_path / name)
    says = f"its scheduler, {scheduler}, takes no plain Euler steps; it can do taylor1"
    with pytest.raises(InputError, match=says):
        everyframe.plan(
            "a fox", model=str(tmp_path / name), quality="abm2@3", num_inference_steps=8,
            **tiny_pipelines.CALLS[name],
        )  # fmt: skip


def test_a_scheduler_that_draws_noise_is_refused(folder: Path) -> None:
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    with pytest.raises(InputError, match=r"draws noise in each step \(stochastic_sampling\); it"):
        frames(pipe, quality="abm2@4")


def test_answers_that_are_no_velocities_are_refused() -> None:
    euler = "FlowMatchEulerDiscreteScheduler"
    assert why_no_euler(euler, {}, ["LTXVideoTransformer3DModel"]) is None
    says = why_no_euler(euler, {}, ["CosmosTransformer3DModel"])
    assert says == "the answers of its CosmosTransformer3DModel are no velocities"


def test_a_distilled_scheduler_in_files_is_seen(folder: Path, tmp_path: Path) -> None:
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.scheduler = diffusers.FlowMatchLCMScheduler()
    pipe.save_pretrained(tmp_path / "lcm")
    resolved = everyframe.plan(
        "a fox", model=str(tmp_path / "lcm"), quality="32dB", num_inference_steps=4,
        **tiny_pipelines.CALLS["ltx"],
    )  # fmt: skip
    assert resolved.settings.method is None
    assert any("a distilled model" in note for note in resolved.notes)


def test_a_stochastic_scheduler_in_files_is_refused(folder: Path, tmp_path: Path) -> None:
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    pipe.save_pretrained(tmp_path / "noisy")
    with pytest.raises(InputError, match=r"draws noise in each step \(stochastic_sampling\); it"):
        everyframe.plan(
            "a fox", model=str(tmp_path / "noisy"), quality="abm2@3", num_inference_steps=8,
            **tiny_pipelines.CALLS["ltx"],
        )  # fmt: skip
