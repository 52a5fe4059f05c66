"""Products in eight bits as a part of quality: named, chosen by a budget, recorded, resumed.

torchao's products are planted as float32 ones of rounded rows, which every machine computes, but
for one test; `diffusers_pipelines/test_quantized_products.py` has more with torchao's own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everyframe
from everyframe.core.errors import InputError, MissingPackageError
from everyframe.core.events import RunSaved, Step
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine.resumption import resume
from everyframe.engine.resumption.replan import replan_for_devices
from everyframe.fast_paths.calibrations import Measurement
from everyframe.fast_paths.registry import DISABLE_VARIABLES
from everyframe.planning.resolve import prepare
from helpers.calibrations import plant_calibration
from helpers.interrupted_runs import OPEN_SORA, begun, same, stop_before
from helpers.planted_products import KIND, certify_as, multiply_here

pytestmark = pytest.mark.usefixtures("own_cache")

SAMPLING = "abm2@4"
BOTH = f"{SAMPLING}+{KIND}"
ALONE = f"exact+{KIND}"
#: As of a device on which each loss is faster, and both together the fastest.
MEASURED = {
    SAMPLING: Measurement(40.0, 9.0, 1.9),
    ALONE: Measurement(43.0, None, 1.4),
    BOTH: Measurement(38.0, 9.0, 2.6),
}


@pytest.fixture(scope="module")
def model(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("opensora-1.2")


@pytest.fixture
def certified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that multiplies in eight bits, and is faster so."""
    multiply_here(monkeypatch)
    certify_as(monkeypatch, "certified", 1.5)


def asked(model: Path, **more: Any) -> dict[str, Any]:
    return {**OPEN_SORA, "model": str(model), "num_inference_steps": 8, "dtype": "fp32", **more}


def calibrated(model: Path, methods: Mapping[str, Measurement] = MEASURED) -> None:
    given = asked(model)
    plant_calibration(methods, **{name: given[name] for name in given if name not in _SET})


_SET = ("prompt", "seed")


def plan(model: Path, *, will_run: bool = False, **more: Any) -> Plan:
    return prepare(Request(**asked(model, **more)), will_run=will_run).plan


def made(model: Path, **more: Any) -> everyframe.Video:
    found = everyframe.generate(**asked(model, **more), run_dir="off")
    assert isinstance(found, everyframe.Video)
    return found


def multiplies(record: Mapping[str, Any]) -> bool:
    parts = record["plan"]["components"]
    kinds = {part["name"]: part["precision"]["weight_dtype"] for part in parts}
    assert {*kinds.values()} <= {"", KIND}
    return bool(kinds["denoiser"] == KIND)


def differ(one: everyframe.Video, other: everyframe.Video) -> bool:
    return not np.array_equal(one.frames, other.frames)


# ------------------------------------------------------------------------------------- by name


@pytest.mark.usefixtures("certified")
def test_a_named_method_has_both_losses(model: Path) -> None:
    exact, sampled, multiplied, both = (
        made(model, quality=quality) for quality in ("exact", SAMPLING, ALONE, BOTH)
    )
    assert [multiplies(each.record) for each in (exact, sampled, multiplied, both)] == [
        False, False, True, True,
    ]  # fmt: skip
    assert differ(both, exact)
    assert differ(both, sampled)
    assert differ(both, multiplied)
    assert not differ(multiplied, made(model, quantize=KIND)), "the option of that name"
    assert both.record["plan"]["quality"]["method"] == BOTH
    assert both.record["plan"]["quality"]["why"] == "named, not measured"


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao isn't installed")
def test_a_named_method_has_torchao_s_products(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify_as(monkeypatch, "certified", 1.5)
    both = made(model, quality=BOTH)
    assert multiplies(both.record)
    assert not differ(both, made(model, quality=SAMPLING, quantize=KIND))
    assert differ(both, made(model, quality=SAMPLING, quantize="int8"))


def test_a_named_product_that_is_refused_is_not_claimed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_here(monkeypatch)
    tried = certify_as(monkeypatch, "refused", 0.9)
    found = plan(model, quality=BOTH, will_run=True)
    assert tried == ["denoiser"]
    assert found.quality is not None
    assert found.quality.method == SAMPLING
    assert "without int8-dynamic" in found.quality.why
    assert any("without int8-dynamic, which was refused here" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quality": BOTH, "quantize": "int8"}, "both say how linear layers are computed"),
        ({"quality": BOTH, "disable": KIND}, f"{BOTH}: {KIND} is disabled"),
        ({"quality": ALONE, "disable": KIND}, f"{ALONE}: {KIND} is disabled"),
        ({"quality": BOTH, "disable": "abm2"}, f"{SAMPLING}: abm2 is disabled"),
        ({"quality": "abm2@4+fp8-scaled"}, "needs a CUDA card of compute capability 8.9 or later"),
        ({"quality": BOTH, "compile": True}, "and compile: give one of them"),
    ],
)
@pytest.mark.usefixtures("certified")
def test_what_can_t_be_is_reported(model: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as raised:
        plan(model, **options)
    assert says in str(raised.value)


def test_without_the_package_the_command_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "everyframe.planning.fast_paths.choose_fast_paths.find_spec", lambda name: None
    )
    with pytest.raises(MissingPackageError, match=r"pip install 'everyframe\[torchao\]'"):
        plan(model, quality=BOTH)


