"""What a worker does beside its run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from everyframe.core.events import ComponentLoaded, Event, Planned, StageStarted, Step
from everyframe.core.parallel_plan import ParallelPlan, RankPlan
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine.workers import worker
from everyframe.hardware import memory
from helpers.fake_engine import plan_of

PLAN = plan_of(Request(prompt="a circle"))
PEAK = PLAN.peak_bytes
RANK = RankPlan("cpu", 0, 1.0)


def with_free(num_bytes: int, **changes: Any) -> Plan:
    return replace(PLAN, device=replace(PLAN.device, free_memory=num_bytes, **changes))


@pytest.mark.parametrize(
    ("plan", "is_kept"),
    [
        (with_free(2 * PEAK), True),
        (with_free(2 * PEAK - 1), False),
        (with_free(2 * PEAK, kind="cuda"), False),
        (replace(with_free(4 * PEAK), parallel=ParallelPlan((RANK, RANK), (1,))), True),
        (replace(with_free(4 * PEAK - 1), parallel=ParallelPlan((RANK, RANK), (1,))), False),
    ],
)
def test_freed_memory_is_kept_while_a_cpu_with_room_denoises(
    plan: Plan, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    empty = Mock()
    monkeypatch.setattr(memory, "keep_freed_memory", asked.append)
    monkeypatch.setattr(memory, "empty_cache", empty)
    stages = [StageStarted(name, 4) for name in ("text", "pipeline")]
    steps = [Step("pipeline", number, 4, 0, 1.0) for number in range(1, 4)]
    events: list[Event] = [Planned(plan), *stages, *steps]
    assert [*worker._record(iter(events), Mock(), Mock())] == events
    assert asked == [False, is_kept]
    assert not empty.called
    asked.clear()
    events += [Step("pipeline", 4, 4, 0, 1.0)]
    [*worker._record(iter(events), Mock(), Mock())]
    assert asked == [False, is_kept, False]
    assert empty.called
    empty.reset_mock()
    [*worker._record(iter([ComponentLoaded("denoiser", 1.0)]), Mock(), Mock())]
    assert empty.called
