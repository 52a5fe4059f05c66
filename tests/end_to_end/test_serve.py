"""``everyframe serve`` as a process: it begins, is killed, comes back, drains, refuses.

A made-up executor takes the steps here; `test_serve_kills.py` kills real workers.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from everyframe.cli import main as command_line
from everyframe.cli import serve
from everyframe.media.read import read_video
from helpers.fake_executor import NUM_STEPS, frames_of
from helpers.server_process import ServerProcess

pytest.importorskip("fastapi", reason="serving needs the extra everyframe[server]")

OPTIONS = {"num_frames": 4, "size": "64x64"}


def test_a_bare_server_serves_this_machine_alone_without_torch(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        assert server.url.startswith("http://127.0.0.1:")
        listening = [c for c in psutil.Process(server.process.pid).net_connections()
                     if c.status == psutil.CONN_LISTEN]  # fmt: skip
        assert {c.laddr.ip for c in listening} == {"127.0.0.1"}
        assert len(listening) == 1
        assert server.ask("/health")[0] == 200
        assert server.ask("/v1/models")[1]["data"][0]["id"] == "shapes"
        maps = Path(f"/proc/{server.process.pid}/maps")
        if maps.exists():
            assert "libtorch" not in maps.read_text()
        assert server.workers() == [], "nothing is started before it is asked for"
        assert server.stop()[0] == 0


def test_a_killed_server_comes_back_and_goes_on_at_its_step(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with ServerProcess(folder, pause=0.3) as server:
        running = server.create(seed=1, **OPTIONS)
        waiting = server.create(seed=2, **OPTIONS)
        server.wait_for_steps(2)
        server.kill()
    with ServerProcess(folder, pause=0.0) as server:
        done = server.wait_for(running, "completed")
        server.wait_for(waiting, "completed")
        assert server.steps() == [[s, n + 1] for s in (1, 2) for n in range(NUM_STEPS)]
        assert done["resumed_from_step"] >= 1
        status, video = server.ask(f"/v1/videos/{running}/content")
        assert status == 200
        file = tmp_path / "video.mp4"
        file.write_bytes(video)
        assert abs(read_video(file)[0].astype(int) - frames_of(1)).max() < 12


@pytest.fixture
def hangup_ends() -> Iterator[None]:
    """Processes started by a test get SIGHUP, also where ``nohup`` runs the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup_ends")
@pytest.mark.parametrize("by", ["SIGTERM", "SIGHUP"])  # the second: its terminal was closed
def test_a_stop_with_an_open_event_stream_ends_in_time_and_queues_the_job(
    tmp_path: Path, by: str
) -> None:
    heard: list[bytes] = []
    with ServerProcess(tmp_path / "data", pause=0.2) as server:
        job = server.create(seed=1, **OPTIONS)
        server.wait_for(job, "in_progress")
        stream = urllib.request.urlopen(f"{server.url}/v1/videos/{job}/events", timeout=30)
        thread = threading.Thread(target=lambda: heard.extend(stream))
        thread.start()
        server.wait_for_steps(1)
        code, seconds = server.stop(by=getattr(signal, by))
        thread.join(10)
        stream.close()
        assert code == 0
        assert seconds < 15, "five for connections, and what a busy machine adds"
        assert b"event: draining\n" in heard
    with ServerProcess(tmp_path / "data", pause=0.0) as server:
        assert server.wait_for(job, "completed")["resumed_from_step"] >= 1
        assert server.steps() == [[1, step + 1] for step in range(NUM_STEPS)]


