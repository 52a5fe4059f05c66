"""A rank's actor without Ray: what it is given and says, and what it leaves on its machine."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everyframe.core.errors import InputError
from everyframe.core.events import Event, FramesDecoded, Note, RunSaved, Step, VideoDone
from everyframe.core.request import Request
from everyframe.engine.ray import rank as ray_rank
from everyframe.engine.ray.input_transfer import InputFiles
from everyframe.engine.ray.message_bytes import from_bytes, to_bytes
from everyframe.engine.ray.rank import RayRank
from everyframe.engine.ray.rank_layout import RankJob
from everyframe.engine.ray.run_transfer import write_changes
from everyframe.engine.workers.launcher import run_in_workers
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.runs.folder import RunFolder

REQUEST = Request(
    prompt="a red circle", num_frames=5, height=32, width=32, seed=3, num_inference_steps=4,
    device="cpu",
)  # fmt: skip

#: An actor's process: three files in, a file for each message out.
_ACTOR = """
import sys
from pathlib import Path
from everyframe.engine.ray.rank import RayRank

folder = Path(sys.argv[1])
rank = RayRank()
given = [(folder / name).read_bytes() for name in ("message", "run", "inputs")]
for number, message in enumerate(rank.run(*given)):
    assert type(message) is bytes, type(message)
    (folder / f"{number:04d}").write_bytes(message)
assert type(rank.end()) is bytes
"""


def messages(folder: Path, request: Request) -> list[tuple[str, object]]:
    """All that one rank says of a job, in a process of its own as Ray starts it."""
    folder.mkdir()
    job = WorkerJob(request, root=folder / "runs", as_uint8=True, pace=(0.0, 1e9))
    (folder / "message").write_bytes(to_bytes("job", RankJob(job, "a-run", {})))
    (folder / "run").write_bytes(to_bytes("run", None))
    (folder / "inputs").write_bytes(to_bytes("inputs", InputFiles({}, {})))
    left = folder / "everyframe-ray-of-a-killed-rank"
    left.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    subprocess.run([sys.executable, "-c", _ACTOR, str(folder)], check=True, env=environment)
    assert not list(folder.glob("everyframe-*")), "neither its own folder stays, nor a dead one's"
    return [from_bytes(path.read_bytes()) for path in sorted(folder.glob("0*"))]


def test_a_rank_says_bytes_alone_and_raises_nothing(tmp_path: Path) -> None:
    """Ray pickles what is no bytes, and errors: there are none of either."""
    wrong = Request(**{**REQUEST.given(), "model": "no-such-model"})
    [(name, value)] = messages(tmp_path / "wrong", wrong)
    assert name == "error"
    assert isinstance(value, dict)
    assert value["error"]["class"] == "InputError"
    assert "unknown model 'no-such-model'" in value["error"]["text"]
    assert not value["keeps"]


@pytest.mark.slow
def test_a_ranks_state_comes_before_its_step_and_its_frames_are_those_of_a_worker(
    tmp_path: Path,
) -> None:
    found = messages(tmp_path / "job", REQUEST)
    assert found[-1][0] == "end"
    events = [value for name, value in found if name == "event"]
    frames = [each.frames for each in events if isinstance(each, FramesDecoded)]
    whole = list(run_in_workers(WorkerJob(REQUEST, as_uint8=True)))
    other = [each.frames for each in whole if isinstance(each, FramesDecoded)]
    assert np.array_equal(np.concatenate(frames), np.concatenate(other))
    assert isinstance(events[-1], VideoDone)
    # The copy at each step: a state that is at that step already, or beyond it.
    copy = RunFolder(tmp_path / "copy")
    copy.path.mkdir()
    steps = 0
    for name, value in found:
        if name == "state":
            write_changes(copy, value, tmp_path, {})  # type: ignore[arg-type]
        if isinstance(value, RunSaved):
            assert copy.run()["place"] == str(tmp_path)
        if isinstance(value, Step) and value.stage == "denoise":
            state = copy.state()
            assert state is not None
            assert state["stage"] > 1 or state["takes"][0]["step"] >= value.step
            steps += 1
    assert steps == 4


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder for ranks of this process, which change its environment and log."""
    log = logging.getLogger("everyframe")
    handlers, level = [*log.handlers], log.level
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    log.handlers[:] = handlers
    log.setLevel(level)


def messages_of(rank: RayRank, request: Request, inputs: InputFiles) -> list[tuple[str, Any]]:
    """The messages of a rank of this process about a job that is not saved."""
    job = to_bytes("job", RankJob(WorkerJob(request), "a-run", {}))
    given = job, to_bytes("run", None), to_bytes("inputs", inputs)
    return [from_bytes(message) for message in rank.run(*given)]


def test_a_rank_that_starts_beside_another_leaves_its_folder(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes what is not locked, and the other one's is new and about to be."""
    lock = ray_rank.Lock

    def start_another(path: Path) -> Any:
        monkeypatch.setattr(ray_rank, "Lock", lock)
        ray_rank._remove_folders_of_the_dead()
        return lock(path)

    monkeypatch.setattr(ray_rank, "Lock", start_another)
    rank = RayRank()
    ray_rank._remove_folders_of_the_dead()
    [folder] = temporary.iterdir()
    assert str(folder) == os.environ["TMPDIR"]
    assert folder.name.startswith("everyframe-ray-")
    rank.end()
    assert not list(temporary.iterdir())


def test_the_last_message_is_said_also_where_it_comes_late(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the rank would count as lost."""

    class SlowQueue(queue.Queue[bytes]):
        def put(self, item: bytes, *given: Any, **more: Any) -> None:
            if from_bytes(item)[0] == "end":
                time.sleep(0.3)
            super().put(item, *given, **more)

    step = Step("denoise", 1, 4, 3, 0.1)
    monkeypatch.setattr(ray_rank, "run_in_workers", lambda *given: iter([step]))
    rank = RayRank()
    rank._messages = SlowQueue()
    assert messages_of(rank, REQUEST, InputFiles({}, {})) == [("event", step), ("end", None)]
    rank.end()


def test_messages_name_files_as_the_request_does(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of this machine says nothing to the other side, and is gone when it is read."""

    def fail(job: WorkerJob, place: Path) -> Iterator[Event]:
        assert job.request is not None
        one, two = str(job.request.image).split(",")
        assert Path(two).read_bytes() == b"no picture"
        logging.getLogger("everyframe").warning("%s is small", one)
        yield Note(f"{one!r} is scaled")
        raise InputError(f"{two!r} is no picture")

    monkeypatch.setattr(ray_rank, "run_in_workers", fail)
    names = {"a.png,../b.png": ("0/0/a.png", "0/1/b.png")}
    contents = {name: np.frombuffer(b"no picture", np.uint8) for name in names["a.png,../b.png"]}
    rank = RayRank()
    request = Request(prompt="a", image="a.png,../b.png")
    log, note, error = messages_of(rank, request, InputFiles(names, contents))
    assert log[1][2] == "a.png is small"
    assert note == ("event", Note("'a.png' is scaled"))
    assert error[1]["error"]["text"] == "'../b.png' is no picture"
    rank.end()
