"""The command under torchrun: each process is one rank, one of them speaks, all end alike.

Real torchruns are slow tests; what each process decides by itself is tested without one.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from everyframe import __file__ as package
from everyframe.cli.main import main
from everyframe.core.errors import InputError, PeerLostError, WorkerDiedError
from everyframe.engine.workers import torchrun as torchrun_module
from everyframe.engine.workers.torchrun import TorchrunRank, under_torchrun, write_error_file
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.engine.workers.worker_start import IN_PROCESS
from everyframe.media.read import read_video

SOURCE = Path(package).parents[1]
PLANTED = Path(__file__).parents[1] / "helpers" / "planted"
#: As torchrun sets it for the second of three ranks, two of which are on this machine.
SECOND = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}  # fmt: skip


def test_what_torchrun_says_is_read() -> None:
    assert under_torchrun({}) is None
    assert under_torchrun({"RANK": "1", "WORLD_SIZE": "3"}) is None, "that is somebody else's"
    ranks = under_torchrun(SECOND)
    assert ranks == TorchrunRank(1, 3, 1, 2)


def test_the_number_of_devices_is_that_of_the_ranks() -> None:
    ranks = TorchrunRank(1, 3, 1, 2)
    assert ranks.options({}) == {"num_devices": 3}
    assert ranks.options({"num_devices": "3"}) == {"num_devices": 3}
    assert ranks.options({"devices": "0,2"}) == {}
    with pytest.raises(InputError, match="num_devices asks for 4 and torchrun has started 3"):
        ranks.options({"num_devices": 4})
    with pytest.raises(InputError, match=r"devices asks for 3 and .* 2 ranks on this machine"):
        ranks.options({"devices": "0,1,2"})


def test_a_job_of_one_rank() -> None:
    job = WorkerJob().of_ranks(3, TorchrunRank(1, 3, 1, 2))
    assert (job.rank, job.weights, job.local) == (1, (1.0, 1.0, 1.0), (1, 2))
    assert WorkerJob().of_ranks(3).local is None


def test_who_knows_most_speaks_first() -> None:
    """A process whose worker died knows of what; who lost a peer knows least."""
    died, lost, wrong = WorkerDiedError("x"), PeerLostError("x"), InputError("x")
    turns = sorted(
        [(torchrun_module.report_delay(error, rank), name, rank)
         for name, error in (("died", died), ("lost", lost), ("wrong", wrong)) for rank in (0, 1)]
    )  # fmt: skip
    assert [turn[1:] for turn in turns] == [
        ("died", 0), ("died", 1), ("wrong", 0), ("wrong", 1), ("lost", 0), ("lost", 1)
    ]  # fmt: skip
    assert max(turn[0] for turn in turns) < 30


def test_what_a_rank_leaves_is_what_torchrun_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    write_error_file("rank 1: the disk is full")
    failure = ProcessFailure(1, 77, 2, str(tmp_path / "error.json"))
    assert "traceback : rank 1: the disk is full" in str(ChildFailedError("x", {1: failure}))
    assert abs(failure.timestamp - time.time()) < 60


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """This process as rank 1 of torchrun; the seconds that it left to others."""
    waited: list[float] = []
    for name, value in SECOND.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun_module.time, "sleep", waited.append)
    monkeypatch.setattr(torchrun_module.signal, "signal", lambda *_: None)
    return waited


def test_other_commands_are_rank_0s(silent: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert main(["generate", "x", "--dry-run"]) == 0
    assert main(["resume", "--list"]) == 0
    assert capfd.readouterr() == ("", "")
    assert silent == []


def test_a_wrong_option_is_left_to_rank_0(
    silent: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", "--num-devices", "2"]) == 2
    assert silent == [torchrun_module._ON_ALL_ALIKE]
    assert capfd.readouterr().err.startswith("error: rank 1: num_devices asks for 2 and torchrun")


def test_a_run_that_is_resumed_is_named(
    silent: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume"]) == 2
    assert "name the run" in capfd.readouterr().err


# ---------------------------------------------------------------- real ones


def words_of(model: str, *more: str) -> list[str]:
    return [
        "generate", "a red circle", "--model", model, "--size", "40x24", "--num-frames", "20",
        "--steps", "3", "--seed", "5", "--device", "cpu", "-o", "out/", *more,
    ]  # fmt: skip


def torchrun(place: Path, number: int, *words: str, **environment: str) -> subprocess.Popen[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(PLANTED), str(SOURCE)])
    runs = str(place / "runs")
    own = {"PYTHONPATH": path, "EVERYFRAME_RUNS": runs, IN_PROCESS: "", **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--master-port", str(port),
         "--nproc-per-node", str(number), "-m", "everyframe", *words],
        cwd=place, env={**os.environ, **own}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ours(agent: subprocess.Popen[str]) -> Iterator[psutil.Process]:
    """The processes under torchrun's own."""
    yield from psutil.Process(agent.pid).children(recursive=True)


@pytest.mark.slow
def test_two_ranks_make_one_video(model: str, tmp_path: Path) -> None:
    process = torchrun(tmp_path, 2, *words_of(model))
    listening: set[Any] = set()
    while process.poll() is None:
        for each in ours(process):
            try:
                found = each.net_connections(kind="inet")
            except psutil.Error:
                continue
            listening |= {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}
        time.sleep(0.2)
    out, err = process.communicate()
    assert (process.returncode, out) == (0, "out/\n"), err
    assert len(re.findall("denoise: done", err)) == 1, "one of them speaks"
    assert listening, "gloo listens, and would be seen"
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    words = [*words_of(model), "--num-devices", "2"]
    words[words.index("out/")] = "same/"
    one = subprocess.run(
        [sys.executable, "-m", "everyframe", *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(SOURCE), IN_PROCESS: ""}, check=False,
    )  # fmt: skip
    assert one.returncode == 0
    size = (24, 40)
    made, same = (read_video(tmp_path / name, fps=24, size=size)[0] for name in ("out", "same"))
    assert (made == same).all()


@pytest.mark.slow
def test_a_rank_that_dies_is_named_once_and_the_run_goes_on(model: str, tmp_path: Path) -> None:
    planted = {"PLANTED": "SIGSEGV:STDiT3:3", "PLANTED_RANK": "1"}
    process = torchrun(tmp_path, 2, *words_of(model, "--json"), **planted)
    out, err = process.communicate()
    assert process.returncode == 1  # torchrun's own; what it tells of the rank is below
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    assert re.search(r"process of rank 1 died of SIGSEGV in step \d of 3 of denoise, in", errors[0])
    assert re.search(r"rank +: 1 .*\n +exitcode +: 5 ", err), err
    (run,) = (tmp_path / "runs").iterdir()
    assert f"interrupted; resume it: everyframe resume {run.name}\n" in err
    types = [json.loads(line)["type"] for line in out.splitlines()]
    assert types[0] == "planned"
    assert types.count("error") == 1, "rank 0 left the word to who knew"
    again = torchrun(tmp_path, 3, "resume", run.name)
    out, err = again.communicate()
    assert (again.returncode, out) == (0, f"{tmp_path}/out/\n"), err
    assert "begun on 2 devices, resumed on 3 devices" in err
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.slow
def test_what_can_not_be_done_is_reported_once(model: str, tmp_path: Path) -> None:
    process = torchrun(tmp_path, 2, *words_of(model, "--parallel", "sequence=3"))
    _, err = process.communicate()
    assert err.count("error: parallel sequence=3 is for 3 devices, got 2") == 1, err
    assert "exitcode  : 2" in err
