"""Ranks that run out of memory together are started again, in less of it, from the last step.

What the launcher does is tested with made-up workers, what is done in less with a made-up model;
`test_replan_distributed.py` has real ranks go on so, and the slow test here whole processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import everyframe
from everyframe.core.errors import CannotRunError, DistributedOutOfMemoryError, PeerLostError
from everyframe.core.events import (
    Event,
    FramesDecoded,
    Note,
    Planned,
    Repaired,
    RunSaved,
    Step,
    VideoDone,
    WeightsReady,
)
from everyframe.core.facts import DeviceFacts
from everyframe.core.parallel_plan import ParallelPlan, RankPlan
from everyframe.core.plan import ComponentPlan, Plan, Precision, Settings
from everyframe.engine.resumption import replan
from everyframe.engine.resumption.replan import (
    add_fallbacks,
    applied_fallbacks,
    replan_with_less_memory,
)
from everyframe.engine.workers import launcher
from everyframe.engine.workers.error_transfer import error_data, error_from
from everyframe.engine.workers.launcher import EventDeduplicator
from everyframe.engine.workers.worker_process import WorkerJob, receive, send
from everyframe.runs.folder import RunFolder
from everyframe.runs.run_state import EVERY_STEP, RunState
from everyframe.runtime.interface import MemorySaving
from everyframe.runtime.memory.oom_fallback import together
from helpers.events import frames_by_seed
from helpers.guard_modules import plan
from helpers.interrupted_ranks import ROUNDING
from helpers.tiny_checkpoints import opensora as tiny_opensora

PLANTED = Path(__file__).parents[2] / "helpers" / "planted"
SHORT = together("denoise", 3, ("net",), "step 3 of denoise", "CUDA out of memory")


def pixels(count: int, first: int = 0) -> Any:
    return np.arange(first, first + count, dtype=np.float32).reshape(-1, 1, 1, 1)


class MadeUp:
    """Workers that say what the test has them say: the first group, and the one after it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[WorkerJob] = []
        self.killed: list[int] = []
        begins: list[Event] = [Planned(plan()), WeightsReady({}), RunSaved("this-run", str(path))]
        seven = [FramesDecoded(7, 4, pixels(4)), VideoDone(7, 4, {})]
        first = [*begins, *seven, FramesDecoded(5, 2, pixels(2))]
        lost = error_data(PeerLostError("rank 1 went away"))
        again = [
            *begins,
            Note("goes on"),
            FramesDecoded(5, 3, pixels(3)),
            FramesDecoded(5, 2, pixels(2, 3)),
        ]
        self._answers = [
            # Who waits for the other is heard first, and knows less.
            [[("event", each) for each in first] + [("error", lost)],
             [("error", error_data(SHORT))]],
            [[("event", each) for each in [*again, VideoDone(5, 5, {})]] + [("end", None)],
             [("end", None)]],
        ]  # fmt: skip
        monkeypatch.setattr(launcher, "Worker", self._worker)

    def _worker(self) -> Any:
        ours, theirs = Pipe()

        def give(job: WorkerJob) -> None:
            assert job.place is None
            number = len(self.jobs)
            self.jobs.append(job)

            def say() -> None:
                for name, value in self._answers[number // 2][number % 2]:
                    send(theirs, name, value)

            worker.job, worker.recorder_file = job, job.folder / f"trail-{job.rank}"
            worker.kill = lambda: self.killed.append(number)
            # The second is heard after the first, which waits for it.
            threading.Timer(0.3 * (number % 2), say).start()

        worker = SimpleNamespace(
            give=give, connection=ours, theirs=theirs, process_id=os.getpid(), has_ended=True,
            receive=lambda: receive(ours), has_died=lambda: False, end=lambda: 0,
        )  # fmt: skip
        return worker


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "this-run")
    folder.path.mkdir()
    return folder


def job(**more: Any) -> WorkerJob:
    return WorkerJob(everyframe.Request(prompt="a red circle"), weights=(1.0, 1.0), **more)


