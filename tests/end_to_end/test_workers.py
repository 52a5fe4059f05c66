"""Worker processes: they do what this process would do; the error when one dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

import everyframe
from everyframe.core.errors import InputError, WorkerDiedError
from everyframe.core.events import Event, FramesDecoded, Step
from everyframe.core.facts import MachineFacts
from everyframe.engine import run
from everyframe.engine.resumption import resume
from everyframe.engine.workers import worker_monitor
from everyframe.engine.workers.flight_recorder import (
    FlightRecorder,
    LastPosition,
    read_last_position,
)
from everyframe.engine.workers.launcher import run_in_workers
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.hardware.facts import MachineQuery
from everyframe.hardware.isolation import ProcessResult
from everyframe.hardware.profiles import find_profile
from everyframe.runs.folder import RunFolder, all_runs
from everyframe.runs.run_state import EVERY_STEP

PLANTED = Path(__file__).parents[1] / "helpers" / "planted"
OPTIONS: dict[str, Any] = {
    "prompt": "a red circle", "size": "16x16", "num_frames": 3, "num_inference_steps": 4, "seed": 3,
}  # fmt: skip


def job(model: str, root: Path, **options: Any) -> WorkerJob:
    request = everyframe.Request(**{"model": model, **OPTIONS, **options})
    pace = (EVERY_STEP.pause, EVERY_STEP.share)
    return WorkerJob(request, root=root, pace=pace)


def frames(events: list[Event]) -> np.ndarray[Any, Any]:
    return np.concatenate([e.frames for e in events if isinstance(e, FramesDecoded)])


@pytest.mark.slow
def test_a_worker_that_dies_is_named_and_its_run_goes_on(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies of SIGFPE in a step; what was computed here in one go is the measure."""
    path = os.pathsep.join([str(PLANTED), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("PLANTED", "SIGFPE:STDiT3:3")
    asked = MachineQuery(find_profile("h20-cublas12.1").machine(), ProcessResult())
    monkeypatch.setattr(worker_monitor, "query_machine", lambda: asked)
    with pytest.raises(WorkerDiedError) as died:
        list(run_in_workers(job(model, tmp_path)))
    text = str(died.value)
    (kept,) = all_runs(tmp_path)
    found = re.search(
        r"died of SIGFPE in step (\d) of 4 of denoise, in denoiser\.final_layer\S* \(\w+\) on "
        r"[0-9x]+ float32;",
        text,
    )
    assert found, text
    assert "cuBLAS 12.1.3" in text
    assert "h20-cublas121-sigfpe" in text
    assert "pip install nvidia-cublas-cu12==" in text
    assert f"everyframe resume {kept.name}" in text
    monkeypatch.delenv("PLANTED")
    again = list(resume.resume_run(kept))
    whole = list(run.stream(everyframe.Request(model=model, **OPTIONS)))
    np.testing.assert_array_equal(frames(again), frames(whole))
    assert not list(all_runs(tmp_path))
    steps = [e.step for e in again if isinstance(e, Step) and e.stage == "denoise"]
    assert steps == list(range(int(found[1]), 5)), "what was done is not done again"


def test_an_error_in_a_worker_is_the_error_here(model: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="height must be a multiple of"):
        list(run_in_workers(job(model, tmp_path, size="17x17")))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_worker_gives_the_bits_of_this_process(model: str, tmp_path: Path) -> None:
    theirs = list(run_in_workers(job(model, tmp_path)))
    ours = list(run.stream(everyframe.Request(model=model, **OPTIONS)))
    np.testing.assert_array_equal(frames(theirs), frames(ours))
    kinds = [[e.type for e in each if e.type != "kept"] for each in (theirs, ours)]
    assert kinds[0] == kinds[1]
    assert not list(all_runs(tmp_path))


@pytest.mark.slow
def test_no_worker_outlives_who_started_it(model: str, tmp_path: Path) -> None:
    program = (
        "import everyframe, sys, os\n"
        "from everyframe.engine.workers.launcher import run_in_workers\n"
        "from everyframe.engine.workers.worker_process import WorkerJob\n"
        f"request = everyframe.Request(model={model!r}, **{OPTIONS!r})\n"
        "for event in run_in_workers(WorkerJob(request)):\n"
        "    print(event.type, flush=True)\n"
        "    if event.type == 'step': os.kill(os.getpid(), 9)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "planned\n"
    (worker,) = psutil.Process(process.pid).children()
    assert process.wait(60) == -signal.SIGKILL
    process.stdout.close()
    worker.wait(120)


def test_a_worker_that_the_system_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path))
    FlightRecorder(tmp_path / "trail-1").at("decode", 2, 5)
    worker: Any = SimpleNamespace(
        recorder_file=tmp_path / "trail-1",
        job=WorkerJob(rank=1, weights=(1.0, 1.0)),
        read_output=lambda: "",
    )
    run = RunFolder(tmp_path / "this-run")
    text = str(worker_monitor.crash_error(worker, -signal.SIGKILL, run))
    assert text.startswith("the worker process of rank 1 died of SIGKILL in step 2 of 5 of decode;")
    assert "memory ran out" in text
    assert "resume" not in text, "nothing is saved"
    run.path.mkdir()
    run.write_run({})
    text = str(worker_monitor.crash_error(worker, -signal.SIGKILL, run))
    assert text.endswith("everyframe resume this-run")


def test_a_worker_without_threads(tmp_path: Path) -> None:
    printed = "libgomp: Thread creation failed: Resource temporarily unavailable"
    worker: Any = SimpleNamespace(
        recorder_file=tmp_path / "none", job=WorkerJob(), read_output=lambda: printed
    )
    text = str(worker_monitor.crash_error(worker, 1, None))
    assert "ended with exit code 1 before its first stage; the system lets" in text
    assert "ulimit -u" in text


_LIMITED = """
import resource, sys
from pathlib import Path
from everyframe.core.errors import MediaError
from everyframe.engine.workers.flight_recorder import FlightRecorder
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
try:
    trail = FlightRecorder(Path(sys.argv[2]))
    for number in range(1000):
        trail.learn(f"blocks.{number}")
except MediaError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits are POSIX")
@pytest.mark.parametrize(("limit", "name"), [(1000, "trail"), (5000, "trail.names")])
def test_a_trail_that_can_not_be_written_is_named(limit: int, name: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(limit), str(tmp_path / "trail")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.startswith(f"can't write {str(tmp_path / name)!r}"), run.stdout
    assert "File too large; raise the limit of ulimit -f" in run.stdout


def test_what_the_trail_says(tmp_path: Path) -> None:
    trail = FlightRecorder(tmp_path / "trail")
    assert str(read_last_position(tmp_path / "trail")) == "before its first stage"
    trail.at("denoise", 3, 30)
    linear, dtype = trail.learn("denoiser.blocks.0.attn.qkv (Linear)"), trail.learn("bfloat16")
    assert read_last_position(tmp_path / "trail").module == ""
    trail.enter(linear, dtype, (2, 1024, 1152))
    found = read_last_position(tmp_path / "trail")
    assert found == LastPosition(
        "denoise", 3, 30, "denoiser.blocks.0.attn.qkv (Linear)", "2x1024x1152 bfloat16"
    )
    assert str(found) == (
        "in step 3 of 30 of denoise, in denoiser.blocks.0.attn.qkv (Linear) on 2x1024x1152 bfloat16"
    )
    trail.enter(linear, 0, range(9))
    assert read_last_position(tmp_path / "trail").operand == "0x1x2x3x4x5"


@pytest.mark.parametrize("damage", [b"", b"\xff" * 4096])
def test_a_trail_that_is_damaged_says_nothing(damage: bytes, tmp_path: Path) -> None:
    FlightRecorder(tmp_path / "trail")
    (tmp_path / "trail").write_bytes(damage)
    assert read_last_position(tmp_path / "trail") == LastPosition()


@pytest.mark.parametrize(
    ("profile", "signal_name", "is_known"),
    [
        ("h20-cublas12.1", "SIGFPE", True),
        ("h20-cublas12.1", "SIGBUS", False),
        ("h20-cublas12.5.2.13", "SIGFPE", False),
        ("a100-oneflow", "SIGFPE", False),
    ],
)
def test_the_known_issue_of_a_death(profile: str, signal_name: str, is_known: bool) -> None:
    machine: MachineFacts = find_profile(profile).machine()
    assert (worker_monitor.matching(machine, signal_name, "") is not None) == is_known


@pytest.mark.slow
def test_several_devices_from_a_process_without_a_script(model: str, tmp_path: Path) -> None:
    """As at a prompt: what is typed comes by standard input, and there is no file to import."""
    options = {**OPTIONS, "model": model, "num_devices": 2, "device": "cpu", "run_dir": "off"}
    program = (
        "import everyframe, numpy\n"
        f"video = everyframe.generate(**{options!r})\n"
        f"numpy.save({str(tmp_path / 'frames.npy')!r}, video.frames)\n"
    )
    done = subprocess.run([sys.executable], input=program, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0
    here = everyframe.generate(**options)
    assert isinstance(here, everyframe.Video)
    np.testing.assert_array_equal(np.load(tmp_path / "frames.npy"), here.frames)
