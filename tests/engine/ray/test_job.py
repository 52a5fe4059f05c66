"""What follows a lost rank, without a cluster: the groups of ranks say what a test writes."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from everyframe.core.errors import (
    DevicesBusyError,
    DistributedOutOfMemoryError,
    InputError,
    NumericsError,
    OutOfMemoryInfo,
    WorkerDiedError,
)
from everyframe.core.events import Event, FramesDecoded, Note, Planned, RunSaved, Step, VideoDone
from everyframe.core.request import Request
from everyframe.core.serialization import to_jsonable
from everyframe.engine.ray import job as ray_job
from everyframe.engine.ray.group import HeadLostError, RankFailedError, RankLostError
from everyframe.engine.ray.job import run_on_cluster
from everyframe.engine.ray.message_bytes import from_bytes
from everyframe.engine.ray.run_transfer import RunChanges
from everyframe.engine.resumption.foreign_run import find_here
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.runs import signature
from everyframe.runs.folder import SCHEMA, RunFolder

REQUEST = Request(prompt="a red circle", num_devices=2, device="cpu")
PLANNED: Any = Planned(SimpleNamespace(settings=SimpleNamespace(num_videos=1)))  # type: ignore[arg-type]
LOST = RankLostError("rank 1 on the node b was lost: it is gone")
NO_ROOM = DevicesBusyError("no room")
Message = tuple[str, Any] | Exception


def saved(ranks: int, state: bytes = b"") -> Message:
    """What a rank says of its folder: the constant data, and a state if there is one."""
    run = {"request": to_jsonable(REQUEST), "plan": {"ranks": ranks}, "schema": SCHEMA}
    files = {"state.json": np.frombuffer(state, np.uint8)} if state else {}
    return "state", RunChanges(run, files)


def step(number: int) -> Message:
    return "event", Step("denoise", number, 8, 3, 0.1)


class Groups:
    """The groups of a job, one after the other; each says the next of `scripts`."""

    def __init__(self, scripts: list[Any], num_free: int) -> None:
        self.scripts, self.num_free = scripts, num_free
        self.jobs: list[WorkerJob] = []
        self.copies: list[RunChanges | None] = []
        self.inputs: list[Any] = []
        self.sizes: list[int] = []

    @contextmanager
    def placed(self, number: int, *_: Any) -> Iterator[Groups]:
        self.sizes.append(number)
        if isinstance(self.scripts[0], DevicesBusyError):
            raise self.scripts.pop(0)
        yield self

    def meet(self) -> None:
        pass

    def events(
        self, ranks: None, job: WorkerJob, name: str, run: bytes, inputs: bytes
    ) -> Iterator[tuple[str, Any]]:
        self.jobs.append(job)
        self.copies.append(from_bytes(run)[1])
        self.inputs.append(from_bytes(inputs)[1])
        for each in self.scripts.pop(0):
            if isinstance(each, Exception):
                raise each
            yield each


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Groups]:
    def begin(*scripts: Any, num_free: int = 0) -> Groups:
        made = Groups(list(scripts), num_free)
        monkeypatch.setattr(ray_job, "placed_group", made.placed)
        monkeypatch.setattr(ray_job, "num_free", lambda kind: made.num_free)
        monkeypatch.setattr(ray_job, "_kind", lambda job: "CPU")
        monkeypatch.setattr(ray_job, "ranks_of", lambda run: run.run()["plan"]["ranks"])
        return made

    return begin


def run(root: Path | None, found: list[Event], request: Request = REQUEST) -> list[Event]:
    job = WorkerJob(request, root=root).of_ranks(request.num_ranks)
    found.extend(run_on_cluster(job, Path.cwd(), 1.0))
    return found


def notes(events: list[Event]) -> list[str]:
    return [each.text for each in events if isinstance(each, Note)]


BEGIN: list[Message] = [("event", PLANNED), saved(2), ("event", RunSaved("x", "/on/a/node"))]


def test_a_loss_resumes_from_what_was_saved_here(groups: Any, tmp_path: Path) -> None:
    frames = FramesDecoded(3, 1, np.zeros((1, 2, 2, 3), np.uint8))
    made = groups(
        [*BEGIN, saved(2, b"1"), step(1), LOST],
        [*BEGIN, step(2), ("event", frames), ("event", VideoDone(3, 1, {}))],
    )
    events = run(tmp_path, [])
    assert [type(each) for each in events] == [
        Planned, RunSaved, Step, Note, Step, FramesDecoded, VideoDone
    ]  # fmt: skip
    assert notes(events) == [f"{LOST.text}; the run resumes from its last saved state in a new "
                             "group"]  # fmt: skip
    assert isinstance(events[1], RunSaved)
    assert Path(events[1].path).parent == tmp_path
    first, second = made.jobs
    assert (first.request, first.run) == (REQUEST, None)
    assert (second.request, second.run) == (None, Path(events[1].path))
    assert second.ranks is None, "the same ranks, so the same bits"
    assert bytes(made.copies[1].files["state.json"]) == b"1"
    assert list(tmp_path.iterdir()) == []


def test_the_plan_comes_first_also_where_a_rank_is_lost_before_it(
    groups: Any, tmp_path: Path
) -> None:
    made = groups([LOST], [*BEGIN, ("event", VideoDone(3, 1, {}))])
    events = run(tmp_path, [])
    assert isinstance(events[0], Planned)
    assert notes(events) == [f"{LOST.text}; the run begins again in a new group"]
    assert made.jobs[1].request == REQUEST


def test_a_loss_after_the_last_video_starts_nothing(groups: Any, tmp_path: Path) -> None:
    made = groups([*BEGIN, ("event", VideoDone(3, 1, {})), LOST])
    assert isinstance(run(tmp_path, [])[-1], VideoDone)
    assert len(made.jobs) == 1
    assert list(tmp_path.iterdir()) == []


def test_fewer_devices_take_over_where_there_are_no_more(groups: Any, tmp_path: Path) -> None:
    made = groups([*BEGIN, LOST], NO_ROOM, [*BEGIN, ("event", VideoDone(3, 1, {}))], num_free=5)
    events = run(tmp_path, [])
    assert made.sizes == [2, 2, 1]
    assert made.jobs[1].ranks == {"num_devices": 1}
    assert len(made.jobs[1].weights) == 1
    assert "no 2 devices are free within 1 s; the run resumes on 1" in notes(events)[1]


def test_a_run_that_is_not_saved_begins_on_fewer_devices_divided_anew(groups: Any) -> None:
    """The division that was asked for has no meaning there, and would be refused."""
    asked = Request(**{**REQUEST.given(), "parallel": "sequence=2", "shares": "2,1"})
    done = [("event", PLANNED), ("event", VideoDone(3, 1, {}))]
    made = groups([("event", PLANNED), LOST], NO_ROOM, done, num_free=1)
    assert "the run begins again on 1, which differs" in notes(run(None, [], asked))[1]
    assert made.jobs[1].request == Request(**{**REQUEST.given(), "num_devices": 1})


def test_no_device_at_all_ends_the_run_and_keeps_it(groups: Any, tmp_path: Path) -> None:
    groups([*BEGIN, LOST], NO_ROOM, num_free=0)
    with pytest.raises(DevicesBusyError, match="no device is free; resume it: everyframe resume"):
        run(tmp_path, [])
    [path] = tmp_path.iterdir()
    assert not RunFolder(path).is_busy()
    assert RunFolder(path).is_own()


def test_a_lost_head_ends_the_run_and_keeps_it(groups: Any, tmp_path: Path) -> None:
    """No new group can be asked for, and a server tries it again."""
    groups([*BEGIN, HeadLostError("the head is gone")])
    with pytest.raises(DevicesBusyError, match="the head is gone; resume it: everyframe resume"):
        run(tmp_path, [])
    [path] = tmp_path.iterdir()
    assert not RunFolder(path).is_busy()


def test_no_room_at_the_start_is_an_error_of_its_own(groups: Any, tmp_path: Path) -> None:
    groups(NO_ROOM, num_free=1)
    with pytest.raises(DevicesBusyError, match="no room"):
        run(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


def test_losses_without_progress_end_the_run(groups: Any, tmp_path: Path) -> None:
    groups([*BEGIN, saved(2, b"1"), LOST], [saved(2), LOST], [LOST])
    with pytest.raises(WorkerDiedError, match="after 2 losses before it without progress"):
        run(tmp_path, [])


def test_losses_with_progress_in_between_do_not(groups: Any, tmp_path: Path) -> None:
    scripts = [[*BEGIN, saved(2, bytes([number])), LOST] for number in range(6)]
    groups(*scripts, [("event", VideoDone(3, 1, {}))])
    assert isinstance(run(tmp_path, [])[-1], VideoDone)


def test_out_of_memory_is_a_new_group_with_a_plan_that_needs_less(
    groups: Any, tmp_path: Path
) -> None:
    out_of_memory = OutOfMemoryInfo("denoise", 2, ("denoiser",), "step 2", "out of memory", 1)
    error = DistributedOutOfMemoryError("so", out_of_memory)
    failed = RankFailedError(error, keeps=True)
    done = [("event", VideoDone(3, 1, {}))]
    # Lost before the new plan is saved, and after: a second time would need less again.
    made = groups([*BEGIN, failed], [LOST], [saved(2), saved(2, b"1"), LOST], done)
    run(tmp_path, [])
    assert [each.out_of_memory for each in made.jobs] == [None, out_of_memory, out_of_memory, None]
    groups([("event", PLANNED), failed])
    with pytest.raises(DistributedOutOfMemoryError):
        run(None, [])


@pytest.mark.parametrize("keeps", [True, False])
def test_an_error_leaves_the_run_that_its_rank_leaves(
    groups: Any, tmp_path: Path, keeps: bool
) -> None:
    error: Exception = WorkerDiedError("a") if keeps else NumericsError("b")
    groups([*BEGIN, RankFailedError(error, keeps=keeps)])
    with pytest.raises(type(error)):
        run(tmp_path, [])
    assert len(list(tmp_path.iterdir())) == keeps


def test_a_folder_that_can_not_be_written_is_a_note(groups: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    groups([*BEGIN, step(1), LOST], [("event", VideoDone(3, 1, {}))])
    events = run(tmp_path / "file" / "runs", [])
    assert "this run can't be saved in" in notes(events)[0]
    assert "the run begins again" in notes(events)[1]
    assert not [each for each in events if isinstance(each, RunSaved)]


def test_a_run_that_can_not_be_locked_leaves_no_folder(
    groups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    groups([*BEGIN, ("event", VideoDone(3, 1, {}))])
    events = run(tmp_path / "runs", [])
    assert "this run can't be saved in" in notes(events)[0]
    assert not list((tmp_path / "runs").iterdir())


def test_a_strangers_run_sends_no_file_that_was_not_named_again(
    groups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names a file of this machine, which would travel to the nodes."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    request = Request(prompt="a", image=str(tmp_path / "secret.png"))
    folder = RunFolder(tmp_path / "a-run")
    folder.path.mkdir()
    folder.write_run({"request": to_jsonable(request), "plan": {"ranks": 1}}, is_own=False)
    for named, sent in (({}, 0), ({"image": str(tmp_path / "secret.png")}, 1)):
        made = groups([RankFailedError(InputError("no"), keeps=True)])
        with pytest.raises(InputError, match="no"):
            list(run_on_cluster(WorkerJob(run=folder.path, named=named), tmp_path, 1.0))
        assert len(made.inputs[0].contents) == sent
        assert not made.copies[0].is_own
    signature.sign({})
    folder.write_run({"request": to_jsonable(request), "plan": {"ranks": 1}})
    made = groups([RankFailedError(InputError("no"), keeps=True)])
    with pytest.raises(InputError, match="no"):
        list(run_on_cluster(WorkerJob(run=folder.path), tmp_path, 1.0))
    assert len(made.inputs[0].contents) == 1


@pytest.mark.parametrize("is_own", [True, False])
def test_a_run_that_was_begun_elsewhere_finds_its_model_on_the_nodes(
    groups: Any, tmp_path: Path, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have another working folder; a stranger's run names no model of this machine."""
    (tmp_path / "model").mkdir()
    folder = RunFolder(tmp_path / "a-run")
    folder.path.mkdir()
    request = Request(prompt="model", model="model")
    signature.sign({})
    constant = {"request": to_jsonable(request), "plan": {"ranks": 1, "model": "model"}}
    folder.write_run({**constant, "place": str(tmp_path)}, is_own=is_own)
    monkeypatch.chdir(tmp_path)
    named = {} if is_own else find_here({"model": "model"})
    made = groups([RankFailedError(InputError("no"), keeps=True)])
    with pytest.raises(InputError, match="no"):
        list(run_on_cluster(WorkerJob(run=folder.path, named=named), tmp_path, 1.0))
    assert not made.inputs[0].contents
    there = str(tmp_path / "model")
    copied = made.copies[0].run
    assert copied["plan"]["model"] == (there if is_own else "model")
    assert there in str(copied["request"]) if is_own else there not in str(copied["request"])
    assert made.jobs[0].named == ({} if is_own else {"model": there})
    assert folder.run()["plan"]["model"] == "model"


@pytest.mark.parametrize(
    ("given", "message"),
    [({"devices": "cpu,cpu"}, "--num-devices N"), ({"report": "there"}, "leave --report out")],
)
def test_options_of_one_machine_are_refused(
    groups: Any, tmp_path: Path, given: dict[str, str], message: str
) -> None:
    groups()
    with pytest.raises(InputError, match=message):
        run(tmp_path, [], Request(prompt="a", **given))
    assert list(tmp_path.iterdir()) == []