# ---------------------------------------------------------------------------------- by a budget


@pytest.mark.usefixtures("certified")
def test_a_budget_takes_what_is_the_fastest_together(model: Path) -> None:
    calibrated(model)
    both = plan(model, quality="32dB", will_run=True)
    assert both.quality is not None
    assert (both.quality.method, both.quality.worst_db) == (BOTH, 38.0)
    assert both.component("denoiser").precision.weight_dtype == KIND
    assert str(both.settings.method) == SAMPLING
    assert "38.0 dB at worst" in str(both.quality)
    mild, milder = plan(model, quality="36dB"), plan(model, quality="39dB")
    assert (str(mild.settings.method), str(milder.settings.method)) == (SAMPLING, "None")
    assert mild.component("denoiser").precision.weight_dtype == ""
    assert milder.component("denoiser").precision.weight_dtype == KIND
    assert milder.quality is not None
    assert milder.quality.method == ALONE
    assert plan(model, quality="41dB").component("denoiser").precision.weight_dtype == ""


@pytest.mark.usefixtures("certified")
@pytest.mark.parametrize(
    "options", [{"disable": KIND}, {"quantize": "none"}, {"compile": True}, {"missing": True}, {}]
)
def test_it_can_be_switched_off(
    model: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated(model)
    if not options:
        monkeypatch.setenv(DISABLE_VARIABLES[0], KIND)
    if options.pop("missing", False):
        monkeypatch.setattr(
            "everyframe.planning.fast_paths.choose_fast_paths.find_spec", lambda name: None
        )
    found = plan(model, quality="32dB", **options)
    assert str(found.settings.method) == SAMPLING
    assert found.component("denoiser").precision.weight_dtype == ""


def test_what_this_run_s_trial_refuses_is_not_taken(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated(model)
    multiply_here(monkeypatch)
    certify_as(monkeypatch, "refused", 0.9)
    found = plan(model, quality="32dB", will_run=True)
    assert str(found.settings.method) == SAMPLING
    assert found.quality is not None
    assert (found.quality.method, found.quality.worst_db) == (SAMPLING, 40.0)
    assert found.component("denoiser").precision.weight_dtype == ""
    assert any("without int8-dynamic, which is not certified here" in each for each in found.notes)


@pytest.mark.usefixtures("certified")
@pytest.mark.parametrize(
    ("budget", "method"),
    [pytest.param("32dB", BOTH, marks=pytest.mark.slow), ("39dB", ALONE)],
)
def test_a_record_makes_the_same_bits_whatever_is_calibrated_by_then(
    model: Path, budget: str, method: str
) -> None:
    calibrated(model)
    first = made(model, quality=budget)
    assert first.record["plan"]["quality"]["method"] == method
    calibrated(model, {"abm2@6": Measurement(50.0, 9.0, 1.3)})
    again = everyframe.generate(from_record=first, model=str(model), run_dir="off")
    assert isinstance(again, everyframe.Video)
    assert not differ(again, first)
    quality = again.record["plan"]["quality"]
    assert (quality["method"], quality["why"]) == (method, "as recorded")
    # Another quality leaves the products out that the first one chose, and may name its own.
    exact = made(model)
    multiplied = made(model, quality=ALONE)
    for record, other, expected in (
        (first, {"quality": "exact"}, exact),
        (first, {"quality": ALONE}, multiplied),
        (exact, {"quality": ALONE}, multiplied),
        (exact, {"quantize": KIND}, multiplied),
    ):
        video = everyframe.generate(from_record=record, model=str(model), run_dir="off", **other)
        assert isinstance(video, everyframe.Video)
        assert not differ(video, expected), other


@pytest.mark.usefixtures("certified")
def test_a_run_that_is_interrupted_gives_the_same_bits(model: Path, tmp_path: Path) -> None:
    calibrated(model)
    options = asked(model, quality="32dB")
    whole = list(begun(tmp_path / "runs", **options))
    first = next(place for place, each in enumerate(whole) if isinstance(each, RunSaved))
    steps = [p for p, e in enumerate(whole) if p > first and isinstance(e, Step)]
    folder = stop_before(begun(tmp_path / "runs", **options), steps[4] + 1)
    calibrated(model, {"abm2@6": Measurement(50.0, 9.0, 1.3)})
    same(whole, list(resume.resume_run(folder)))


def test_other_devices_go_on_by_the_method_of_the_run(model: Path) -> None:
    calibrated(model)
    old = plan(model, quality="36dB")
    calibrated(model, {"abm2@6": Measurement(50.0, 9.0, 1.3)})
    request = Request(**asked(model, quality="36dB", num_devices=2))
    assert str(prepare(request).plan.settings.method) == "abm2@6"
    new = replan_for_devices(old, request, None, ())
    assert new.settings.method == old.settings.method
