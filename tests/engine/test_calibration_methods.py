"""Which products in eight bits a calibration measures, alone and with which sampling methods.

The videos are planted: each loss has decibels and a speed of its own, and together they add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everyframe.core.errors import InputError
from everyframe.core.quality import LossyMethod, parse_quality
from everyframe.core.request import Request
from everyframe.engine import calibration
from everyframe.engine.calibration import CalibrationProgress, calibrate, report
from everyframe.fast_paths.calibrations import LEAST_VIDEOS, Calibration
from helpers.interrupted_runs import OPEN_SORA
from helpers.planted_products import KIND, certify_as, multiply_here

STEPS = 12
ALONE = f"exact+{KIND}"

#: Amplitude of the error that products in eight bits have: 44 dB.
_PRODUCTS = 10 ** (-44 / 20)


@pytest.fixture(scope="module")
def model(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("opensora-1.2")


@pytest.fixture(autouse=True)
def planted_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In place of videos: frames with the error of the method; names of the methods."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "cache"))
    qualities: list[str] = []

    def made(request: Request) -> Any:
        qualities.append(request.quality)
        method = parse_quality(request.quality) or LossyMethod()
        assert isinstance(method, LossyMethod)
        computed = min(method.num_computed, STEPS)
        error = 0.0 if computed == STEPS else 10 ** (-(30 + 2.0 * (computed - 3)) / 20)
        error += _PRODUCTS if method.products else 0.0
        seconds = computed / STEPS / (1.5 if method.products else 1.0)
        return calibration._Made(np.full((1, 2, 2, 3), error), seconds, seconds, None)

    monkeypatch.setattr(calibration, "_make", made)
    return qualities


def run(model: Path, **options: Any) -> Iterator[CalibrationProgress]:
    own = {name: options.pop(name) for name in ("methods", "lowest_db") if name in options}
    asked = {**OPEN_SORA, "seed": 0, "num_inference_steps": STEPS, "dtype": "fp32", **options}
    return calibrate(Request(model=str(model), **asked), num_videos=LEAST_VIDEOS, **own)


def whole(progress: Iterator[CalibrationProgress]) -> tuple[Calibration, list[str]]:
    """What is measured in the end, and the lines about what is not."""
    steps = list(progress)
    return steps[-1].calibration, [each.text for each in steps if "not measured" in each.text]


def with_products(found: Calibration) -> set[str]:
    return {name for name in found.measured if name.endswith(f"+{KIND}")}


@pytest.fixture
def certified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    multiply_here(monkeypatch)
    return certify_as(monkeypatch, "certified", 1.5)


def test_certified_products_are_measured_alone_and_with_the_fastest_of_each_budget(
    model: Path, certified: list[str]
) -> None:
    found, lines = whole(run(model, methods=["taylor1", KIND], guidance_scale=1.0))
    assert lines == []
    assert certified == ["denoiser"]
    # 33 dB at worst have 5 computed steps, and 35, 38, 40 and 43 dB hold the other budgets.
    fastest = {found.fastest(decibels, ["taylor1"]) for decibels in (30, 32, 35, 37, 40)}
    assert len(fastest) > 2
    assert with_products(found) == {ALONE, *(f"{name}+{KIND}" for name in filter(None, fastest))}
    assert all(found.is_whole(name) for name in with_products(found))
    assert found.worst_db(ALONE) == pytest.approx(44, abs=1e-3)
    # Errors add up: what holds alone may not hold together.
    best = found.fastest(30, ["taylor1", KIND])
    assert best is not None
    assert best.endswith(KIND)
    sampled = best.removesuffix(f"+{KIND}")
    error = 10 ** (-found.worst_db(sampled) / 20) + _PRODUCTS
    assert found.worst_db(best) == pytest.approx(-20 * math.log10(error), abs=1e-2)
    assert any(best in line for line in report(found, [30.0]))


def test_it_resumes_where_it_was_interrupted(
    model: Path, certified: list[str], planted_videos: list[str]
) -> None:
    options: dict[str, Any] = {"methods": ["taylor1", KIND], "guidance_scale": 1.0}
    steps = run(model, **options)
    for progress in steps:
        if len(progress.calibration.measured.get(ALONE, ())) == 3:
            break
    steps.close()  # type: ignore[attr-defined]
    planted_videos.clear()
    found, _ = whole(run(model, **options))
    assert all(map(found.is_whole, with_products(found)))
    assert planted_videos.count(ALONE) == LEAST_VIDEOS - 3
    assert not any(name.startswith("taylor1") and KIND not in name for name in planted_videos)
    assert list(run(model, **options)) == [], "nothing is left to do"


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        ("refused", f"{KIND} is not measured: refused, planted"),
        (None, f"{KIND} is not measured: {KIND} needs torchao: pip install 'everyframe[torchao]'"),
    ],
)
def test_what_is_not_certified_is_left_out_with_a_line(
    model: Path, verdict: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if verdict is None:
        monkeypatch.setattr(
            "everyframe.planning.fast_paths.choose_fast_paths.find_spec", lambda name: None
        )
    else:
        multiply_here(monkeypatch)
        certify_as(monkeypatch, verdict, 0.9)
    found, lines = whole(run(model, methods=["taylor1@6", f"taylor1@6+{KIND}", KIND]))
    assert lines == [says]
    assert {*found.measured} == {"taylor1@6"}


@pytest.mark.usefixtures("certified")
def test_by_default_they_are_measured_unless_switched_off(model: Path) -> None:
    found, _ = whole(run(model))
    assert ALONE in found.measured
    assert len(with_products(found)) > 1
    without: list[dict[str, Any]]
    without = [{"disable": KIND}, {"methods": ["taylor1@6"]}, {"quantize": "none"}]
    for number, options in enumerate(without, 1):
        others, lines = whole(run(model, seed=100 * number, **options))
        assert lines == []
        assert others.measured, options
        assert with_products(others) == set(), options


@pytest.mark.usefixtures("certified")
def test_what_falls_below_the_lowest_budget_ends_with_its_bolder_ones(model: Path) -> None:
    methods = ["taylor1@8", ALONE, f"taylor1@8+{KIND}", f"taylor1@6+{KIND}"]
    found, _ = whole(run(model, methods=methods, lowest_db=38.5))
    lengths = {name: len(each) for name, each in found.measured.items()}
    assert lengths == {"taylor1@8": LEAST_VIDEOS, ALONE: LEAST_VIDEOS, f"taylor1@8+{KIND}": 1}


@pytest.mark.usefixtures("certified")
def test_a_kind_of_another_device_is_named_with_what_there_is(model: Path) -> None:
    with pytest.raises(InputError, match=r"can't do fp8-scaled; it can do .*, int8-dynamic"):
        next(run(model, methods=["fp8-scaled"]))
