"""Predicted answers in a diffusers pipeline: Wan by its own call, against extrapolation by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import everyframe
from everyframe.core.errors import EveryframeWarning, InputError
from everyframe.core.events import ErrorEstimated, Event, Step
from everyframe.core.quality import LossyMethod, SamplingMethod
from helpers.diagonals import diagonal
from helpers.resumed_pipelines import check_resumed_equals_unbroken
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

STEPS = 8
ASKED: dict[str, Any] = {
    "prompt": "a red circle", "seed": 1, "num_inference_steps": STEPS, "guidance_scale": 5.0,
    "output": "float", **tiny_pipelines.CALLS["wan"],
}  # fmt: skip
METHOD = SamplingMethod("taylor1", 4)


@pytest.fixture(scope="module")
def folder(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("wan")


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def frames(pipe: Any, **more: Any) -> Any:
    return everyframe.run(pipe, **{**ASKED, **more}).frames


def by_hand(pipe: Any, computed: tuple[int, ...]) -> Any:
    """The same with experts that extrapolate by themselves, each branch apart."""
    pipe, calls = copy.deepcopy(pipe), []

    def extrapolated(own: Any) -> Any:
        known: tuple[list[Any], list[Any]] = ([], [])

        def forward(*args: Any, **kwargs: Any) -> Any:
            step, branch = divmod(len(calls), 2)
            calls.append(step)
            t, seen = float(kwargs["timestep"].flatten()[0]), known[branch]
            if step in computed or not seen:  # the second expert begins in the middle
                answer = own(*args, **kwargs)
                seen.append((t, answer[0]))
                return answer
            if len(seen) == 1:
                return (seen[0][1],)
            (t0, a0), (t1, a1) = seen[-2:]
            return (a1 + (a1 - a0) * ((t - t1) / (t1 - t0)),)

        return forward

    for module in (pipe.transformer, pipe.transformer_2):
        module.forward = extrapolated(module.forward)
    return frames(pipe)


def test_it_is_the_extrapolation_by_hand(pipe: Any) -> None:
    computed = METHOD.computed_steps(STEPS)
    expected = by_hand(pipe, computed)
    found = frames(pipe, quality=str(METHOD))
    # Sums in another order, which steps of random weights and guidance 5 enlarge.
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - expected).mean() < 2e-6
    assert np.abs(found - frames(pipe)).max() > 1e-4, "not the exact video"


def test_skipped_steps_do_not_call_the_model(pipe: Any) -> None:
    calls: list[int] = []
    experts = (pipe.transformer, pipe.transformer_2)
    handles = [each.blocks[0].register_forward_hook(lambda *_: calls.append(1)) for each in experts]
    events: list[Event] = []
    frames(pipe, quality=str(METHOD), on_event=events.append)
    for handle in handles:
        handle.remove()
    # With and without the prompt; the second expert begins at a step that is not one of them.
    assert len(calls) == 2 * (METHOD.num_computed + 1)
    assert [e.step for e in events if isinstance(e, Step)] == list(range(1, STEPS + 1))
    (estimate,) = [e for e in events if isinstance(e, ErrorEstimated)]
    assert estimate.error > 0
    assert not estimate.is_over


def test_all_steps_computed_is_exact(pipe: Any) -> None:
    np.testing.assert_array_equal(frames(pipe, quality=f"taylor2@{STEPS}"), frames(pipe))


def test_nothing_is_left_over_for_the_next_video(pipe: Any) -> None:
    quality = str(METHOD)
    two = everyframe.run(pipe, **{**ASKED, "num_videos": 2, "quality": quality})
    for seed, video in zip((1, 2), two, strict=True):
        np.testing.assert_array_equal(video.frames, frames(pipe, seed=seed, quality=quality))
    np.testing.assert_array_equal(frames(pipe), frames(pipe))


def test_the_pipeline_in_files_gives_the_same(pipe: Any, folder: Path) -> None:
    asked = {**ASKED, "model": str(folder), "quality": str(METHOD)}
    found = everyframe.generate(**asked).frames
    np.testing.assert_allclose(found, frames(pipe, quality=str(METHOD)), atol=1e-5)


@pytest.mark.parametrize(("after", "limit"), diagonal([1, 4, 6], [1e-9, None]))
def test_resumed_equals_unbroken(
    pipe: Any, after: int, limit: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))
    method = SamplingMethod("taylor2", 4, limit=limit)
    check_resumed_equals_unbroken(pipe, ASKED, method, after)


def test_solvers_are_refused_by_name(pipe: Any) -> None:
    with pytest.raises(InputError, match="can't do ab2 here; it can do taylor1, taylor2"):
        frames(pipe, quality="ab2@4")


def test_a_distilled_scheduler_has_no_number(pipe: Any) -> None:
    pipe = copy.deepcopy(pipe)
    pipe.scheduler = diffusers.FlowMatchLCMScheduler()
    with pytest.warns(EveryframeWarning, match="a distilled model"):
        everyframe.run(pipe, **{**ASKED, "num_inference_steps": 4, "quality": "32dB"})


@pytest.mark.slow
def test_two_ranks_give_one_rank_s_video(folder: Path) -> None:
    method = LossyMethod(SamplingMethod("taylor1", 4, limit=1e9))
    asked = {**ASKED, "model": str(folder), "method": method}
    one = everyframe.generate(**asked).frames
    two = everyframe.generate(**asked, devices="cpu,cpu", parallel="sequence=2").frames
    np.testing.assert_allclose(two, one, atol=1e-4)


@pytest.mark.slow
def test_split_branches_are_exact_and_noted(folder: Path) -> None:
    asked = {**ASKED, "model": str(folder)}
    with pytest.warns(EveryframeWarning, match="guidance branches are on different devices"):
        two = everyframe.generate(
            **asked, quality=str(METHOD), devices="cpu,cpu", parallel="cfg=2"
        ).frames
    np.testing.assert_allclose(two, everyframe.generate(**asked).frames, atol=1e-4)


def test_a_prediction_that_is_not_finite_is_computed() -> None:
    from everyframe.samplers.prediction import AnswerHistory

    history = AnswerHistory(METHOD)
    history.add(2.0, torch.full((1,), 3e38))
    history.add(1.0, torch.full((1,), -3e38))
    assert not torch.isfinite(history.predict(0.0)).all(), "what the pipeline's context looks for"
