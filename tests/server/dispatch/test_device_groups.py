"""Device groups: which jobs may run together, and which one is next."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from everyframe.core.errors import LeftBatchError
from everyframe.core.plan import BatchPlan
from everyframe.core.request import Request
from everyframe.runs.folder import new_run
from everyframe.server.dispatch.device_groups import DeviceGroup
from everyframe.server.queue.jobs import Job
from everyframe.server.queue.store import JobStore
from helpers.fake_executor import NUM_STEPS, FakeExecutor, plan_of
from helpers.server_jobs import Start, add, ended

REQUEST = Request(prompt="a red circle")


def group_of(most: int = 3, warm_ahead: int = 4) -> DeviceGroup:
    return DeviceGroup("default", None, most, warm_ahead)


def planned(group: DeviceGroup, num_videos: int | None) -> None:
    batch = None if num_videos is None else BatchPlan(num_videos, "measured", 1.5)
    group.note_plan(replace(plan_of(REQUEST), batch=batch))


def claimed(group: DeviceGroup, store: JobStore) -> Job:
    claim = group.claim(store)
    assert claim is not None
    return claim.job


def test_jobs_that_differ_in_prompt_and_seed_join_once_the_plan_says_so(store: JobStore) -> None:
    jobs = [add(store, seed, request={"prompt": f"a {seed}"}) for seed in range(4)]
    group = group_of()
    lead = group.claim(store)
    assert lead is not None
    assert lead.job.id == jobs[0].id
    assert group.claim(store) is None, "nobody knows yet whether it pays"
    planned(group, 3)
    second, third = group.claim(store), group.claim(store)
    assert second is not None
    assert third is not None
    assert [second.job.id, third.job.id] == [jobs[1].id, jobs[2].id]
    assert lead.batch == second.batch == third.batch is not None
    assert group.claim(store) is None, "the batch is full"
    group.leave(second.job.id)
    assert claimed(group, store).id == jobs[3].id
    assert group.job == jobs[0].id


@pytest.mark.parametrize("num_videos", [None, 1])
def test_nothing_joins_where_the_plan_is_against_it(
    store: JobStore, num_videos: int | None
) -> None:
    jobs = [add(store, seed) for seed in range(2)]
    group = group_of()
    assert claimed(group, store).id == jobs[0].id
    planned(group, num_videos)
    assert group.claim(store) is None


@pytest.mark.parametrize("num_videos", [None, 1, 2])
def test_the_next_job_is_handed_over_where_one_has_its_frames(
    store: JobStore, num_videos: int | None
) -> None:
    jobs = [add(store, seed) for seed in range(5)]
    group = group_of()
    first = claimed(group, store)
    planned(group, num_videos)
    running = [first.id, *(claimed(group, store).id for _ in range((num_videos or 1) - 1))]
    assert group.claim(store) is None
    group.note_end(first.id)
    running.append(claimed(group, store).id)
    assert group.claim(store) is None, "one in its place"
    group.leave(first.id)
    assert group.claim(store) is None
    group.leave(running[1])
    running.append(claimed(group, store).id)
    assert running == [job.id for job in jobs[: len(running)]]


@pytest.mark.parametrize("other", [
    {"request": {"num_frames": 8}}, {"model": "another"}, {"request": {"lora": "x"}},
])  # fmt: skip
def test_jobs_of_another_plan_wait(store: JobStore, other: dict[str, Any]) -> None:
    add(store)
    waiting, alike = add(store, **other), add(store, 4)
    group = group_of()
    first = claimed(group, store)
    planned(group, 3)
    assert claimed(group, store).id == alike.id, "it goes before an older one, whose turn comes"
    assert group.claim(store) is None
    group.leave(first.id)
    assert group.claim(store) is None, "one of the batch still runs"
    group.leave(alike.id)
    assert claimed(group, store).id == waiting.id


def test_older_jobs_are_not_passed_for_ever(store: JobStore) -> None:
    add(store)
    waiting = add(store, request={"num_frames": 8})
    for seed in range(10):
        add(store, seed)
    group = group_of(most=2, warm_ahead=3)
    running = claimed(group, store)
    planned(group, 2)
    passed = 0
    while (claim := group.claim(store)) is not None:
        group.leave(running.id)
        running, passed = claim.job, passed + 1
    assert passed == 3
    group.leave(running.id)
    assert claimed(group, store).id == waiting.id


def test_a_job_of_higher_priority_is_not_passed(store: JobStore) -> None:
    add(store)
    group = group_of()
    claimed(group, store)
    planned(group, 3)
    add(store, request={"num_frames": 8}, priority=1)
    add(store, 4)
    assert group.claim(store) is None


def test_jobs_that_were_tried_before_run_alone(store: JobStore) -> None:
    first, second = add(store), add(store, 4)
    group = group_of()
    claimed(group, store)
    planned(group, 3)
    claimed(group, store)
    group.leave(second.id, is_alone=True)
    store.requeue(second.id, counts_attempt=False)
    assert group.claim(store) is None, "it left the batch"
    group.leave(first.id)
    alone = group.claim(store)
    assert alone is not None
    assert (alone.job.id, alone.batch) == (second.id, None)
    assert not group._alone, "which would grow for ever"
    add(store, 5)
    planned(group, 3)
    assert group.claim(store) is None
    group.leave(second.id)
    store.requeue(second.id, counts_attempt=True, run="runs/x")
    resumed, new = (group.claim(store) for _ in range(2))
    assert resumed is not None
    assert (resumed.job.id, resumed.batch, new) == (second.id, None, None)


def begin_run(store: JobStore, job: Job, step: int) -> None:
    """A run of the job in the folder, of which the row says nothing."""
    run = new_run(store.folder.runs_of(job.id))
    run.write_run({"began": time.time(), "request": job.request})
    if step:
        run.write_state({"clip": 0, "stage": 1, "takes": [{"seed": 3, "step": step}]})


@pytest.mark.parametrize("step", [0, 2])
def test_a_job_whose_run_was_begun_as_the_server_died_is_not_new(
    store: JobStore, step: int
) -> None:
    """Its row was not written any more."""
    first, second = add(store), add(store, 4)
    claimed(group_of(), store)
    begin_run(store, first, step)
    (back,) = store.recover()
    assert back.run is not None
    assert back.attempts == 0
    group = group_of()
    claim = group.claim(store)
    assert claim is not None
    assert (claim.job.id, claim.batch) == (first.id, None)
    planned(group, 3)
    assert group.claim(store) is None, "nobody joins a resumed run"
    group.leave(first.id)
    assert claimed(group, store).id == second.id


class Batching(FakeExecutor):
    """An executor whose plans are for batches of two."""

    has_batches = True

    def plan(self, request: Request) -> Any:
        return replace(super().plan(request), batch=BatchPlan(2, "measured", 1.5))


@pytest.mark.parametrize("place", [0, 1])
def test_a_resumed_run_that_looks_new_shares_no_devices(
    store: JobStore, dispatch: Start, place: int
) -> None:
    """Whether it would lead a batch or join it."""
    jobs = [add(store, seed) for seed in range(3)]
    begin_run(store, jobs[place], 0)
    executor = Batching(pause=0.02)
    dispatch(executor)
    for job in jobs:
        ended(store, job)
    (resumed,) = [each for each in executor.jobs if each.run is not None]
    assert resumed.batch is None
    seeds = [seed for seed, _ in executor.steps]
    began = seeds.index(place)
    assert seeds[began : began + NUM_STEPS] == [place] * NUM_STEPS, "nothing ran beside it"


def test_jobs_of_several_ranks_are_no_batch(store: JobStore, dispatch: Start) -> None:
    jobs = [add(store, seed) for seed in range(3)]
    executor = Batching(pause=0.01)
    dispatch(executor, groups={"0,1": "0,1"})
    for job in jobs:
        ended(store, job)
    assert executor.steps == sorted(executor.steps)
    assert {job.batch for job in executor.jobs} == {None}


def test_a_dispatcher_runs_a_batch_and_what_leaves_it(store: JobStore, dispatch: Start) -> None:
    executor = Batching(pause=0.02, failures=[None, (1, LeftBatchError("it needs a repair"))])
    jobs = [add(store, seed) for seed in range(4)]
    dispatch(executor)
    done = [ended(store, job) for job in jobs]
    assert [job.attempts for job in done] == [1] * 4, "leaving is no failure"
    batches = [job.batch for job in executor.jobs]
    assert batches[0] == batches[1] is not None
    assert None in batches, "the one that left"
    steps = [seed for seed, _ in executor.steps]
    assert steps != sorted(steps), "some ran at the same time"
