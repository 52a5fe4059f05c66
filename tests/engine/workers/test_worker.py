"""What a worker does beside its run."""

from __future__ import annotations

from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from everyframe.core.events import ComponentLoaded, Event, Planned, StageStarted, Step
from everyframe.core.parallel_plan import ParallelPlan, RankPlan
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine.workers import worker
from everyframe.engine.workers.worker_process import WorkerJob
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


def test_freed_memory_is_returned_before_a_worker_waits_for_its_next_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job that is stopped while it denoises ends without a step that would return it."""
    jobs: SimpleQueue[WorkerJob] = SimpleQueue()
    done: list[Any] = []
    for name in ("Connection", "os", "gc"):
        monkeypatch.setattr(worker, name, Mock())
    monkeypatch.setattr(worker, "_Inbox", lambda _: SimpleNamespace(jobs=jobs))
    monkeypatch.setattr(worker, "_run_job", lambda *_: done.append("job") or len(done) == 1)
    monkeypatch.setattr(memory, "keep_freed_memory", done.append)
    monkeypatch.setattr(memory, "empty_cache", lambda: done.append("emptied"))
    for _ in range(2):
        jobs.put(WorkerJob())
    worker.serve(0)
    assert done == ["job", False, "emptied", "job"]
