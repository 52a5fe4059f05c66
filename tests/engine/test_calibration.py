"""Calibration end to end on the embedded model, with few steps: measured, saved, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everyframe
from everyframe.checkpoints.shapes_prompts import Scene, read_prompt
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.core.errors import InputError
from everyframe.core.events import ErrorEstimated, Event, Step
from everyframe.core.quality import LossyMethod, SamplingMethod, parse_method
from everyframe.core.request import Request
from everyframe.engine import calibration
from everyframe.engine.calibration import calibrate, calibration_of, report, shapes_prompts
from everyframe.engine.calibration_methods import USUAL, candidates
from everyframe.fast_paths.calibrations import LEAST_VIDEOS, Calibration
from everyframe.numerics.psnr import frame_psnr
from everyframe.planning.resolve import prepare
from helpers.interrupted_runs import PICTURE
from helpers.loras import files as lora_files
from helpers.loras.files import as_lora, factors_for
from helpers.tiny_checkpoints import svd as tiny_svd

REQUEST = Request(num_inference_steps=4)


def done(**more: Any) -> list[Calibration]:
    options = {"num_videos": LEAST_VIDEOS, "methods": ["taylor1@3", "ab2@2"], "lowest_db": 1.0}
    return [each.calibration for each in calibrate(REQUEST, **{**options, **more})]


@pytest.mark.slow
def test_it_measures_goes_on_and_is_used_by_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    videos = []
    made = calibration._make
    monkeypatch.setattr(calibration, "_make", lambda each: (videos.append(each), made(each))[1])
    steps = calibrate(REQUEST, num_videos=LEAST_VIDEOS, methods=["taylor1@3"], lowest_db=1.0)
    for _ in range(3):
        next(steps)
    steps.close()  # as an interrupt does
    assert len(videos) == 6

    whole = done(methods=["taylor1@3"])[-1]
    assert len(videos) == 2 * LEAST_VIDEOS, "what was measured is not made again"
    assert whole.is_whole("taylor1@3")
    prompt, seed = whole.videos[4]
    exact, lossy = (
        everyframe.generate(
            prompt, seed=seed, num_inference_steps=4, output="float", quality=quality
        ).frames
        for quality in ("exact", "taylor1@3")
    )
    measured = whole.measured["taylor1@3"][4]
    assert measured.psnr_db == pytest.approx(frame_psnr(lossy, exact).min(), abs=1e-3)
    assert measured.estimate is not None

    more = done()[-1]
    assert more.is_whole("ab2@2")
    assert done() == [], "nothing is left to do"
    budget = f"{max(20.0, more.worst_db('taylor1@3') - 4):.1f}dB"
    if more.worst_db("taylor1@3") >= 23.5:
        resolved = everyframe.plan(prompt, num_inference_steps=4, quality=budget)
        assert resolved.quality is not None
        assert resolved.quality.num_videos == LEAST_VIDEOS
    assert any("dB" in line for line in report(more, [20.0]))


def test_a_method_below_the_lowest_budget_ends_with_its_bolder_ones() -> None:
    request = Request(num_inference_steps=6)
    methods = ["taylor1@4", "taylor1@3", "taylor1@2"]
    steps = calibrate(request, num_videos=LEAST_VIDEOS, methods=methods, lowest_db=99.0)
    first = next(steps).calibration
    steps.close()
    assert {*first.measured} == {"taylor1@4"}, "after the mildest fell the others are not made"


def test_candidates_are_from_mild_to_bold() -> None:
    prepared = prepare(Request(prompt="a red circle moves right"))
    found = candidates(Request(), prepared.model, prepared.plan.settings)
    counts = [each.num_computed for each in found]
    assert counts == sorted(counts, reverse=True)
    solvers, predictors = USUAL
    assert {name for each in found for name in each.names} == {*solvers}
    assert {str(each) for each in found if each.num_computed == 8} == {
        "abm2@8", "abm2@8g50", "abm2@8e130", "abm2@8e130g50", "abm2@8e130g33",
        "abm2@8e130h",
    }  # fmt: skip
    disabled = Request(disable=("abm2",))
    left = candidates(disabled, prepared.model, prepared.plan.settings)
    assert {name for each in left for name in each.names} == {*predictors}
    only = candidates(Request(), prepared.model, prepared.plan.settings, ["dpm2m@9"])
    assert only == (LossyMethod(SamplingMethod("dpm2m", 9)),)


def test_a_unets_cache_is_a_candidate_beside_the_solver(tmp_path: Path) -> None:
    request = Request(model=str(tiny_svd.svd(tmp_path / "svd")), image=PICTURE, size="32x32")
    prepared = prepare(request)
    found = {str(each) for each in candidates(request, prepared.model, prepared.plan.settings)}
    assert {"abm2@10", "deepcache@10", "deepcache@10g50"} <= found
    request = Request(**{**request.given(), "disable": ("deepcache",)})
    left = candidates(request, prepared.model, prepared.plan.settings)
    assert {name for each in left for name in each.names} == {"abm2"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_videos": 14}, "must be 15 to 1000, got 14"),
        ({"num_videos": 10**11}, "must be 15 to 1000"),
        ({"methods": ["ab9"]}, "can't do ab9; it can do"),
        ({"methods": "ab2"}, "methods must be a list of texts, got 'ab2'"),
        ({"prompts": "a dog"}, "prompts must be a list of texts, got 'a dog'"),
        ({"request": "a dog"}, "calibrate takes a request, got 'a dog'"),
        ({"request": Request(num_devices=2)}, "works on one device"),
        ({"request": Request(num_inference_steps=2), "methods": ()}, "2 steps are too few"),
    ],
)
def test_wrong_options_are_errors(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        next(calibrate(options.pop("request", REQUEST), **options))


def test_a_lora_has_a_calibration_of_its_own(tmp_path: Path) -> None:
    weights = prepare(Request(prompt="a red circle moves right")).model.weight_files()
    opened = open_checkpoint(Path(next(each for each in weights if "shapes/model" in each)))
    state = {name: opened.load(name) for name in opened}
    factors = factors_for(state, lora_files.matrices(state, "blocks"), alpha=0.6, seed=0)
    lora = lora_files.write(tmp_path / "style.safetensors", as_lora(factors))
    with_lora = calibration_of(Request(num_inference_steps=4, loras=[str(lora)]))
    assert with_lora.key != calibration_of(REQUEST).key


def test_prompts_of_the_embedded_model_can_be_drawn_and_differ() -> None:
    prompts = shapes_prompts(32)
    assert len({*prompts}) == 32
    assert all(isinstance(read_prompt(each), Scene) for each in prompts)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(SamplingMethod("unipc", 6, 1, 50), marks=pytest.mark.slow),
        SamplingMethod("abm2", 6, 1, 100, 130, holds_guidance=True),
    ],
)
def test_a_lossy_run_is_repeated_by_its_record(method: SamplingMethod) -> None:
    first = everyframe.generate("a red circle moves right", seed=3, quality=str(method))
    again = everyframe.generate(from_record=first)
    np.testing.assert_array_equal(first.frames, again.frames)
    exact = everyframe.generate(from_record=first, quality="exact")
    assert not np.array_equal(exact.frames, first.frames)
    named = parse_method(str(first.record["plan"]["quality"]["method"]))
    assert named.sampling == method


def test_a_run_over_its_limit_notes_it_and_computes_the_rest() -> None:
    method = SamplingMethod("taylor1", 5, limit=1e-6)
    asked: dict[str, Any] = {"prompt": "a red circle moves right", "seed": 3}
    events: list[Event] = []
    with pytest.warns(everyframe.EveryframeWarning, match="all steps from here are exact"):
        video = everyframe.generate(**asked, method=LossyMethod(method), on_event=events.append)
    assert any("calibrated limit" in note for note in video.record["notes"])
    (estimate,) = [each for each in events if isinstance(each, ErrorEstimated)]
    assert estimate.is_over
    assert estimate.error > method.limit
    loose = everyframe.generate(**asked, quality="taylor1@5").frames
    assert not np.array_equal(video.frames, loose)
    steps = [each.seconds for each in events if isinstance(each, Step) and each.stage == "denoise"]
    assert np.median(steps[13:]) > 3 * np.median(steps[7:12]), "computed, and not predicted"