def test_all_ranks_are_started_again_from_what_was_kept(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeUp(run.path, monkeypatch)
    events = list(launcher.run_in_workers(job(skip=(9,))))
    first, second = made.jobs[:2], made.jobs[2:]
    assert [each.run for each in first] == [None, None]
    for rank, each in enumerate(second):
        assert (each.rank, each.request, each.run, each.skip) == (rank, None, run.path, (9, 7))
        assert each.out_of_memory == replace(SHORT.out_of_memory, rank=1)
        assert each.folder != first[rank].folder, "they meet anew"
    assert made.killed == [0, 1, 2, 3]
    kinds = [event.type for event in events]
    assert kinds == [
        "planned", "ready", "kept", "frames", "video_done", "frames", "note", "frames", "frames",
        "video_done",
    ], "no event comes twice"  # fmt: skip
    frames = frames_by_seed(events)
    assert frames[5].ravel().tolist() == [0, 1, 2, 3, 4]
    assert frames[7].ravel().tolist() == [0, 1, 2, 3]
    assert not run.path.exists(), "it is over"


@pytest.mark.parametrize("why", ["under torchrun", "nothing is kept"])
def test_where_nobody_can_start_them_again_it_says_what_would_do(
    why: str, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeUp(run.path, monkeypatch)
    asked = job(local=(1, 2), rank=1) if why == "under torchrun" else job()
    if why == "nothing is kept":
        made._answers[0][0] = made._answers[0][0][:2]
    else:
        made._answers[0][0] = made._answers[0][1]
    with pytest.raises(
        DistributedOutOfMemoryError, match="on more devices or with --shard-weights"
    ) as caught:
        list(launcher.run_in_workers(asked))
    assert caught.value.exit_code == 3
    assert len(made.jobs) == (1 if why == "under torchrun" else 2)


def test_an_error_that_is_reworded_says_where_memory_ran_out() -> None:
    """As `kept` does, which adds how to go on; and as it comes out of a worker."""
    again = SHORT.reworded("other words")
    assert (str(again), again.out_of_memory) == ("other words", SHORT.out_of_memory)
    ours, theirs = Pipe()
    send(theirs, "error", error_data(again))
    found = error_from(receive(ours)[1], 3)
    assert isinstance(found, DistributedOutOfMemoryError)
    assert found.out_of_memory.rank == 3
    assert type(CannotRunError("so").reworded("other")) is CannotRunError


def test_an_error_that_can_not_be_made_of_its_text_keeps_its_name_and_text() -> None:
    """In place of a TypeError of our own about the arguments of its class."""
    for error in (UnicodeDecodeError("utf-8", b"x", 0, 1, "no such byte"), KeyError("unet")):
        again = error_from(error_data(error), 0)
        assert str(error) in str(again) or str(again) == repr(str(error))
        assert type(error).__name__ in (type(again).__name__, str(again).partition(":")[0])
        assert again.__cause__ is not None


def test_frames_that_were_had_are_left_out() -> None:
    handed = EventDeduplicator()
    assert handed.new(FramesDecoded(1, 4, pixels(4))) is not None
    handed.again()
    assert handed.new(FramesDecoded(1, 3, pixels(3))) is None
    rest = handed.new(FramesDecoded(1, 3, pixels(3, 3)))
    assert isinstance(rest, FramesDecoded)
    assert (rest.num_frames, rest.frames.ravel().tolist()) == (2, [4, 5])
    assert handed.new(FramesDecoded(2, 1, pixels(1))) is not None, "another video's"
    assert handed.new(FramesDecoded(1, 1, pixels(1), 1)) is not None, "another one of the call"
    handed.again()
    assert handed.new(FramesDecoded(1, 6, pixels(6))) is None


class Toy:
    """What the ways to do with less ask of a model that ranks share."""

    lead_rank_components, sequence_backends = (), ("",)
    is_collective, has_independent_branches = True, False

    def dry_run_calls(self, *_: Any) -> Any:
        """Nothing else is asked of it."""
        raise AssertionError

    num_branches = rank_part = dry_run_calls

    def savings(self, component: str, settings: Settings) -> Iterator[MemorySaving]:
        yield MemorySaving(settings.with_saving("at_once", 1), "one by one")
        yield MemorySaving(settings.with_saving("at_once", 1).with_saving("tile", 8), "tiles", True)


MODEL: Any = Toy()
CARD = DeviceFacts("a card", "cuda", 0, 10**12, 10**12)


def of_ranks(device: DeviceFacts, *names: str) -> Plan:
    """Two ranks make one video together."""
    whole = Precision("float32", "float32")
    parts = [ComponentPlan(name, name.title(), "denoise", "toy", 0, device.torch_name, whole, 8, 8)
             for name in names]  # fmt: skip
    division = ParallelPlan(tuple(RankPlan(device.torch_name, 0, 1.0) for _ in range(2)), (1,))
    return replace(plan(device), components=tuple(parts), parallel=division)


def all_ways(planned: Plan) -> Iterator[tuple[Plan, str]]:
    while (found := replan.apply_next_fallback(planned, MODEL, SHORT.out_of_memory)) is not None:
        planned = found[0]
        yield planned, found[1].message


def test_each_start_does_one_thing_more_in_the_order_of_plans() -> None:
    plans = list(all_ways(of_ranks(CARD, "net")))
    assert [says.partition(": ")[2].split()[0] for _, says in plans] == [
        "one", "sharded", "block", "tiles",
    ]  # fmt: skip
    parts = [each.component("net") for each, _ in plans]
    assert [(part.num_weight_shards, part.block_offload) for part in parts] == [
        (1, False), (2, False), (1, True), (1, True),
    ]  # fmt: skip
    assert [each.settings.saving("at_once", 0) for each, _ in plans] == [1, 1, 1, 1]


def test_on_processors_weights_wait_nowhere() -> None:
    messages = [says for _, says in all_ways(of_ranks(DeviceFacts("p", "cpu", None, 9, 9), "net"))]
    assert [says.partition(": ")[2].split()[0] for says in messages] == ["one", "sharded", "tiles"]


def test_parts_of_a_pipeline_come_by_turns_first() -> None:
    planned, message = next(all_ways(of_ranks(CARD, "net", "vae")))
    assert "model offload" in message
    assert all(part.model_offload for part in planned.components)


def test_where_nothing_is_left_it_is_refused() -> None:
    *_, (last, _) = all_ways(of_ranks(CARD, "net"))
    with pytest.raises(CannotRunError, match=r"^step 3 of denoise, on rank 1: out of memory, and "):
        replan_with_less_memory(last, MODEL, replace(SHORT.out_of_memory, rank=1))


def test_the_record_holds_what_was_done_once() -> None:
    _, fallback = replan_with_less_memory(of_ranks(CARD, "net"), MODEL, SHORT.out_of_memory)
    assert fallback.text.endswith("all resume from the last saved step: Net: one by one")
    assert applied_fallbacks([fallback.to_json()]) == (fallback,)
    other = {"clip": 1, **replace(fallback, stage="decode").to_json()}
    progress = RunState(repairs=[other])
    for _ in range(2):
        add_fallbacks(progress, [fallback])
    assert progress.repairs == [{"clip": None, **fallback.to_json()}, other]


@pytest.mark.slow
def test_processes_go_on_from_the_last_step_in_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two has no memory for both branches of guidance, from its second step on."""
    model = tiny_opensora.opensora_1_2(tmp_path / "tiny")
    pace = (EVERY_STEP.pause, EVERY_STEP.share)
    request = everyframe.Request(
        prompt="a red circle", model=str(model), height=24, width=40, num_frames=20, seed=5,
        num_inference_steps=4, device="cpu", num_devices=2, shares="2,1",
    )  # fmt: skip
    asked = WorkerJob(request, root=tmp_path / "runs", pace=pace).of_ranks(2)
    whole = list(launcher.run_in_workers(asked))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLANTED), os.environ["PYTHONPATH"]]))
    monkeypatch.setenv("PLANTED", "memory:STDiT3:2")
    monkeypatch.setenv("PLANTED_RANK", "0")
    events = list(launcher.run_in_workers(asked))
    (repair,) = [event for event in events if isinstance(event, Repaired)]
    assert (repair.stage, repair.step, repair.cause) == ("denoise", 2, "memory")
    assert "on rank 0" in repair.text
    assert "guidance branches run one after the other" in repair.to
    steps = [e.step for e in events if isinstance(e, Step) and e.stage == "denoise"]
    assert steps == [1, 2, 3, 4], "what was kept is not done again"
    (done,) = [event for event in events if isinstance(event, VideoDone)]
    assert [each["to"] for each in done.record["repairs"]] == [repair.to]
    assert ["branches_at_once", 1] in [list(e) for e in done.record["settings"]["savings"]]
    found, wanted = frames_by_seed(events)[5], frames_by_seed(whole)[5]
    assert np.abs(found - wanted).max() <= ROUNDING * np.abs(wanted).max()
    assert not list((tmp_path / "runs").iterdir())
