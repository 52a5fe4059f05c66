"""Real workers and servers are killed at random moments: every job comes out with the same bits."""

from __future__ import annotations

import random
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from everyframe.runs.folder import all_runs
from helpers.server_process import ServerProcess

pytest.importorskip("fastapi", reason="serving needs the extra everyframe[server]")

OPTIONS: dict[str, Any] = {
    "num_frames": 8, "size": "64x64", "num_inference_steps": 400, "seed": 7,
}  # fmt: skip


def saved_steps(folder: Path, job: str) -> int:
    """Steps of the denoiser that the run of a job has saved, of which nobody saves more."""
    (run,) = all_runs(folder / "runs" / job)
    state = run.state()
    assert state is not None
    assert state["stage"] == 1, "in the denoiser"
    return int(state["takes"][0]["step"])


def is_going(job: dict[str, Any]) -> bool:
    return job["phase"] == "denoise" and (job["step"] or 0) > 5


def content(server: ServerProcess, job: str) -> bytes:
    status, video = server.ask(f"/v1/videos/{job}/content")
    assert status == 200
    assert isinstance(video, bytes)
    return video


def kill_workers(server: ServerProcess) -> list[psutil.Process]:
    workers = server.workers()
    for worker in workers:
        worker.kill()
    return workers


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """Context: the server process stands still."""
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_kills_at_random_moments_change_no_bit(tmp_path: Path) -> None:
    folder, moments = tmp_path / "data", random.Random()
    server = ServerProcess(folder)
    try:
        unbroken = server.create(**OPTIONS)
        server.wait_for(unbroken, "completed", 180)
        whole = content(server, unbroken)
        jobs: dict[str, str] = {}
        for what in ("worker", "server", "both"):
            jobs[what] = job = server.create(**OPTIONS)
            later = server.create(**{**OPTIONS, "num_inference_steps": 2})
            server.wait_for(job, is_going, 120)
            time.sleep(moments.uniform(1.2, 2.5))
            assert server.ask(f"/v1/videos/{job}")[1]["status"] == "in_progress"
            workers = server.workers()
            if what == "worker":
                with stopped(server):  # nobody resumes it before we have looked
                    kill_workers(server)
                    psutil.wait_procs(workers, 5)
                    saved = saved_steps(folder, job)
            else:
                if what == "both":
                    kill_workers(server)
                server.kill()
                _, alive = psutil.wait_procs(workers, 5)
                assert not alive, "workers end with their server"
                saved = saved_steps(folder, job)
                server = ServerProcess(folder)
            done = server.wait_for(job, "completed", 180)
            assert done["resumed_from_step"] == saved > 5, what
            assert content(server, job) == whole, f"{what}: resumed at {done['resumed_from_step']}"
            server.wait_for(later, "completed", 60)
        listed = server.ask("/v1/videos?limit=100")[1]["data"]
        assert len(listed) == 7
        assert {each["status"] for each in listed} == {"completed"}
        assert not list((folder / "runs").iterdir())
        assert server.stop()[0] == 0
    finally:
        if server.process.poll() is None:
            server.kill()


@pytest.mark.slow
def test_a_stop_with_an_open_stream_queues_the_job_which_then_has_the_same_bits(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "data"
    with ServerProcess(folder) as server:
        unbroken = server.create(**OPTIONS)
        server.wait_for(unbroken, "completed", 180)
        whole = content(server, unbroken)
        job = server.create(**OPTIONS)
        server.wait_for(job, is_going, 120)
        time.sleep(1.5)
        with urllib.request.urlopen(f"{server.url}/v1/videos/{job}/events", timeout=30) as stream:
            stream.readline()
            code, seconds = server.stop()
        assert code == 0
        assert seconds < 12
    saved = saved_steps(folder, job)
    with ServerProcess(folder) as server:
        assert server.next_line() == ("jobs of an earlier server: 1, of which 0 were interrupted\n")
        done = server.wait_for(job, "completed", 180)
        assert done["resumed_from_step"] == saved > 5
        assert content(server, job) == whole


@pytest.mark.slow
def test_a_job_cancelled_in_a_step_leaves_a_warm_worker(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        job = server.create(**{**OPTIONS, "num_inference_steps": 2000})
        server.wait_for(job, is_going, 120)
        began = time.monotonic()
        status, now = server.ask(f"/v1/videos/{job}/cancel", {})
        while now["status"] == "in_progress":
            now = server.ask(f"/v1/videos/{job}")[1]
        assert (status, now["status"]) == (200, "cancelled")
        assert time.monotonic() - began < 5
        again = server.create(**{**OPTIONS, "num_inference_steps": 2})
        server.wait_for(again, "completed", 60)
        status, now = server.ask(f"/v1/videos/{job}/retry", {})
        assert (status, now["status"]) == (200, "queued")
        server.wait_for(job, is_going, 120)
        assert server.ask(f"/v1/videos/{job}", method="DELETE")[0] == 200
        assert server.ask(f"/v1/videos/{job}")[0] == 404
        assert not (tmp_path / "data" / "runs" / job).exists()


@pytest.mark.slow
def test_a_killed_server_leaves_nothing_outside_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary files of a job are deleted with it, also by the server that comes after."""
    others = tmp_path / "temporary"
    others.mkdir()
    monkeypatch.setenv("TMPDIR", str(others))
    folder = tmp_path / "data"
    with ServerProcess(folder) as server:
        job = server.create(**{**OPTIONS, "num_inference_steps": 4000})
        server.wait_for(job, is_going, 120)
        server.kill()
    assert not [*others.glob("everyframe-*")]
    assert [*(folder / "runs" / job).glob("everyframe-*")], "there it has some"
    with ServerProcess(folder) as server:
        assert server.ask(f"/v1/videos/{job}", method="DELETE")[0] == 200
        assert not [*(folder / "runs").iterdir()]
