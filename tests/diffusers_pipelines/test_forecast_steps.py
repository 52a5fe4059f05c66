"""Steps that a plan forecasts are those that the pipeline computes, whoever says how many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import everyframe
from everyframe.planning.resolve import prepare
from helpers.tiny_checkpoints.diffusers import CASES
from helpers.tiny_checkpoints.diffusers.cases import written

ASKED: dict[str, Any] = {"prompt": "a fox", "num_frames": 5}
WORDS: dict[str, Any] = CASES["Cosmos3DistilledModularPipeline"].asked["option"]


def planned(folder: Path, **asked: Any) -> Any:
    return prepare(everyframe.Request(model=str(folder), seed=3, **asked), profile="cuda-sm75")


def test_a_distilled_pipeline_has_the_steps_of_its_config(tmp_path: Path) -> None:
    """It refuses any other number, also in a dry run."""
    pipe = CASES["Cosmos3DistilledModularPipeline"].build()
    pipe.set_progress_bar_config(disable=True)
    given = {**ASKED, "height": 16, "width": 16, **WORDS}
    generator = torch.Generator().manual_seed(3)
    wanted = pipe(**given, generator=generator, output_type="np", output="videos")
    video = everyframe.run(pipe, **given, seed=3, output="float")
    assert isinstance(video, everyframe.Video)
    np.testing.assert_array_equal(video.frames, wanted)
    pipe.save_pretrained(str(tmp_path), overwrite_modular_index=True)
    plan = planned(tmp_path, **ASKED, size="16x16", option=WORDS).plan
    assert plan.settings.num_inference_steps == 3
    assert not [note for note in plan.notes if "no dry run can follow" in note]


def test_steps_that_are_all_run_dry_are_forecast_once(tmp_path: Path) -> None:
    """Fifty times as many were forecast of the eight that its sigmas give."""
    case = CASES["LTX2DFRPipeline"]
    case.build().save_pretrained(tmp_path)
    prepared = planned(tmp_path, **ASKED, size="32x32", option=case.asked["option"])
    assert prepared.plan.settings.num_inference_steps == 8
    model: Any = prepared.model
    calls = model.dry_run_calls(prepared.plan.settings)
    assert [each.num_calls for each in calls if each.denoises] == [1]
    (stage,) = [each for each in prepared.plan.stages if each.component == "transformer"]
    fewer = {**case.asked["option"], "sigmas": [1.0, 0.5]}
    short = planned(tmp_path, **ASKED, size="32x32", option=fewer).plan
    assert short.settings.num_inference_steps == 2
    (least,) = [each for each in short.stages if each.component == "transformer"]
    assert stage.operations == 4 * least.operations


@pytest.mark.parametrize(
    ("name", "schedule", "num_steps"),
    [
        ("HunyuanVideoPipeline", {"sigmas": [1.0, 0.7, 0.4, 0.1]}, 4),
        pytest.param("EasyAnimatePipeline", {"timesteps": [999, 500]}, 2, marks=pytest.mark.slow),
        pytest.param("LTX2Pipeline", {"sigmas": [1.0, 0.4, 0.0]}, 3, marks=pytest.mark.slow),
    ],
)
def test_a_given_schedule_says_how_many_steps_there_are(
    tmp_path: Path, name: str, schedule: dict[str, list[float]], num_steps: int
) -> None:
    """50 were planned, and the work of 50 times as many as there are was forecast."""
    case = CASES[name]
    pipe = case.build()
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(tmp_path)
    option = dict(case.asked.get("option", {}))
    asked = {"prompt": "a fox", **{k: v for k, v in case.asked.items() if k != "option"}}

    def forecast(given: dict[str, Any], **more: Any) -> Any:
        return planned(tmp_path, **asked, option=given, **more).plan

    counted = forecast(option, num_inference_steps=num_steps)
    for plan in (
        forecast({**option, **schedule}),
        forecast({**option, **schedule}, num_inference_steps=num_steps),
    ):
        assert plan.settings.num_inference_steps == num_steps
        assert [each.operations for each in plan.stages] == [
            each.operations for each in counted.stages
        ]
    # The pipeline has its own number of steps, as where diffusers is called with a schedule alone.
    assert "num_inference_steps" in forecast({**option, **schedule}).settings.own_choices


def test_a_share_of_the_steps_is_forecast_as_diffusers_rounds_it(tmp_path: Path) -> None:
    """Of 50 with a strength of 0.8 it computes 40; 25 were forecast."""
    case = CASES["CogVideoXVideoToVideoPipeline"]
    case.build().save_pretrained(tmp_path / "model")
    option = written(case.asked["option"], tmp_path, 16, 16)
    for strength, wanted in ((0.8, 40), (0.3, 15), (1.0, 50)):
        given = {**option, "strength": strength}
        prepared = planned(
            tmp_path / "model", prompt="a fox", size="16x16", num_inference_steps=50, option=given
        )
        model: Any = prepared.model
        calls = model.dry_run_calls(prepared.plan.settings)
        assert [each.num_calls for each in calls if each.denoises] == [wanted]


def test_a_schedule_that_computes_nothing_in_one_step_is_run_dry_with_two(tmp_path: Path) -> None:
    """No work of the transformer was forecast, and no memory."""
    case = CASES["LTXI2VLongMultiPromptPipeline"]
    case.build().save_pretrained(tmp_path / "model")
    asked = written(dict(case.asked), tmp_path, 32, 32)
    plan = planned(tmp_path / "model", prompt="a fox", num_inference_steps=4, **asked).plan
    assert [each for each in plan.stages if each.component == "transformer" and each.operations]


@pytest.mark.parametrize(
    ("name", "kind", "wanted", "plain"),
    [
        ("AnimateDiffPipeline", "HeunDiscrete", 19, 10),
        pytest.param("AnimateDiffPipeline", "KDPM2Discrete", 19, 10, marks=pytest.mark.slow),
        pytest.param("AnimateDiffPipeline", "PNDM", 11, 10, marks=pytest.mark.slow),
        pytest.param(
            "AnimateDiffPipeline", "EulerAncestralDiscrete", 10, 10, marks=pytest.mark.slow
        ),
        pytest.param(
            "AnimateDiffVideoToVideoPipeline", "HeunDiscrete", 15, 8, marks=pytest.mark.slow
        ),
        pytest.param("AnimateDiffVideoToVideoPipeline", "PNDM", 9, 8, marks=pytest.mark.slow),
        ("AnimateDiffVideoToVideoPipeline", "PNDM with Runge-Kutta steps", 17, 8),
        pytest.param(
            "AnimateDiffPipeline", "PNDM with Runge-Kutta steps", 19, 10, marks=pytest.mark.slow
        ),
        ("WanPipeline", "FlowMatchHeunDiscrete", 19, 10),
    ],
)
def test_schedules_of_more_calls_than_steps_are_forecast_by_their_calls(
    tmp_path: Path, name: str, kind: str, wanted: int, plain: int
) -> None:
    """About half of Heun's were forecast. `plain` are those of the pipeline's own scheduler."""
    case = CASES[name]
    pipe = case.build()

    def operations() -> float:
        pipe.save_pretrained(tmp_path / "model")
        asked = written({**case.asked, "prompt": "a fox"}, tmp_path, 16, 16)
        plan = planned(tmp_path / "model", num_inference_steps=10, **asked).plan
        (stage,) = [each for each in plan.stages if each.component in ("unet", "transformer")]
        return stage.operations

    least = operations() / plain
    # What replaces PNDM carries its config along.
    kind, _, has_runge_kutta = kind.partition(" ")
    pndm = diffusers.PNDMScheduler.from_config(
        pipe.scheduler.config, skip_prk_steps=not has_runge_kutta
    )
    pipe.scheduler = getattr(diffusers, f"{kind}Scheduler").from_config(pndm.config)
    assert round(operations() / least, 6) == wanted
