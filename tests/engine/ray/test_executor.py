"""Jobs on a Ray cluster of processes of this machine: lost actors, nodes, drivers lose nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from everyframe.core.errors import (
    DevicesBusyError,
    InputError,
    MissingPackageError,
    RunStoppedError,
)
from everyframe.core.events import Event, FramesDecoded, Note, RunSaved, Step, VideoDone
from everyframe.core.request import Request
from everyframe.engine.ray import group as ray_group
from everyframe.engine.ray.executor import RayExecutor, ray_executor
from everyframe.engine.workers.launcher import run_in_workers
from everyframe.engine.workers.stop_switch import StopSwitch
from everyframe.engine.workers.worker_process import WorkerJob
from helpers import ray_cluster
from helpers.events import frames_by_seed
from helpers.interrupted_ranks import ROUNDING

# Steps of a quarter of a second: what is killed at the third one has not ended yet.
REQUEST = Request(
    prompt="a red circle", num_frames=17, height=96, width=96, seed=3, num_inference_steps=8,
    num_devices=2, device="cpu",
)  # fmt: skip


def job(root: Path, request: Request = REQUEST) -> WorkerJob:
    """The request, saved at every step."""
    return WorkerJob(request, root=root, as_uint8=True, pace=(0.0, 1e9))


def test_without_ray_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'everyframe\[ray\]'"):
        ray_executor()


def test_ray_is_refused_where_it_was_imported_without_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would not read the mode again, and join any cluster."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    with pytest.raises(InputError, match="RAY_AUTH_MODE=token before that"):
        ray_executor()
    assert "RAY_AUTH_MODE" not in os.environ


def test_the_modules_for_ray_import_neither_ray_nor_torch() -> None:
    code = (
        "import sys, everyframe.engine.ray.executor, everyframe.engine.ray.rank\n"
        "sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with room for one rank; tests add nodes."""
    with pytest.MonkeyPatch.context() as patch, ray_cluster.token(patch):
        # After the token: Ray reads its mode once.
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'everyframe[ray]'")
        with ray_cluster.cluster(num_cpus=1) as found:
            yield found


@pytest.fixture(scope="module")
def executor(cluster: Any) -> Iterator[RayExecutor]:
    handler, here = signal.getsignal(signal.SIGTERM), os.getcwd()
    found = ray_executor(cluster.address, place_timeout=6.0)
    assert (signal.getsignal(signal.SIGTERM), os.getcwd()) == (handler, here)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def unbroken() -> Any:
    """The frames of the request, made by two processes of this machine."""
    return frames_of(list(run_in_workers(WorkerJob(REQUEST, as_uint8=True).of_ranks(2))))


def frames_of(events: list[Event]) -> Any:
    assert isinstance(events[-1], VideoDone)
    return np.concatenate([each.frames for each in events if isinstance(each, FramesDecoded)])


def notes_of(events: list[Event]) -> str:
    return "\n".join(each.text for each in events if isinstance(each, Note))


def steps_of(events: list[Event]) -> list[int]:
    return [each.step for each in events if isinstance(each, Step) and each.stage == "denoise"]


def broken(coming: Iterator[Event], action: Callable[[], None], step: int = 3) -> list[Event]:
    """All events, with one action after that step was done for the first time."""
    events: list[Event] = []
    for event in coming:
        events.append(event)
        if isinstance(event, Step) and event.stage == "denoise" and steps_of(events).count(step):
            if event.step == step and steps_of(events).count(step) == 1:
                action()
    return events


def check_resumed(events: list[Event], root: Path) -> None:
    """All steps were done, at most the ones at work twice, and nothing is left."""
    steps = steps_of(events)
    assert set(steps) == set(range(1, 9))
    assert len(steps) - 8 <= 2, steps
    assert "was lost" in notes_of(events)
    assert "resumes from its last saved state" in notes_of(events)
    assert list(root.iterdir()) == []


