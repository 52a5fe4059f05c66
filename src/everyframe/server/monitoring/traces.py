"""Spans for OpenTelemetry: one per job with a child per stage, in the client's trace.

Needs the extra `[otel]`. OpenTelemetry's own variables, such as ``OTEL_EXPORTER_OTLP_ENDPOINT``,
set where the spans are sent.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from everyframe.core.errors import MissingPackageError
from everyframe.server.queue.jobs import Job, StoredEvent
from everyframe.server.queue.store import JobStore

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

#: Header of a caller's trace; https://www.w3.org/TR/trace-context/.
HEADER = "traceparent"
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
#: OpenTelemetry's switch for conventions in development, and the word for those of models.
_SWITCH, _MODELS = "OTEL_SEMCONV_STABILITY_OPT_IN", "gen_ai_latest_experimental"
#: Events of a job that are read for its spans.
_MOST_EVENTS = 10_000


def trace_parent(header: str | None) -> str | None:
    """The ``traceparent`` header of a client; None if it is not valid."""
    return header if header is not None and _TRACEPARENT.fullmatch(header) else None


class JobTraces:
    """Makes the spans of each job as it ends."""

    def __init__(self, store: JobStore, exporter: SpanExporter | None = None) -> None:
        """`exporter` None sends them by OTLP. Raises `MissingPackageError` without the extra."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter()
        except ImportError as error:
            raise MissingPackageError(
                f"traces need {error.name}: pip install 'everyframe[otel]'"
            ) from error
        self._store = store
        name = os.environ.get("OTEL_SERVICE_NAME", "everyframe")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("everyframe.server")

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def follow(self, event: StoredEvent, job: Job | None) -> None:
        """Make the spans of a job that ended."""
        if event.type == "done" and job is not None and job.is_final:
            self._make(job, event.at)

    def _make(self, job: Job, ended: float) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {HEADER: job.report[HEADER]} if HEADER in job.report else {}
        parent = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span(
            "generate_video", parent, trace.SpanKind.CONSUMER, attributes=_attributes(job),
            start_time=_nanoseconds(job.created_at),
        )  # fmt: skip
        if job.error is not None:
            span.set_status(trace.StatusCode.ERROR, str(job.error["message"]))
            span.set_attribute("error.type", str(job.error["code"]))
        inside = trace.set_span_in_context(span)
        for name, attributes, begins, ends in self._parts(job, ended):
            part = self._tracer.start_span(
                name, inside, attributes=attributes, start_time=_nanoseconds(begins)
            )
            part.end(_nanoseconds(ends))
        span.end(_nanoseconds(ended))

    def _parts(self, job: Job, ended: float) -> list[tuple[str, dict[str, Any], float, float]]:
        """(name, attributes, begin, end) of the wait and of each stage."""
        events = self._store.events(video=job.id, limit=_MOST_EVENTS)
        cuts: list[tuple[str, dict[str, Any], float]] = []
        for event in events:
            if event.type == "stage":
                number = {"everyframe.num_steps": int(event.data.get("num_steps") or 0)}
                cuts.append((f"stage {event.data.get('stage')}", number, event.at))
            elif event.type == "status" and event.data.get("status") == "queued":
                cuts.append(("queue", {}, event.at))
            elif event.type == "status":
                cuts.append(("prepare", {}, event.at))
        ends = [at for _, _, at in cuts[1:]] + [ended]
        return [(*cut, end) for cut, end in zip(cuts, ends, strict=True)]


def _attributes(job: Job) -> dict[str, Any]:
    resolved = job.resolved
    found: dict[str, Any] = {
        "everyframe.video.id": job.id,
        "everyframe.video.status": job.status,
        "everyframe.model": job.model,
        "everyframe.attempts": job.attempts,
    }
    for name in ("width", "height", "num_frames", "num_inference_steps"):
        if resolved.get(name) is not None:
            found[f"everyframe.{name}"] = resolved[name]
    if _MODELS in os.environ.get(_SWITCH, "").split(","):
        found |= {
            "gen_ai.operation.name": "generate_content",
            "gen_ai.request.model": job.model,
            "gen_ai.provider.name": "everyframe",
        }
    return found


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
