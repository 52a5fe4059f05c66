"""How a worker is started: nothing beside the user or the script is imported in its place."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everyframe.core.child_environment import HUGE_PAGES, ONE_ARENA, WAIT_POLICY, child_environment
from everyframe.core.errors import (
    CannotRunError,
    CorruptRunError,
    InputError,
    MediaError,
    NumericsError,
)
from everyframe.core.facts import DeviceFacts
from everyframe.core.paths import is_disk_full
from everyframe.core.request import Request
from everyframe.core.safe_path import SAFE_PATH_VARIABLE
from everyframe.engine.workers import launcher, worker_process
from everyframe.engine.workers.error_transfer import error_data, error_from, with_resume_hint
from everyframe.engine.workers.launcher import run_in_workers
from everyframe.engine.workers.warm_workers import WarmWorkers
from everyframe.engine.workers.worker_process import Worker, WorkerJob
from everyframe.runs.checksummed_json import write_json
from everyframe.runs.folder import SCHEMA, RunFolder
from helpers.shadowing_modules import plant


def test_a_module_in_the_current_folder_is_not_imported_by_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = plant(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="unknown model"):
        list(run_in_workers(WorkerJob(Request(prompt="a", model="no-such-model"))))
    assert not trace.exists()


@pytest.mark.parametrize("way", ["name", "module"])
def test_the_planted_modules_would_be_seen(tmp_path: Path, way: str) -> None:
    trace = plant(tmp_path / "here", ("queue",))
    words = ["-m", "queue"] if way == "module" else ["-c", "import queue"]
    subprocess.run([sys.executable, *words], cwd=tmp_path / "here", check=True)
    assert trace.exists()


def test_the_command_as_a_module_imports_none_of_them(tmp_path: Path) -> None:
    trace = plant(tmp_path / "here", ("queue", "torch", "numpy", "pydantic", "cyclopts"))
    command = [sys.executable, "-m", "everyframe", "plan", "a red circle", "--model", "nope"]
    done = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert not trace.exists()


def test_a_worker_is_found_where_the_package_was_found(tmp_path: Path) -> None:
    """Also where the caller alone put that folder on its path."""
    import everyframe

    source = str(Path(everyframe.__file__).parents[1])
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {source!r})\n"
        "from everyframe.core.request import Request\n"
        "from everyframe.engine.workers.launcher import run_in_workers\n"
        "from everyframe.engine.workers.worker_process import WorkerJob\n"
        "try:\n    list(run_in_workers(WorkerJob(Request(prompt='a', model='no-such-model'))))\n"
        "except Exception as error: print(type(error).__name__)\n",
        encoding="utf-8",
    )
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=plain, cwd=tmp_path
    )
    assert done.stdout.split() == ["InputError"], done.stderr


@pytest.mark.parametrize("name", ["UnicodeDecodeError", "UnicodeEncodeError", "ExceptionGroup"])
def test_errors_that_a_text_alone_does_not_make_keep_their_text(name: str) -> None:
    sent = {"class": name, "text": "byte 0xff at 3", "trace": "Traceback"}
    error = error_from(sent, 0)
    assert "byte 0xff at 3" in str(error)
    assert isinstance(error, Exception)


@pytest.mark.parametrize("kind", [MediaError, CannotRunError, RuntimeError, OSError])
def test_a_full_disk_is_one_in_the_process_that_hears_of_it(kind: type[Exception]) -> None:
    """So a server's job waits for room, and does not fail."""
    full = OSError(errno.ENOSPC, "No space left on device", "/a/file")
    error = full if kind is OSError else kind("can't write the file")
    if error is not full:
        error.__cause__ = full
    assert is_disk_full(error_from(error_data(error), 0))
    assert type(error_from(error_data(error), 0)) is kind
    assert not is_disk_full(error_from(error_data(MediaError("no video")), 0))


def test_any_ranks_error_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank's does by itself; which rank's comes first is chance."""
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path))
    run, error = RunFolder(tmp_path / "20261130-1"), CannotRunError("it failed in step 1")
    assert with_resume_hint(error, None) is with_resume_hint(error, run) is error
    run.path.mkdir()
    write_json(run.path / "run.json", {})
    hinted = with_resume_hint(error, run)
    assert isinstance(hinted, CannotRunError)
    assert str(hinted) == "it failed in step 1; resume it: everyframe resume 20261130-1"
    assert with_resume_hint(hinted, run) is hinted
    for vain in (InputError("no"), NumericsError("no"), RuntimeError("no")):
        assert with_resume_hint(vain, run) is vain
    assert str(with_resume_hint(MediaError("disk full"), run)).startswith("disk full; resume it")


def test_a_run_whose_plan_is_none_is_damaged(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"schema": SCHEMA, "plan": {"parallel": 1}})
    with pytest.raises(CorruptRunError, match="holds no plan"):
        launcher.ranks_of(RunFolder(tmp_path))


@pytest.mark.parametrize("executor", ["new workers", "warm workers"])
def test_more_ranks_than_memory_for_their_processes_are_refused_before_any_starts(
    executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """99 processes took all memory before one of them had planned."""
    small = DeviceFacts("a laptop", "cpu", None, 8 * 10**9, 2 * 10**9)
    monkeypatch.setattr(worker_process, "processor_facts", lambda: small)
    monkeypatch.setattr(worker_process, "take_worker", lambda: pytest.fail("a worker started"))
    run = run_in_workers if executor == "new workers" else WarmWorkers().run
    request = Request(prompt="a", num_devices=99)
    with pytest.raises(CannotRunError, match=r"a laptop has 2\.0 GB free; give fewer devices, 5"):
        list(run(WorkerJob(request).of_ranks(request.num_ranks, None)))


def test_a_message_that_a_worker_can_not_read_ends_it() -> None:
    """In place of a process that waits for a job for ever, and of a parent that waits for it."""
    worker = Worker()
    try:
        worker.connection.send_bytes(b'{"name": "job"}')
        assert worker.connection.poll(60), "it is still there"
        with pytest.raises(EOFError):
            worker.connection.recv_bytes()
        assert worker.end() == 1
    finally:
        worker.kill()


@pytest.mark.parametrize(
    ("name", "ours"), [(HUGE_PAGES, "1"), (ONE_ARENA, "1"), (WAIT_POLICY, "passive")]
)
def test_workers_compute_as_measured_unless_a_person_says_otherwise(
    name: str, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert child_environment(is_busy=True)[name] == ours
    monkeypatch.setenv(name, "0")
    given = child_environment(is_busy=True)
    assert given[name] == "0"
    assert given[SAFE_PATH_VARIABLE] == "1"


def test_threads_spin_where_each_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    assert WAIT_POLICY not in child_environment(is_busy=False)
