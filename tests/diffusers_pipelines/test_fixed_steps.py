"""Pipelines whose number of steps nobody gives: their config, or their sigmas, say how many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import everyframe
from everyframe.planning.resolve import prepare
from helpers.tiny_checkpoints.diffusers import CASES

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
