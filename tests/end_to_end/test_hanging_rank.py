"""A rank that hangs: the run ends within half a minute, names it, and leaves nothing behind.

Real runs that wait for fifteen seconds, so slow; what is decided by which signs is tested without
any in `tests/engine/workers/test_worker_monitor.py`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from everyframe import __file__ as package
from everyframe.engine.workers.worker_start import IN_PROCESS

SOURCE = Path(package).parents[1]
PLANTED = Path(__file__).parents[1] / "helpers" / "planted"
#: The issue's limit, from the moment at which a rank does nothing any more.
SECONDS = 30.0

pytestmark = pytest.mark.slow


class Run:
    """A run whose rank 1 hangs in its third call of the denoiser, watched to its end."""

    def __init__(self, model: str, place: Path, planted: str, *, by_torchrun: bool) -> None:
        words = [
            "generate", "a red circle", "--model", model, "--size", "40x24", "--num-frames", "20",
            "--steps", "4", "--seed", "5", "--device", "cpu", "-o", "out/", "--json",
            "--shard-weights",
        ]  # fmt: skip
        start = ["-m", "everyframe", *words, "--num-devices", "2"]
        if by_torchrun:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            start = ["-m", "torch.distributed.run", "--master-port", port, "--nproc-per-node", "2"]
            start += ["-m", "everyframe", *words]
        own = {
            "PYTHONPATH": os.pathsep.join([str(PLANTED), str(SOURCE)]), IN_PROCESS: "",
            "EVERYFRAME_RUNS": str(place / "runs"), "PLANTED": planted, "PLANTED_RANK": "1",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, *start], cwd=place, env={**os.environ, **own}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.processes: dict[int, float] = {}
        self.ports: set[int] = set()
        self._at_step = 0.0
        reader = threading.Thread(target=self._read)
        reader.start()
        assert self._process.stderr is not None
        self.errors = ""
        errors = threading.Thread(target=self._errors)
        errors.start()
        while self._process.poll() is None:
            self._look()
            time.sleep(0.3)
        self.seconds = time.monotonic() - self._at_step
        reader.join()
        errors.join()
        self.code = self._process.returncode

    def _errors(self) -> None:
        assert self._process.stderr is not None
        self.errors = self._process.stderr.read()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("type") == "step" and event.get("stage") == "denoise":
                self._at_step = time.monotonic()

    def _look(self) -> None:
        """Whose processes there are, and on which ports they listen."""
        for each in psutil.Process(self._process.pid).children(recursive=True):
            try:
                self.processes[each.pid] = each.create_time()
                found: list[Any] = each.net_connections(kind="inet")
            except psutil.Error:
                continue
            self.ports |= {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}

    def left_behind(self) -> list[int]:
        """Those of its processes that are still there."""
        return [
            pid
            for pid, began in self.processes.items()
            if psutil.pid_exists(pid) and psutil.Process(pid).create_time() == began
        ]


def test_a_slow_disk_is_no_hang(model: str, tmp_path: Path) -> None:
    """A tensor that takes longer than a rank is given in which it does nothing."""
    run = Run(model, tmp_path, "disk:.safetensors:22", by_torchrun=False)
    assert run.code == 0, run.errors
    assert list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("planted", ["hang:STDiT3:3", "SIGSTOP:STDiT3:3"])
@pytest.mark.parametrize("by_torchrun", [False, True], ids=["own workers", "torchrun"])
def test_a_rank_that_hangs_is_named_and_all_end(
    model: str, tmp_path: Path, planted: str, by_torchrun: bool
) -> None:
    run = Run(model, tmp_path, planted, by_torchrun=by_torchrun)
    errors = [line for line in run.errors.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, run.errors
    message = (
        r"rank 1 did nothing for \d+ s in step \d of 4 of denoise, in denoiser.*; all were ended"
    )
    assert re.search(message, errors[0]), errors
    assert run.seconds < SECONDS
    if by_torchrun:
        assert re.search(r"exitcode +: 5 ", run.errors), run.errors
    else:
        assert run.code == 5
    assert run.processes, "they were seen"
    assert run.left_behind() == []
    for port in run.ports:
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
    # How far it came is there, and the error says how to go on.
    (kept,) = (tmp_path / "runs").iterdir()
    assert f"everyframe resume {kept.name}" in run.errors