@pytest.mark.slow
def test_a_stop_may_give_running_jobs_time(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", "--drain", "30s", pause=0.2) as server:
        job = server.create(seed=1, **OPTIONS)
        server.wait_for(job, "in_progress")
        assert server.stop()[0] == 0
    assert (tmp_path / "data" / "videos" / job / "video.mp4").exists()


@pytest.mark.slow
def test_a_second_signal_ends_that_time(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", "--drain", "10m", pause=60) as server:
        job = server.create(seed=1, **OPTIONS)
        server.wait_for(job, "in_progress")
        server.process.terminate()
        while server.ask("/ready")[0] != 503:
            time.sleep(0.02)
        assert server.ask("/v1/videos", {"prompt": "a red circle"})[0] == 503
        assert server.stop()[0] == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--host", "0.0.0.0"], "reachable from other machines, and there are no keys"),
        (["--drain", "soon"], "drain must be a time such as 30s"),
        (["--port", "http"], "port must be a whole number"),
        (["--port", "70000"], "port must be 0 to 65535, got 70000"),
        (["--groups", "0,;"], "groups must be lists of devices"),
        (["--executor", "magic"], "executor must be one of workers, ray, got 'magic'"),
        (["--ray-address", "auto"], "--ray-address needs --executor ray"),
        (["--place-timeout", "9s"], "--place-timeout needs --executor ray"),
        (["--max-upload", "much"], "max-upload must be an amount"),
        (["--loras", "/no/such/folder"], "loras must be a folder"),
        (["--api-keys", "/no/such/file"], "the file of keys '/no/such/file' can't be read"),
        (["--models", "no-such-model"], "no-such-model"),
        (["--cors-origin", "*"], "cors-origin must be an exact origin"),
        (["--max-batch", "0"], "max-batch must be a whole number, 1 or more, got '0'"),
        (["--max-attempts", "0"], "max-attempts must be a whole number, 1 or more"),
        (["--allowed-hosts", "a.org:8000"], "allowed-hosts must be a name or an address such as"),
        (["--allow-url-inputs", "https://a.org"], "allow-url-inputs must be a name or an address"),
    ],
)
def test_wrong_flags_are_one_line(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = command_line.main(["serve", "--data-dir", str(tmp_path / "data"), *words])
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1), error
    assert text in error


def test_a_port_in_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        words = ["serve", "--data-dir", str(tmp_path / "data"), "--port", port]
        assert command_line.main(words) == 2
    error = capsys.readouterr().err
    assert f"can't listen on 127.0.0.1 port {port} (Address already in use); give another" in error
    # And the folder is free again.
    assert not list((tmp_path / "data" / "runs").iterdir())


@pytest.mark.slow
def test_a_second_server_of_a_folder_is_refused(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", pause=0.0):
        words = [sys.executable, "-m", "everyframe", "serve", "--port", "0", "--data-dir"]
        result = subprocess.run(
            [*words, str(tmp_path / "data")], capture_output=True, text=True, timeout=60
        )
    assert result.returncode == 1
    assert "is in use by another process" in result.stderr


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a place where nobody may write")
def test_a_folder_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["serve", "--data-dir", "/proc/everyframe"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the data folder '/proc/everyframe' can't be written (")
    assert error.count("\n") == 1


@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="needs Linux's limits")
def test_a_full_disk_is_answered_and_loses_nothing(tmp_path: Path) -> None:
    """No file may grow, which the system reports as it does a full quota."""
    with ServerProcess(tmp_path / "data", pause=0.2) as server:
        running, waiting = (server.create(seed=seed, **OPTIONS) for seed in (1, 2))
        server.wait_for_steps(1)
        process = psutil.Process(server.process.pid)
        before = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (1, before[1]))
        status, refused = server.ask("/v1/videos", {"prompt": "a red circle", **OPTIONS})
        assert (status, refused["error"]["code"]) == (503, "storage_unavailable"), refused
        assert server.ask("/ready")[0] == 503
        assert server.ask("/health")[0] == 200
        time.sleep(1)  # its next steps meet the full disk
        for job in (running, waiting):
            status, found = server.ask(f"/v1/videos/{job}")
            assert status == 200
            assert found["status"] in ("queued", "in_progress")
        process.rlimit(psutil.RLIMIT_FSIZE, before)
        assert server.wait_for(running, "completed")["error"] is None
        server.wait_for(waiting, "completed")
        assert server.ask("/ready")[0] == 200
        assert server.create(seed=3, **OPTIONS)


def test_without_the_extra_it_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_PACKAGES", ("no_such_package",))
    assert command_line.main(["serve", "--data-dir", str(tmp_path / "data")]) == 2
    error = capsys.readouterr().err
    assert error == ("error: serving needs no_such_package: pip install 'everyframe[server]'\n")