@pytest.mark.slow
def test_ranks_of_one_node_give_the_bits_of_processes_of_one_machine(
    cluster: Any, executor: RayExecutor, unbroken: Any, tmp_path: Path
) -> None:
    with ray_cluster.node(cluster, num_cpus=2):
        events = list(executor.run(job(tmp_path)))
    assert np.array_equal(frames_of(events), unbroken)
    saved = [Path(each.path) for each in events if isinstance(each, RunSaved)]
    assert [path.parent for path in saved] == [tmp_path]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, -1])
def test_a_killed_actor_costs_at_most_a_step(
    cluster: Any,
    executor: RayExecutor,
    unbroken: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    which: int,
) -> None:
    def kill_one() -> None:
        os.kill(ray_cluster.actor_processes()[which], signal.SIGKILL)

    with ray_cluster.node(cluster, num_cpus=2):
        events = broken(executor.run(job(tmp_path)), kill_one)
    # Paths of videos go to standard output, and nothing of Ray's.
    assert capfd.readouterr().out == ""
    assert np.array_equal(frames_of(events), unbroken)
    check_resumed(events, tmp_path)


@pytest.mark.slow
def test_a_killed_node_costs_at_most_a_step_where_another_takes_its_place(
    cluster: Any, executor: RayExecutor, unbroken: Any, tmp_path: Path
) -> None:
    with ray_cluster.node(cluster, num_cpus=1) as second, ray_cluster.nodes(cluster) as others:

        def replace_node() -> None:
            ray_cluster.kill(cluster, second)
            others.append(ray_cluster.add(cluster, num_cpus=1))

        events = broken(executor.run(job(tmp_path)), replace_node)
    assert np.array_equal(frames_of(events), unbroken)
    check_resumed(events, tmp_path)


@pytest.mark.slow
def test_a_killed_node_leaves_the_run_to_fewer_ranks_up_to_rounding(
    cluster: Any, executor: RayExecutor, tmp_path: Path
) -> None:
    """In float frames, where rounding would be seen."""
    asked = WorkerJob(REQUEST, root=tmp_path, pace=(0.0, 1e9))
    whole = frames_of(list(run_in_workers(WorkerJob(REQUEST).of_ranks(2))))
    with ray_cluster.node(cluster, num_cpus=1) as second:
        events = broken(executor.run(asked), lambda: ray_cluster.kill(cluster, second))
    found = frames_of(events)
    assert np.abs(found - whole).max() <= ROUNDING * np.abs(whole).max()
    check_resumed(events, tmp_path)
    assert "the run resumes on 1, which differs by rounding" in notes_of(events)
    assert "begun on 2 devices, resumed on one device" in notes_of(events)


@pytest.mark.slow
def test_groups_of_several_videos_resume_each_its_own(
    cluster: Any, executor: RayExecutor, tmp_path: Path
) -> None:
    """Each group saves its part of the run; what is done is not made again."""
    asked = Request(**{**REQUEST.given(), "num_videos": 2, "parallel": "data=2"})
    whole = frames_by_seed(list(run_in_workers(WorkerJob(asked, as_uint8=True).of_ranks(2))))

    def kill_one() -> None:
        os.kill(ray_cluster.actor_processes()[-1], signal.SIGKILL)

    with ray_cluster.node(cluster, num_cpus=1):
        events = broken(executor.run(job(tmp_path, asked)), kill_one)
    found = frames_by_seed(events)
    assert found.keys() == whole.keys() == {3, 4}
    for seed, frames in whole.items():
        assert np.array_equal(found[seed], frames)
    assert "resumes from its last saved state" in notes_of(events)
    assert sorted(each.seed for each in events if isinstance(each, VideoDone)) == [3, 4]
    assert list(tmp_path.iterdir()) == []


