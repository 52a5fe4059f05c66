"""A rank's actor without Ray: what it is given and says, and what it leaves on its machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from everyframe.core.events import FramesDecoded, RunSaved, Step, VideoDone
from everyframe.core.request import Request
from everyframe.engine.ray.input_transfer import InputFiles
from everyframe.engine.ray.message_bytes import from_bytes, to_bytes
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
