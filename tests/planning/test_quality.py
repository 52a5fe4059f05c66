"""What a budget leads to: measured methods, exact steps with a note, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everyframe
from everyframe.core.errors import InputError
from everyframe.core.plan import Plan
from everyframe.core.quality import LossyMethod, SamplingMethod
from everyframe.engine.records.recorded_request import request_from
from everyframe.fast_paths.calibrations import Measurement, path_of
from everyframe.planning.quality import size_of
from helpers.calibrations import PROMPT, plant_calibration
from helpers.tiny_checkpoints import inpaint, opensora, stepvideo


def plan(**options: Any) -> Plan:
    return everyframe.plan(PROMPT, **options)


def test_exact_is_the_default_and_says_nothing() -> None:
    resolved = plan()
    assert resolved.quality is None
    assert resolved.settings.method is None
    assert resolved.settings.num_denoiser_calls == 30


def test_without_a_calibration_steps_are_exact_and_the_command_is_named() -> None:
    resolved = plan(quality="33dB", num_inference_steps=29)
    assert resolved.settings.method is None
    assert resolved.quality is not None
    assert resolved.quality.method == "exact"
    assert any("`everyframe calibrate` measures it" in note for note in resolved.notes)


def test_few_steps_are_not_to_be_calibrated() -> None:
    resolved = plan(quality="33dB", num_inference_steps=2)
    assert str(resolved.quality).startswith("33dB: exact (a run of too few steps")


def test_the_fastest_measured_method_is_taken_and_reported() -> None:
    key = plant_calibration()
    bold, mild = plan(quality="32dB"), plan(quality="35dB")
    assert (str(bold.settings.method), str(mild.settings.method)) == ("taylor1@8", "unipc@12")
    assert bold.quality is not None
    assert "35.5 dB at worst" in str(bold.quality)
    assert bold.settings.method is not None
    assert bold.settings.method.limit is not None
    assert bold.settings.num_inference_steps == 30
    denoise = [stage.operations for stage in (plan().stages[1], bold.stages[1])]
    assert denoise[1] == pytest.approx(denoise[0] * 8 / 30)
    assert plan(quality="40dB").settings.method is None
    assert str(plan(quality="32dB", disable="taylor1").settings.method) == "unipc@12"
    path_of(key, size_of(bold.settings)).unlink()


def test_another_size_has_the_smaller_one_s_and_says_so() -> None:
    key = plant_calibration()
    large = plan(quality="32dB", size="128x128", num_frames=34)
    assert str(large.settings.method) == "taylor1@8"
    assert any("not at this size" in note for note in large.notes)
    path_of(key, (17, 64, 64)).unlink()


@pytest.mark.parametrize("other", [{"num_inference_steps": 20}, {"guidance_scale": 3.0}])
def test_other_steps_or_guidance_are_not_measured(other: dict[str, Any]) -> None:
    key = plant_calibration()
    assert plan(quality="32dB", **other).settings.method is None
    path_of(key, (17, 64, 64)).unlink()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quality": "ab2@31"}, "31 of 30 steps can't be computed"),
        ({"quality": "ab2@2", "num_inference_steps": 1}, "a single step is always computed"),
        ({"quality": "ab2@8", "disable": "ab2"}, "ab2 is disabled"),
        ({"quality": "ab2@8g50", "num_devices": 2}, "leave out g50"),
        ({"quality": "ab2@8h", "num_devices": 2}, "leave out h"),
        ({"disable": "ab9"}, "there is no fast path 'ab9'"),
    ],
)
def test_what_can_t_be_done_is_an_error(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        plan(**options)


def test_a_model_without_solvers_says_so(tmp_path: Path) -> None:
    model = inpaint.inpaint(tmp_path / "model")
    video = np.zeros((2, 24, 24, 3), np.uint8)
    given: dict[str, Any] = {
        "model": str(model), "source": video, "mask": "4,4,20,20",
        "control": "canny", "num_inference_steps": 3,
    }  # fmt: skip
    with pytest.raises(InputError, match="can't do ab2 here; it can do taylor1, taylor2"):
        everyframe.plan("a", quality="ab2@2", **given)
    with pytest.raises(InputError, match="works with our own model families"):
        everyframe.plan("a", quality="taylor1@2g50", **given)
    assert everyframe.plan("a", quality="taylor1@2", **given).settings.method is not None
    assert everyframe.plan("a", quality="32dB", **given).settings.method is None


def test_frames_that_are_edited_have_no_lossy_methods(tmp_path: Path) -> None:
    model = opensora.opensora_1_2(tmp_path / "model")
    given: dict[str, Any] = {"model": str(model), "image": np.zeros((16, 16, 3), np.uint8)}
    with pytest.raises(InputError, match="it has no lossy methods"):
        everyframe.plan("a", quality="taylor1@2", size="16x16", edit_strength=0.5, **given)


def test_a_distilled_model_has_no_number(tmp_path: Path) -> None:
    model = stepvideo.stepvideo(tmp_path / "stepvideo-turbo")
    resolved = everyframe.plan("a", model=str(model), size="16x16", num_frames=1, quality="32dB")
    assert resolved.settings.method is None
    assert resolved.quality is not None
    assert resolved.quality.worst_db is None
    assert any("a distilled model" in note for note in resolved.notes)


def test_a_recorded_method_comes_before_the_budget() -> None:
    method = SamplingMethod("ab2", 9, limit=0.5)
    resolved = plan(quality="32dB", method=LossyMethod(method))
    assert resolved.settings.method == method
    assert resolved.quality is not None
    assert resolved.quality.why == "as recorded"


def test_exact_steps_of_a_budget_are_recorded_too() -> None:
    """A calibration that is made after a video is no reason to make it otherwise."""
    asked = {"num_inference_steps": 6, "seed": 3, "quality": "32dB"}
    first = everyframe.generate(PROMPT, **asked)
    assert first.record["plan"]["quality"]["method"] == "exact"
    key = plant_calibration({"taylor1@4": Measurement(50.0, 0.01, 1.5)}, num_inference_steps=6)
    resolved = plan(**asked)
    assert str(resolved.settings.method) == "taylor1@4"
    again = everyframe.plan(request_from(first.record, {}))
    assert again.settings.method is None
    assert str(again.quality) == "32dB: exact (as recorded)"
    anew = everyframe.plan(request_from(first.record, {"quality": "33dB"}))
    assert str(anew.settings.method) == "taylor1@4"
    path_of(key, size_of(resolved.settings)).unlink()
