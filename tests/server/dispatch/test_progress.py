"""Progress over stages: weighted, never falling, under 100 until the files are there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everyframe.core.events import StageDone, StageStarted, Step
from everyframe.core.plan import Plan, StagePlan
from everyframe.core.request import Request
from everyframe.server.dispatch.progress import MOST, ProgressMeter, stage_weights
from helpers.fake_engine import FakeEngine, changed, plan_of

STAGES = ("text", "denoise", "decode")


def plan(seconds: tuple[float | None, ...] = (1.0, 8.0, 1.0), work: float = 0.0) -> Plan:
    stages = tuple(
        StagePlan(name, name, 0, 1, work, second)
        for name, second in zip(STAGES, seconds, strict=True)
    )
    return replace(plan_of(Request(prompt="a")), stages=stages)


def run(meter: ProgressMeter, plan: Plan, num_steps: int = 4) -> list[int]:
    seen = []
    for clip in range(plan.settings.chain):
        for stage in STAGES:
            meter.take(StageStarted(stage, num_steps, clip, plan.settings.chain))
            for step in range(1, num_steps + 1):
                meter.take(Step(stage, step, num_steps, 5, 0.1))
                seen.append(meter.percent)
            meter.take(StageDone(stage, 0.5))
    return seen


def test_stages_count_by_their_forecast() -> None:
    seen = run(ProgressMeter(plan()), plan())
    assert seen == [2, 5, 7, 10, 30, 50, 70, 90, 92, 95, 97, 99]


def test_steps_of_an_engine_that_begin_again_at_each_stage_never_fall() -> None:
    """The very events of a run, also of several clips and videos."""
    request = Request(prompt="a", num_videos=2, chain=2)
    meter, seen = ProgressMeter(changed(plan(), num_videos=2, chain=2)), []
    for event in FakeEngine().stream(request):
        meter.take(event)
        seen.append(meter.percent)
    assert seen == sorted(seen)
    assert seen[-1] == MOST
    assert len(set(seen)) > 10


def test_clips_share_the_whole() -> None:
    chained = changed(plan(), chain=2)
    seen = run(ProgressMeter(chained), chained)
    assert seen[11] == 50
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("seconds", "work", "shares"),
    [
        ((1.0, 2.0, 1.0), 0.0, [0.25, 0.5, 0.25]),
        ((None, 2.0, 1.0), 3.0, [1 / 3, 1 / 3, 1 / 3]),
        ((None, None, None), 0.0, [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_shares(seconds: Any, work: float, shares: list[float]) -> None:
    assert [*stage_weights(plan(seconds, work)).values()] == pytest.approx(shares)


def test_two_calls_of_one_stage_are_one_share() -> None:
    both = replace(plan(), stages=(*plan().stages, StagePlan("denoise", "x", 0, 1, 0.0, 10.0)))
    assert stage_weights(both)["denoise"] == pytest.approx(0.9)


def test_a_resumed_attempt_does_not_fall_behind_the_first() -> None:
    meter = ProgressMeter(plan(), at_least=60)
    meter.take(StageStarted("denoise", 4))
    meter.take(Step("denoise", 2, 4, 5, 0.1))
    assert meter.percent == 60
    meter.take(Step("denoise", 4, 4, 5, 0.1))
    assert meter.percent == 90


def test_a_stage_that_the_plan_does_not_name_changes_nothing() -> None:
    meter = ProgressMeter(plan())
    meter.take(StageStarted("denoise", 4))
    meter.take(StageStarted("upscale", 4))
    meter.take(Step("upscale", 4, 4, 5, 0.1))
    assert meter.percent == 10
    assert meter.fields()["phase"] == "upscale"


def test_time_left_is_forecast_at_first_and_measured_then() -> None:
    clock = [100.0]
    meter = ProgressMeter(plan(), now=lambda: clock[0])
    assert meter.eta_s == pytest.approx(10)
    meter.take(StageStarted("text", 4))
    assert meter.eta_s == pytest.approx(10)
    for step in range(1, 5):  # ten times slower than forecast
        clock[0] += 2.5
        meter.take(Step("text", step, 4, 5, 2.5))
    assert meter.eta_s == pytest.approx(90)
    unknown = ProgressMeter(plan((None, None, None), 1.0), now=lambda: clock[0])
    assert unknown.eta_s is None


def test_time_left_of_a_resumed_run_counts_only_its_own_steps() -> None:
    clock = [0.0]
    meter = ProgressMeter(plan(), at_least=40, now=lambda: clock[0])
    clock[0] = 50.0  # loading
    meter.take(StageStarted("denoise", 4))
    clock[0] = 52.0
    meter.take(Step("denoise", 3, 4, 5, 2.0))
    assert meter.eta_s == pytest.approx(2 / 0.2 * 0.3), "one of four steps took 2 s"


def test_stage_durations_add_up_over_clips() -> None:
    chained = changed(plan(), chain=2)
    meter = ProgressMeter(chained)
    run(meter, chained)
    assert meter.stage_durations == dict.fromkeys(STAGES, 1.0)
