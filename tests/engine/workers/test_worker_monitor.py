"""A rank that hangs is found and named, one that only computes for long is not.

The clock and the processor's time of made-up workers are given by the test; their trails are real
files.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everyframe.core.errors import MediaError, WorkerDiedError
from everyframe.engine.workers import worker_monitor
from everyframe.engine.workers.flight_recorder import FlightRecorder, read_last_position
from everyframe.engine.workers.worker_monitor import HangDetector


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Seconds of a core that each made-up process has used."""
    seconds = dict.fromkeys(range(3), 0.0)
    monkeypatch.setattr(worker_monitor, "_core_seconds", lambda process: seconds[process])
    monkeypatch.setattr(worker_monitor, "_bytes_read", lambda process: 0)
    monkeypatch.setattr(worker_monitor, "_state", lambda process: "S")
    return seconds


def workers(folder: Path) -> tuple[list[Any], list[FlightRecorder]]:
    """Three ranks in their first step."""
    made = [
        SimpleNamespace(
            job=SimpleNamespace(rank=rank), process_id=rank, recorder_file=folder / str(rank)
        )
        for rank in range(3)
    ]
    trails = [FlightRecorder(each.recorder_file) for each in made]
    for trail in trails:
        trail.at("denoise", 1, 30)
    return made, trails


class Clock:
    """In place of the system's, so that no test depends on how busy the machine is."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(worker_monitor, "time", made)
    return made


def watch(made: list[Any], clock: Clock, num_looks: int = 20) -> None:
    """Ask again and again, as the launcher does, for four times as long as it has patience."""
    watching = HangDetector(made, seconds=10.0)
    for _ in range(num_looks):
        watching.check(made)
        clock.now += 2.0


def test_the_rank_that_the_others_wait_for_is_named(
    tmp_path: Path, used: dict[int, float], clock: Clock
) -> None:
    made, trails = workers(tmp_path)
    for rank in (0, 2):
        trails[rank].wait("frames are gathered")
    with pytest.raises(WorkerDiedError, match=r"rank 1 did nothing for .* in step 1 of 30 of den"):
        watch(made, clock)


def test_a_rank_that_was_stopped_is_named_wherever_it_is(
    tmp_path: Path, used: dict[int, float], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    made, trails = workers(tmp_path)
    for trail in trails:
        trail.wait("frames are gathered")
    monkeypatch.setattr(worker_monitor, "_state", lambda process: "T" if process == 2 else "S")
    with pytest.raises(WorkerDiedError, match="rank 2 did nothing"):
        watch(made, clock)


def test_a_run_that_was_stopped_as_a_whole_goes_on(
    tmp_path: Path, used: dict[int, float], clock: Clock
) -> None:
    """Ctrl-Z stops this process too, which sees the clock jump, and no rank at work meanwhile."""
    made, _ = workers(tmp_path)
    watching = HangDetector(made, seconds=10.0)
    watching.check(made)
    clock.now += 600.0
    watching.check(made)
    clock.now += 9.0
    watching.check(made)
    clock.now += 1.0
    with pytest.raises(WorkerDiedError, match="rank 0 did nothing for 10 s"):
        watching.check(made)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone tells it")
def test_this_process_is_seen_to_compute() -> None:
    """The system's own numbers: this process runs, and has used a core for a while."""
    assert worker_monitor._state(os.getpid()) in ("R", "S", "D")
    assert 0.01 < (worker_monitor._core_seconds(os.getpid()) or 0) < 1e6
    before = worker_monitor._bytes_read(os.getpid())
    with open("/dev/zero", "rb", buffering=0) as file:
        file.read(2**20)
    assert worker_monitor._bytes_read(os.getpid()) >= before + 2**20


