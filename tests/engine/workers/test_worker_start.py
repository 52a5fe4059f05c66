"""Workers started ahead of their jobs: taken once, ended unused, their errors the job's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everyframe.cli.main import main
from everyframe.core.child_environment import WAIT_POLICY
from everyframe.core.errors import InputError
from everyframe.core.events import Planned
from everyframe.core.request import Request
from everyframe.engine.workers import worker_start
from everyframe.engine.workers.launcher import run_in_workers
from everyframe.engine.workers.worker_process import Worker, WorkerJob
from everyframe.hardware import cpu

PLANS = WorkerJob(Request(prompt="a red circle"), plans=True)
VARIABLE = "TORCH_LOGS"


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    worker_start.end_unused()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environment of each worker that a command starts ahead; none is started."""
    found: list[dict[str, str]] = []
    monkeypatch.delenv(worker_start.IN_PROCESS, raising=False)
    monkeypatch.setattr(worker_start, "start_ahead", lambda: found.append({**os.environ}))
    return found


def test_the_next_worker_is_the_one_that_was_started_ahead() -> None:
    worker_start.start_ahead()
    (ahead,) = worker_start._AHEAD
    workers = [Worker(), Worker()]
    try:
        assert [each.process_id == ahead.process.pid for each in workers] == [True, False]
    finally:
        for each in workers:
            each.kill()


def test_it_runs_its_job_after_a_wait() -> None:
    worker_start.start_ahead()
    (ahead,) = worker_start._AHEAD
    assert not ahead.connection.poll(1), "it waits, and has nothing to say"
    (planned,) = run_in_workers(PLANS)
    assert isinstance(planned, Planned)
    assert ahead.process.wait(20) == 0


def test_it_ends_where_no_job_came() -> None:
    worker_start.start_ahead()
    (ahead,) = worker_start._AHEAD
    worker_start.end_unused()
    assert ahead.process.poll() is not None
    assert ahead.connection.closed


def test_what_its_imports_raise_is_the_error_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "garbage")
    worker_start.start_ahead()
    with pytest.raises(InputError, match=VARIABLE):
        list(run_in_workers(PLANS))


def test_a_command_with_a_wrong_option_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[subprocess.Popen[bytes]] = []
    begin = worker_start._start

    def start() -> worker_start.StartedWorker:
        started = begin()
        made.append(started.process)
        return started

    monkeypatch.delenv(worker_start.IN_PROCESS, raising=False)
    monkeypatch.setattr(worker_start, "_start", start)
    assert main(["generate", "a red circle", "--size", "3x"]) == 2
    assert [each.poll() is None for each in made] == [False]


def test_a_worker_ahead_has_the_settings_of_the_users_file(
    starts: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "everyframe.toml"
    file.write_text('[settings]\nruns = "kept"\n', encoding="utf-8")
    monkeypatch.setenv("EVERYFRAME_CONFIG", str(file))
    monkeypatch.delenv("EVERYFRAME_RUNS", raising=False)
    assert main(["generate", "a red circle", "--size", "3x"]) == 2
    assert starts[0]["EVERYFRAME_RUNS"].endswith("kept")
    assert "EVERYFRAME_RUNS" not in os.environ


@pytest.mark.parametrize(
    "words",
    [["plan"], ["generate", "--dry-run"], ["generate", "--as=cuda-sm75"], ["resume", "--list"]],
)
def test_commands_that_make_nothing_start_none(
    words: list[str], starts: list[dict[str, str]]
) -> None:
    assert main([*words, "--no-such-option"]) == 2
    assert starts == []


def test_a_command_that_is_to_compute_by_itself_starts_none(
    starts: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(worker_start.IN_PROCESS, "1")
    assert main(["generate", "--no-such-option"]) == 2
    assert starts == []


@pytest.mark.parametrize("command", ["generate", "resume"])
def test_commands_that_run_something_start_one(command: str, starts: list[dict[str, str]]) -> None:
    assert main([command, "--no-such-option"]) == 2
    assert len(starts) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("is_busy", [True, False])
def test_its_threads_sleep_while_they_wait_where_others_use_the_cores(
    is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    monkeypatch.setattr(cpu, "is_busy", lambda: is_busy)
    worker_start.start_ahead()
    (ahead,) = worker_start._AHEAD
    place = Path(f"/proc/{ahead.process.pid}/environ")
    while not (text := place.read_bytes()):  # empty until the program has begun
        time.sleep(0.01)
    found = text.split(b"\0")
    assert (f"{WAIT_POLICY}=passive".encode() in found) == is_busy


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_is_left_to_the_parent_from_the_first_moment() -> None:
    """Else it would end Python in its start, with a traceback."""
    worker_start.start_ahead()
    (ahead,) = worker_start._AHEAD
    ahead.process.send_signal(signal.SIGINT)
    status, began = Path(f"/proc/{ahead.process.pid}/status"), time.monotonic()
    while not _has_interrupt(status, "SigIgn") or _has_interrupt(status, "SigBlk"):
        assert ahead.process.poll() is None, "it has ended"
        assert time.monotonic() < began + 60
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def _has_interrupt(status: Path, name: str) -> bool:
    """Whether that mask of a process has SIGINT in it."""
    mask = int(status.read_text().split(f"{name}:")[1].split()[0], 16)
    return bool(mask & 1 << (signal.SIGINT - 1))
