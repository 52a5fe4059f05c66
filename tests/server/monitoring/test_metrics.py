"""Metrics and traces of jobs, and that neither holds what a client wrote."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from everyframe.core.errors import MissingPackageError, WorkerDiedError
from everyframe.server.monitoring import traces
from everyframe.server.monitoring.traces import JobTraces, trace_parent
from everyframe.server.queue.jobs import StoredEvent
from helpers.fake_executor import FakeExecutor
from helpers.server_app import ServedApp

#: Section 2.7 of the design: names are part of the interface.
NAMES = {
    "everyframe_http_requests_total", "everyframe_http_request_duration_seconds",
    "everyframe_jobs_total", "everyframe_queue_jobs", "everyframe_queue_wait_seconds",
    "everyframe_job_duration_seconds", "everyframe_stage_duration_seconds",
    "everyframe_step_duration_seconds", "everyframe_model_load_seconds",
    "everyframe_device_memory_peak_bytes", "everyframe_repairs_total", "everyframe_resumes_total",
    "everyframe_worker_deaths_total", "everyframe_frames_total", "everyframe_build_info",
    "everyframe_group_paused",
}  # fmt: skip


def made(app: ServedApp, **fields: Any) -> dict[str, Any]:
    """A finished job."""
    video = app.client.post("/v1/videos", json={"prompt": "a red circle", **fields}).json()
    ends = time.monotonic() + 10
    while video["status"] in ("queued", "in_progress"):
        assert time.monotonic() < ends
        time.sleep(0.02)
        video = app.client.get(f"/v1/videos/{video['id']}").json()
    return dict(video)


def values_of(app: ServedApp) -> dict[str, float]:
    text = app.client.get("/metrics").text
    rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


def counted(app: ServedApp, name: str) -> dict[str, float]:
    """The metrics once that one is there: they follow the events."""
    ends = time.monotonic() + 5
    while name not in (found := values_of(app)):
        assert time.monotonic() < ends, f"{name} is not in {sorted(found)}"
        time.sleep(0.05)
    return found


def test_jobs_and_requests_are_counted(tmp_path: Path) -> None:
    failures = [(2, WorkerDiedError("it died"))]
    with ServedApp(tmp_path / "server", FakeExecutor(failures=failures), runs=True) as app:
        before = values_of(app)
        assert before['everyframe_queue_jobs{status="queued"}'] == 0
        video = made(app, negative_prompt="a secret")
        app.client.get("/v1/videos/nowhere/content")
        app.client.get("/nowhere/a-secret")
        app.client.request("SECRET", "/v1/videos")
        found = counted(app, 'everyframe_jobs_total{model="shapes",status="completed"}')
        text = app.client.get("/metrics").text
    assert video["status"] == "completed"
    kinds = set(re.findall(r"^# TYPE (\w+)", text, re.M))
    assert {each for each in kinds if not each.endswith("_created")} == NAMES
    assert found['everyframe_queue_jobs{status="completed"}'] == 1
    assert found['everyframe_worker_deaths_total{cause="worker_died"}'] == 1
    assert found['everyframe_resumes_total{cause="worker_died"}'] == 1
    assert found["everyframe_frames_total"] == 4
    assert found["everyframe_queue_wait_seconds_count"] == 1
    assert found['everyframe_stage_duration_seconds_count{model="shapes",stage="denoise"}'] == 1
    route = 'method="GET",route="/v1/videos/{video_id}/content",status="404"'
    assert found[f"everyframe_http_requests_total{{{route}}}"] == 1
    assert 'method="other"' in text
    assert "secret" not in text.lower(), "labels hold nothing that a client wrote"
    assert video["id"] not in text


def test_failed_jobs_are_counted_by_their_cause(tmp_path: Path) -> None:
    failures = [(0, WorkerDiedError("it died"))] * 3
    with ServedApp(tmp_path / "server", FakeExecutor(failures=failures), runs=True) as app:
        assert made(app)["error"]["code"] == "worker_died"
        found = counted(app, 'everyframe_jobs_total{model="shapes",status="failed"}')
    assert found['everyframe_worker_deaths_total{cause="worker_died"}'] == 3


def test_nothing_is_remembered_of_a_job_that_is_gone(tmp_path: Path) -> None:
    """It was deleted before its end was followed."""
    with ServedApp(tmp_path / "server") as app:
        metrics = app.context.metrics
        for number, (kind, data) in enumerate(
            [("status", {"status": "queued", "cause": "worker_died"}), ("deleted", {})]
        ):
            metrics.follow(StoredEvent(number, "video_1", "", kind, data, 0.0), None)
        assert not metrics._causes


def test_metrics_may_be_open(tmp_path: Path) -> None:
    from helpers.server_app import key

    keys = (key("ann", "a"),)
    with ServedApp(tmp_path / "a", keys=keys) as app:
        assert app.client.get("/metrics").status_code == 401
    with ServedApp(tmp_path / "b", keys=keys, has_open_metrics=True) as app:
        assert app.client.get("/metrics").status_code == 200


def test_a_trace_is_that_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra [otel] is not installed")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    monkeypatch.setattr(
        "everyframe.server.http.app.JobTraces", lambda store: JobTraces(store, kept)
    )
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with ServedApp(tmp_path / "server", FakeExecutor(), runs=True, has_traces=True) as app:
        body = {"prompt": "a secret red circle", "model": "shapes"}
        header = {"traceparent": f"00-{trace}-{span}-01"}
        app.client.post("/v1/videos", json=body, headers=header)
        counted(app, 'everyframe_jobs_total{model="shapes",status="completed"}')
    spans = kept.get_finished_spans()
    (whole,) = (each for each in spans if each.name == "generate_video")
    assert whole.context.trace_id == int(trace, 16)
    assert whole.parent is not None
    assert whole.parent.span_id == int(span, 16)
    inner = [each for each in spans if each is not whole]
    assert [each.name for each in inner] == [
        "queue", "prepare", "stage text", "stage denoise", "stage decode",
    ]  # fmt: skip
    assert all(each.parent.span_id == whole.context.span_id for each in inner)
    assert all(whole.start_time <= each.start_time <= each.end_time for each in inner)
    assert "secret" not in str([dict(each.attributes) for each in spans])


def test_a_callers_trace_has_one_form() -> None:
    good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert trace_parent(good) == good
    for wrong in (None, "", good + "\r\nx: y", "01" + good[2:], good[:-1], good.upper()):
        assert trace_parent(wrong) is None


def test_traces_name_their_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(traces.__dict__["os"].sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingPackageError, match=r"everyframe\[otel\]"):
        JobTraces(None)  # type: ignore[arg-type]
