"""Devices that fail make jobs wait; a job that ends its workers fails by itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="serving needs the extra everyframe[server]")

from everyframe.core.errors import WorkerDiedError
from everyframe.hardware.isolation import ProcessResult
from everyframe.server.dispatch import group_health
from everyframe.server.dispatch.group_health import GroupHealth, probe_devices
from everyframe.server.queue.store import JobStore
from helpers.fake_executor import FakeExecutor
from helpers.server_app import ServedApp
from helpers.server_jobs import Start, add, ended

DIED = WorkerDiedError("the worker died of SIGBUS")
WELL, LOST = ProcessResult(value=["cuda:0"]), ProcessResult(signal="SIGBUS")


class Devices:
    """Answers in turn, the last one for ever."""

    def __init__(self, *answers: ProcessResult) -> None:
        self.answers = list(answers)
        self.num_asked = 0

    def __call__(self, devices: str | None) -> ProcessResult:
        self.num_asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def test_devices_are_asked_after_two_deaths_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, health = Devices(WELL), GroupHealth("0")
    monkeypatch.setattr(group_health, "probe_devices", devices)
    assert health.note_death(is_last=False) is None
    health.note_work()
    assert health.note_death(is_last=False) is None
    assert devices.num_asked == 0
    assert health.note_death(is_last=False) is None
    assert devices.num_asked == 1
    assert health.note_death(is_last=True) is None
    assert devices.num_asked == 2, "a last attempt asks at once"


def test_failed_devices_are_asked_again_after_pauses_that_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, devices = [0.0], Devices(LOST, LOST, LOST, WELL)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(group_health, "probe_devices", devices)
    monkeypatch.setattr(group_health, "PAUSES", (10.0, 15.0))
    health = GroupHealth("0")
    assert health.note_death(is_last=True) == "died of SIGBUS"
    asked = []
    for second in range(60):
        clock[0] = float(second)
        before = devices.num_asked
        may_begin = health.may_begin()
        asked += [second] * (devices.num_asked - before)
        if may_begin:
            break
    assert asked == [10, 25, 40]
    assert health.problem is None


def test_the_devices_of_this_machine_compute_and_others_do_not() -> None:
    assert probe_devices("cpu").value == ["cpu"]
    missing = probe_devices("cpu,cuda:77")
    assert not missing.is_well
    assert "cuda:77" in str(missing)


def test_no_job_fails_of_devices_that_fail(
    store: JobStore, dispatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices(LOST, LOST, WELL)
    monkeypatch.setattr(group_health, "probe_devices", devices)
    monkeypatch.setattr(group_health, "PAUSES", (0.3, 0.6))
    jobs = [add(store, seed) for seed in range(3)]
    dispatcher = dispatch(FakeExecutor(failures=[(-1, DIED)] * 2))
    until = time.monotonic() + 10
    while not dispatcher.paused_groups and time.monotonic() < until:
        time.sleep(0.01)
    assert dispatcher.paused_groups == {"default": "died of SIGBUS"}
    assert {ended(store, job).error for job in jobs} == {None}
    assert devices.num_asked == 3
    assert not dispatcher.paused_groups


def test_a_job_that_ends_its_workers_fails_on_devices_that_work(
    store: JobStore, dispatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_health, "probe_devices", Devices(WELL))
    job, other = add(store), add(store, 4)
    dispatch(FakeExecutor(failures=[(-1, DIED)] * 3))
    assert ended(store, job, "failed").error == {
        "code": "worker_died", "message": "the worker died of SIGBUS",
    }  # fmt: skip
    ended(store, other)


def test_a_job_goes_to_another_group(
    store: JobStore, dispatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(devices: str | None) -> ProcessResult:
        return LOST if devices == "0" else WELL

    class Lost(FakeExecutor):
        def run(self, job: Any, *others: Any) -> Any:
            # A run that is resumed where it began names no devices.
            moved = job.ranks or {"devices": "0"}
            where = moved["devices"] if job.request is None else job.request.devices
            self.failures = [(-1, DIED)] if where == "0" else []
            return super().run(job, *others)

    monkeypatch.setattr(group_health, "probe_devices", ask)
    jobs = [add(store, seed) for seed in range(4)]
    dispatcher = dispatch(Lost(), groups={"0": "0", "1": "1"})
    groups = {ended(store, job).group for job in jobs}
    assert groups == {"1"}
    assert [*dispatcher.paused_groups] == ["0"]


def test_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_health, "probe_devices", Devices(LOST))
    with ServedApp(tmp_path / "server", FakeExecutor(failures=[(-1, DIED)] * 9), runs=True) as app:
        app.client.post("/v1/videos", json={"prompt": "a red circle"})
        until = time.monotonic() + 10
        while app.client.get("/ready").status_code == 200 and time.monotonic() < until:
            time.sleep(0.02)
        (reason,) = app.client.get("/ready").json()["reasons"]
        assert reason["code"] == "groups_paused"
        assert app.client.get("/v1/system").json()["paused_groups"] == {"default": "died of SIGBUS"}
        assert 'everyframe_group_paused{group="default"} 1.0' in app.client.get("/metrics").text