def test_a_rank_that_computes_for_long_is_waited_for(
    tmp_path: Path, used: dict[int, float], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    made, trails = workers(tmp_path)
    trails[0].wait("frames are gathered")
    trails[2].wait("frames are gathered")
    begun = clock.now
    monkeypatch.setattr(
        worker_monitor, "_core_seconds", lambda rank: (clock.now - begun) * (rank == 1)
    )
    watch(made, clock)


def test_a_rank_that_reads_is_waited_for_while_bytes_come(
    tmp_path: Path, used: dict[int, float], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Much slower than a core could be kept busy by, and no tensor is whole yet."""
    made, trails = workers(tmp_path)
    trails[0].wait("frames are gathered")
    trails[2].wait("frames are gathered")
    begun = clock.now
    read = {"bytes": 1e5}
    monkeypatch.setattr(
        worker_monitor,
        "_bytes_read",
        lambda rank: int((clock.now - begun) * read["bytes"]) * (rank == 1),
    )
    watch(made, clock)
    read["bytes"] = 10.0  # a message now and then is no reading
    with pytest.raises(WorkerDiedError, match="rank 1 did nothing for"):
        watch(made, clock)


@pytest.mark.parametrize("sign", ["a read of weights", "state D"])
def test_a_disk_that_gives_nothing_is_waited_for_minutes_and_not_for_ever(
    sign: str, tmp_path: Path, used: dict[int, float], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    made, trails = workers(tmp_path)
    trails[0].wait("frames are gathered")
    trails[2].wait("frames are gathered")
    if sign == "state D":
        monkeypatch.setattr(worker_monitor, "_state", lambda process: "D" if process == 1 else "S")
    else:
        trails[1].read(True)
    watch(made, clock, num_looks=140)
    with pytest.raises(WorkerDiedError, match=r"rank 1 did nothing for 3\d\d s in step 1 of 30"):
        watch(made, clock, num_looks=180)


def test_a_rank_that_hangs_after_it_has_read_is_named(
    tmp_path: Path, used: dict[int, float], clock: Clock
) -> None:
    made, trails = workers(tmp_path)
    for begins in (True, True, False, False):  # in two threads
        trails[1].read(begins)
    assert not read_last_position(made[1].recorder_file).is_reading
    trails[0].wait("frames are gathered")
    trails[2].wait("frames are gathered")
    with pytest.raises(WorkerDiedError, match="rank 1 did nothing"):
        watch(made, clock)


def test_a_rank_before_its_first_stage_is_waited_for(
    tmp_path: Path, used: dict[int, float], clock: Clock
) -> None:
    """It may wait for processes of its own, in which fast paths are tried."""
    made, trails = workers(tmp_path)
    trails[0] = FlightRecorder(made[0].recorder_file)
    for rank in (1, 2):
        trails[rank].wait("ranks meet")
    watch(made, clock)


def test_ranks_that_wait_for_each_other_are_reported(
    tmp_path: Path, used: dict[int, float], clock: Clock
) -> None:
    made, trails = workers(tmp_path)
    for trail, what in zip(trails, ("ranks meet", "frames are gathered", "x"), strict=True):
        trail.wait(what)
    with pytest.raises(WorkerDiedError, match="rank 0 while ranks meet; rank 1 while frames are"):
        watch(made, clock)


def test_who_goes_on_is_left_alone(tmp_path: Path, used: dict[int, float], clock: Clock) -> None:
    made, trails = workers(tmp_path)
    watching = HangDetector(made, seconds=10.0)
    for step in range(2, 15):
        trails[0].at("denoise", step, 30)
        watching.check(made)
        clock.now += 3.0


def test_a_trail_says_what_is_waited_for(tmp_path: Path) -> None:
    trail = FlightRecorder(tmp_path / "trail")
    trail.wait("ranks meet")
    assert read_last_position(tmp_path / "trail").waiting == "ranks meet"
    trail.at("denoise", 2, 5)
    trail.wait("frames are gathered")
    found = read_last_position(tmp_path / "trail")
    assert (found.stage, found.waiting) == ("denoise", "frames are gathered")
    trail.wait("")
    assert read_last_position(tmp_path / "trail").waiting == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is planted by /dev/full")
def test_closing_does_not_hide_the_error_of_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "trail.names").symlink_to("/dev/full")
    trail = FlightRecorder(tmp_path / "trail")
    with pytest.raises(MediaError, match=r"trail\.names', the flight recorder .* TMPDIR"):
        trail.learn("module")
    trail.close()
