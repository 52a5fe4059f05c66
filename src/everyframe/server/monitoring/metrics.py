"""Metrics for Prometheus: requests, the queue, and durations and memory of jobs.

Labels hold no ids, prompts or file names. Each application has its own registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from everyframe._version import __version__
from everyframe.hardware.facts import package_versions
from everyframe.server.dispatch.dispatcher import Dispatcher
from everyframe.server.queue.jobs import FINAL, Job, StoredEvent
from everyframe.server.queue.store import JobStore

MEDIA_TYPE = CONTENT_TYPE_LATEST

_LONG = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
_SHORT = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
#: Methods of HTTP that have a label of their own; a client may write any other word.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
#: Errors that mean that a worker process is gone.
_DEATHS = frozenset({"worker_died", "device_lost", "peer_lost"})


class Metrics:
    """The metrics of one server."""

    def __init__(self, store: JobStore, dispatcher: Dispatcher) -> None:
        self._registry = registry = CollectorRegistry()
        self._causes: dict[str, str] = {}
        registry.register(
            _CollectedGauge("everyframe_queue_jobs", "Jobs by status.", "status", store.count)
        )

        def paused() -> dict[str, float]:
            found = dispatcher.paused_groups
            return {name: float(name in found) for name in dispatcher.groups}

        registry.register(
            _CollectedGauge(
                "everyframe_group_paused", "1 while a group's devices fail.", "group", paused
            )
        )

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"everyframe_{name}", text, labels, registry=registry)

        def histogram(
            name: str, text: str, *labels: str, buckets: tuple[float, ...] = _LONG
        ) -> Histogram:
            return Histogram(f"everyframe_{name}", text, labels, registry=registry, buckets=buckets)

        self._requests = counter(
            "http_requests_total", "Requests by route.", "method", "route", "status"
        )
        self._request_seconds = histogram(
            "http_request_duration_seconds", "Time of requests; a stream's whole length.",
            "method", "route", buckets=_SHORT,
        )  # fmt: skip
        self._jobs = counter("jobs_total", "Jobs that ended.", "model", "status")
        self._wait = histogram("queue_wait_seconds", "Time from a job's creation to its start.")
        self._job_seconds = histogram(
            "job_duration_seconds", "Time from a job's start to its end.", "model"
        )
        self._stage_seconds = histogram(
            "stage_duration_seconds", "Time of a job's stages.", "model", "stage"
        )
        self._step_seconds = histogram(
            "step_duration_seconds", "Time of steps, two of them a second.", "model", buckets=_SHORT
        )
        self._load_seconds = histogram(
            "model_load_seconds", "Time that a job's worker loaded weights.", "model"
        )
        self._memory = Gauge(
            "everyframe_device_memory_peak_bytes", "Peak memory of the last job's worker.",
            ["device"], registry=registry,
        )  # fmt: skip
        self._repairs = counter("repairs_total", "Repairs of runs.", "cause")
        self._resumes = counter("resumes_total", "Runs that were resumed.", "cause")
        self._deaths = counter("worker_deaths_total", "Worker processes that died.", "cause")
        self._frames = counter("frames_total", "Frames of completed videos.")
        build = Gauge(
            "everyframe_build_info", "1; versions.", ["version", "torch"], registry=registry
        )
        build.labels(__version__, package_versions().get("torch", "")).set(1)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        method = method if method in _METHODS else "other"
        self._requests.labels(method, route, str(status)).inc()
        self._request_seconds.labels(method, route).observe(seconds)

    def follow(self, event: StoredEvent, job: Job | None) -> None:
        """Update the metrics by an event of a job."""
        data = event.data
        if event.type == "repaired":
            self._repairs.labels(str(data.get("cause", "unclear"))).inc()
        elif event.type == "resumed":
            self._resumes.labels(self._causes.pop(event.video, "retry")).inc()
        elif event.type == "progress" and job is not None:
            self._step_seconds.labels(job.model).observe(data.get("s_per_step") or 0)
        elif event.type == "status":
            self._follow_status(event, job)
        elif event.type in ("done", "deleted"):
            self._causes.pop(event.video, None)
            if job is not None:
                self._follow_end(job)

    def _follow_status(self, event: StoredEvent, job: Job | None) -> None:
        if cause := event.data.get("cause"):
            self._causes[event.video] = cause
            if cause in _DEATHS:
                self._deaths.labels(cause).inc()
        elif event.data.get("status") == "in_progress" and event.video not in self._causes:
            if job is not None:
                self._wait.observe(max(event.at - job.created_at, 0))

    def _follow_end(self, job: Job) -> None:
        if job.status not in FINAL:
            return
        self._jobs.labels(job.model, job.status).inc()
        cause = (job.error or {}).get("code")
        if cause in _DEATHS:
            self._deaths.labels(str(cause)).inc()
        if job.status != "completed" or job.started_at is None or job.completed_at is None:
            return
        self._job_seconds.labels(job.model).observe(job.completed_at - job.started_at)
        for stage, seconds in job.report.get("stage_durations", {}).items():
            self._stage_seconds.labels(job.model, stage).observe(seconds)
        if "load_seconds" in job.report:
            self._load_seconds.labels(job.model).observe(job.report["load_seconds"])
        if job.report.get("peak_memory_mb") is not None:
            self._memory.labels(job.group or "").set(job.report["peak_memory_mb"] * 1e6)
        num_videos = job.resolved.get("num_videos", 1)
        self._frames.inc(num_videos * (job.resolved.get("num_frames") or 0))


class _CollectedGauge:
    """A gauge whose values by label are read at each scrape."""

    def __init__(
        self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        self._name, self._text, self._label, self._read = name, text, label, read

    def describe(self) -> Iterator[Metric]:
        """The gauge's name and help, without values."""
        yield GaugeMetricFamily(self._name, self._text)

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        found = GaugeMetricFamily(self._name, self._text, labels=[self._label])
        for label, value in self._read().items():
            found.add_metric([label], value)
        yield found