#: A driver that is killed after its third step.
_DRIVER = """
import os, sys
from pathlib import Path
from everyframe.core.events import RunSaved, Step
from everyframe.core.request import Request
from everyframe.engine.workers.launcher import run_in_workers
from everyframe.engine.ray.executor import ray_executor
from everyframe.engine.workers.worker_process import WorkerJob

request = Request(**{given!r})
job = WorkerJob(request, root=Path({root!r}), as_uint8=True, pace=(0.0, 1e9))
for event in ray_executor({address!r}, place_timeout=20.0).run(job):
    if isinstance(event, RunSaved):
        print(event.path, flush=True)
    if isinstance(event, Step) and event.stage == "denoise" and event.step == 3:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_killed_driver_leaves_a_run_that_another_resumes(
    cluster: Any, executor: RayExecutor, unbroken: Any, tmp_path: Path
) -> None:
    given = {"given": REQUEST.given(), "root": str(tmp_path), "address": cluster.address}
    with ray_cluster.node(cluster, num_cpus=2):
        command = [sys.executable, "-c", _DRIVER.format(**given)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        path = Path(done.stdout.strip())
        events = list(executor.run(WorkerJob(run=path, as_uint8=True)))
    assert np.array_equal(frames_of(events), unbroken)
    assert steps_of(events) in ([4, 5, 6, 7, 8], [5, 6, 7, 8])
    assert list(tmp_path.iterdir()) == []
    assert ray_cluster.actor_processes() == []


@pytest.mark.slow
def test_errors_come_back_in_their_own_class_and_leave_nothing(
    cluster: Any, executor: RayExecutor, tmp_path: Path
) -> None:
    with ray_cluster.node(cluster, num_cpus=2):
        wrong = Request(**{**REQUEST.given(), "model": "no-such-model"})
        with pytest.raises(InputError, match="unknown model 'no-such-model'"):
            list(executor.run(job(tmp_path, wrong)))
        # More ranks than the cluster will ever have.
        more = Request(**{**REQUEST.given(), "num_devices": 5})
        with pytest.raises(DevicesBusyError, match=r"no 5 free CPUs within 6 s: .* has 3"):
            list(executor.run(job(tmp_path, more)))
        with pytest.raises(InputError, match="--num-devices N"):
            list(executor.run(job(tmp_path, Request(prompt="a", devices="cpu,cpu"))))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_node_with_other_software_is_refused_by_name(
    executor: RayExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {**ray_group.software(), "torch": "1.0"}
    monkeypatch.setattr(ray_group, "software", lambda: here)
    one = Request(**{**REQUEST.given(), "num_devices": 1})
    with pytest.raises(InputError, match=r"torch is 2\S* there and 1.0 here"):
        list(executor.run(job(tmp_path, one)))


@pytest.mark.slow
def test_a_run_stops_from_another_thread_and_resumes(
    cluster: Any, executor: RayExecutor, unbroken: Any, tmp_path: Path
) -> None:
    switch, events = StopSwitch(), list[Event]()

    def run_until_step(step: int) -> None:
        for event in executor.run(job(tmp_path), None, switch):
            events.append(event)
            if len(steps_of(events)) == step:
                threading.Thread(target=switch.set).start()

    with ray_cluster.node(cluster, num_cpus=2):
        with pytest.raises(RunStoppedError):
            run_until_step(3)
        [path] = tmp_path.iterdir()
        rest = list(executor.run(WorkerJob(run=path, as_uint8=True)))
    assert np.array_equal(frames_of(rest), unbroken)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_plan_is_made_where_the_devices_are(cluster: Any, executor: RayExecutor) -> None:
    one = Request(**{**REQUEST.given(), "num_devices": 1})
    assert executor.plan(one).parallel is None
    with ray_cluster.node(cluster, num_cpus=2):
        plan = executor.plan(REQUEST)
    assert plan.parallel is not None
    assert len(plan.parallel.ranks) == 2


@pytest.mark.slow
def test_a_wrong_token_is_refused(cluster: Any) -> None:
    code = (
        "from everyframe.engine.ray.executor import ray_executor\n"
        f"ray_executor({cluster.address!r})"
    )
    environment = {**os.environ, "RAY_AUTH_TOKEN": "0" * 64}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode
    assert "InputError: no Ray cluster can be joined" in done.stderr
