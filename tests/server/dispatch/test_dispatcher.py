"""The dispatcher: what follows an attempt that finishes, dies, is cancelled or drained."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from everyframe.core.errors import (
    InputError,
    WorkerDiedError,
)
from everyframe.core.events import Event, Events, FramesDecoded, Preview, Step
from everyframe.engine.workers.stop_switch import StopSwitch
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.media.read import read_video
from everyframe.media.record import read_record
from everyframe.server.data_folder import DataFolder
from everyframe.server.dispatch import attempt as attempts
from everyframe.server.dispatch import retention
from everyframe.server.dispatch.device_groups import parse_groups
from everyframe.server.queue.jobs import Job
from everyframe.server.queue.store import JobStore
from helpers.fake_executor import NUM_STEPS, FakeExecutor, frames_of
from helpers.server_jobs import Start, add, ended, frames_in, types

DIED = WorkerDiedError("the worker died of SIGSEGV; resume it: everyframe resume 2026")


def test_a_job_becomes_a_video_with_its_record(
    store: JobStore, folder: DataFolder, dispatch: Start
) -> None:
    job = add(store)
    dispatcher = dispatch(executor := FakeExecutor())
    done = ended(store, job)
    dispatcher.drain(10)  # the run goes once the row says that the job ended
    assert executor.jobs[0].temporary == folder.runs_of(job.id), "where a crash leaves nothing"
    assert done.file == f"videos/{job.id}/video.mp4"
    assert np.abs(frames_in(folder, done).astype(int) - frames_of(3)).max() < 12
    assert read_record(folder.path / done.file)["request"]["seed"] == 3
    names = {path.name for path in folder.video(job.id).iterdir()}
    assert names == {"video.mp4", "video.json", "thumbnail.webp", "spritesheet.webp", "job.json"}
    with Image.open(folder.video(job.id) / "thumbnail.webp") as picture:
        assert picture.size == (64, 64)
    with Image.open(folder.video(job.id) / "spritesheet.webp") as picture:
        assert picture.size == (256, 64)
    assert (done.progress, done.attempts, done.error, done.eta_s) == (100, 1, None, None)
    assert (done.resolved["width"], done.resolved["num_frames"]) == (64, 4)
    assert done.report["checks"] == {"num_frames": 4, "is_finite": True, "is_read_back": True}
    assert done.report["stage_durations"] == {"text": 0.01, "denoise": 0.05, "decode": 0.01}
    assert done.report["inference_time_s"] > 0
    assert not list(folder.runs.iterdir()), "nothing is left of the run"
    seen = types(store, job)
    assert seen[:3] == ["status", "status", "planned"]
    assert seen[-1] == "done"
    assert seen.count("stage") == 3


def test_jobs_run_one_after_the_other_in_a_group(store: JobStore, dispatch: Start) -> None:
    jobs = [add(store, seed) for seed in range(5)]
    executor = FakeExecutor()
    dispatch(executor)
    for job in jobs:
        ended(store, job)
    assert executor.steps == [(seed, step + 1) for seed in range(5) for step in range(NUM_STEPS)]


class HandingOver(FakeExecutor):
    """An executor whose first job ends once the second one is there."""

    has_batches = True

    def run(
        self, job: WorkerJob, place: Path | None = None, stop: StopSwitch | None = None
    ) -> Events:
        is_first = not self.jobs
        for event in super().run(job, place, stop):
            yield event
            if isinstance(event, FramesDecoded) and is_first:
                until = time.monotonic() + 10
                while len(self.jobs) < 2 and time.monotonic() < until:
                    time.sleep(0.01)
                self.met = len(self.jobs) > 1  # the second one may have ended since


def test_the_next_job_is_handed_over_before_the_last_one_ended(
    store: JobStore, dispatch: Start
) -> None:
    jobs = [add(store, seed) for seed in range(3)]
    executor = HandingOver()
    dispatch(executor)
    for job in jobs:
        ended(store, job)
    assert executor.met
    assert len({job.batch for job in executor.jobs[:2]}) == 1, "they go to the same worker"


def test_groups_work_side_by_side_with_their_devices(store: JobStore, dispatch: Start) -> None:
    jobs = [add(store, seed) for seed in range(2)]
    executor = FakeExecutor(pause=0.05)
    dispatcher = dispatch(executor, groups=parse_groups("0,1;2,3"))
    assert set(dispatcher.groups) == {"0,1", "2,3"}
    done = [ended(store, job) for job in jobs]
    assert {job.group for job in done} == {"0,1", "2,3"}
    assert {job.request and job.request.devices for job in executor.jobs} == {"0,1", "2,3"}
    dispatcher.drain(10)
    assert dispatcher.groups == {"0,1": None, "2,3": None}


def test_a_running_job_is_cancelled_at_once(
    store: JobStore, folder: DataFolder, dispatch: Start
) -> None:
    job = add(store)
    dispatcher = dispatch(FakeExecutor(pause=60))
    ended(store, job, "in_progress")
    began = time.monotonic()
    assert dispatcher.cancel(job.id, wait=10).status == "cancelled"
    assert time.monotonic() - began < 5
    assert not list(folder.videos.iterdir())
    assert dispatcher.cancel(job.id).status == "cancelled", "twice is once"


def test_a_cancelled_job_is_retried_where_it_was(store: JobStore, dispatch: Start) -> None:
    executor = FakeExecutor(pause=0.1)
    job = add(store)
    dispatcher = dispatch(executor)
    ended(store, job, "in_progress")
    while len(executor.steps) < 2:
        time.sleep(0.01)
    assert dispatcher.cancel(job.id, wait=10).status == "cancelled"
    executor.pause = 0.0
    store.retry(job.id)
    ended(store, job)
    assert executor.steps == [(3, step) for step in range(1, NUM_STEPS + 1)]


def test_a_cancel_between_claim_and_start_is_seen(
    store: JobStore, dispatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = store.claim

    def cancelled(group: str, prefers: str | None = None) -> Job | None:
        job = claim(group, prefers)
        return job and store.request_cancel(job.id)

    monkeypatch.setattr(store, "claim", cancelled)
    job = add(store)
    dispatch(FakeExecutor(pause=60))
    ended(store, job, "cancelled")


def test_a_drain_queues_the_running_job_with_its_run(store: JobStore, dispatch: Start) -> None:
    executor = FakeExecutor(pause=0.1)
    job, waiting = add(store), add(store, 4)
    dispatcher = dispatch(executor)
    while len(executor.steps) < 2:
        time.sleep(0.01)
    began = time.monotonic()
    dispatcher.drain()
    assert time.monotonic() - began < 2
    assert dispatcher.is_draining
    now = ended(store, job, "queued")
    assert (now.attempts, now.run is not None) == (0, True)
    assert ended(store, waiting, "queued").attempts == 0
    executor.pause = 0.0
    dispatch(executor)
    ended(store, waiting)
    assert executor.steps[:NUM_STEPS] == [(3, step) for step in range(1, NUM_STEPS + 1)]


def test_a_drain_with_time_lets_the_job_finish(store: JobStore, dispatch: Start) -> None:
    job, waiting = add(store), add(store, 4)
    dispatcher = dispatch(FakeExecutor(pause=0.05))
    ended(store, job, "in_progress")
    dispatcher.drain(10)
    ended(store, job)
    ended(store, waiting, "queued")


def test_several_videos_of_one_job(store: JobStore, folder: DataFolder, dispatch: Start) -> None:
    job = add(store, request={"num_videos": 2})
    dispatch(FakeExecutor())
    done = ended(store, job)
    assert done.report["files"] == ["video.mp4", "video-2.mp4"]
    second = read_video(folder.video(job.id) / "video-2.mp4")[0]
    assert np.abs(second.astype(int) - frames_of(4)).max() < 12


def test_progress_never_falls_over_attempts(
    store: JobStore, dispatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "_PAUSE", 0.0)
    seen: list[int] = []
    store.listen(lambda e: seen.append(e.data["progress"]) if "progress" in e.data else None)
    job = add(store)
    dispatch(FakeExecutor(failures=[(4, DIED), (4, DIED)]))
    ended(store, job)
    assert seen == sorted(seen)
    assert len(set(seen)) > 4
    assert max(seen) < 100


def test_progress_is_written_twice_a_second_at_most(store: JobStore, dispatch: Start) -> None:
    job = add(store)
    dispatch(FakeExecutor(pause=0.1))
    ended(store, job)
    assert types(store, job).count("progress") <= 2


def test_warm_models_go_first_but_not_for_ever(store: JobStore, dispatch: Start) -> None:
    executor = FakeExecutor()
    first = add(store, 0, model="a")
    other = add(store, 1, model="b")
    warm = [add(store, seed, model="a") for seed in range(2, 6)]
    dispatch(executor, warm_ahead=2)
    for job in (first, other, *warm):
        ended(store, job)
    order = list(dict.fromkeys(seed for seed, _ in executor.steps))
    assert order == [0, 2, 3, 1, 4, 5]


def test_finished_jobs_and_unused_uploads_expire(
    store: JobStore, folder: DataFolder, dispatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused, used = folder.add_input(b"1", "png"), folder.add_input(b"2", "png")
    store.retention_seconds = 0.0
    job = add(store)
    dispatcher = dispatch(FakeExecutor())
    assert ended(store, job).expires_at is not None
    dispatcher.drain()
    kept = add(store, request={"image": used})
    assert (folder.path / unused).exists(), "given a moment ago, its job may be on the way"
    monkeypatch.setattr(retention, "_UPLOAD_SECONDS", -1.0)
    retention.clean(store)
    assert store.get(job.id) is None
    assert not folder.video(job.id).exists()
    assert store.get(kept.id) is not None
    assert not (folder.path / unused).exists()
    assert (folder.path / used).exists()


def test_a_run_that_is_written_after_its_job_was_deleted_goes(
    store: JobStore, folder: DataFolder
) -> None:
    deleted, kept = add(store), add(store)
    for job in (deleted, kept):
        store.request_cancel(job.id)
    assert store.delete(deleted.id)
    for job in (deleted, kept):
        (folder.runs_of(job.id) / "run").mkdir(parents=True)
    retention.clean(store)
    assert [path.name for path in folder.runs.iterdir()] == [kept.id]


def test_previews_reach_listeners_and_are_not_stored(store: JobStore, dispatch: Start) -> None:
    class WithPreviews(FakeExecutor):
        def _events(self, *args: Any) -> Any:
            for event in super()._events(*args):
                yield event
                if isinstance(event, Step):
                    yield Preview(event.seed, event.step, event.num_steps, 1, 1, b"")

    seen: list[tuple[str, Event]] = []
    job = add(store)
    dispatcher = dispatch(WithPreviews(pause=0.05))
    stop = dispatcher.listen_previews(lambda id, event: seen.append((id, event)))  # noqa: A006
    ended(store, job)
    stop()
    assert seen
    assert {each for each, _ in seen} == {job.id}
    assert "preview" not in types(store, job)
    dispatcher.drain()
    assert dispatcher.preview(job.id) is None


def test_files_of_jobs_are_plain(store: JobStore, folder: DataFolder, dispatch: Start) -> None:
    job = add(store)
    dispatch(FakeExecutor())
    done = ended(store, job)
    fields = json.loads((folder.video(job.id) / "job.json").read_text())
    assert fields["file"] == done.file
    assert str(Path(folder.path)) not in json.dumps(fields)


def test_groups_are_parsed() -> None:
    assert parse_groups(None) == {"default": None}
    assert parse_groups("0,1; 2,3") == {"0,1": "0,1", "2,3": "2,3"}
    assert parse_groups("cpu;cpu") == {"cpu": "cpu", "cpu (2)": "cpu"}
    for wrong in ("", "0,1;", "0,;1", "cuda:-1", "0,1/2,3", "-1", "²"):
        with pytest.raises(InputError, match="groups must be lists"):
            parse_groups(wrong)
    for twice in ("0,1;1,2", "1;cuda:1", "1,cuda:2;CUDA:01", "cuda;cuda:0"):
        with pytest.raises(InputError, match=r"device (1|cuda) is in two groups"):
            parse_groups(twice)
