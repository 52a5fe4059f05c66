"""The warm engine: a model that stays in memory from one request to the next.

Its videos equal those of `everyframe.generate` bit for bit, whatever ran before.
`runtime/components/component_cache.py` decides what stays in memory; `warm_workers.py` has the
worker processes of `isolate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

from everyframe.checkpoints.locate import locate
from everyframe.core.errors import EveryframeError, InputError
from everyframe.core.events import Event, Events
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine import run as engine
from everyframe.engine.generate_call import GenerateCall, load_run_for
from everyframe.engine.results import EventDelivery, Output, collect_videos
from everyframe.engine.resumption.resume import resume_run
from everyframe.engine.workers.executor import WarmModel, warm_models
from everyframe.engine.workers.launcher import ranks_of
from everyframe.engine.workers.warm_workers import WarmWorkers
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.media.video import Video
from everyframe.planning.input_checks import check_input_files
from everyframe.planning.resolve import resolve
from everyframe.runs.folder import find_run, runs_folder
from everyframe.runs.run_state import SaveOptions
from everyframe.runtime.components.component_cache import ComponentCache


def load(model: str | Path | None = None, *, isolate: bool = False, **options: Any) -> Engine:
    """Open a model for many requests: what the first one loads stays for the others.

    Each component is loaded when a request first needs it, in the precision that its plan chooses,
    and stays as long as memory allows; the least recently used go first. Every video is bit for bit
    that of `generate`.

    Args:
        model: as in `generate`; None is the embedded model.
        isolate: compute in a worker process, which stays too; its crash is an error of one request.
            Requests for several devices (``num_devices=3``) always do.
        options: options of `generate` that all requests have, unless they give others.

    Raises:
        InputError: unknown model, or an invalid option.
    """
    given = options if model is None else {"model": str(model), **options}
    return Engine(given, isolate=isolate)


class Engine:
    """A model that stays in memory; made by `load`. Thread-safe, and a context manager."""

    def __init__(self, options: Mapping[str, Any], *, isolate: bool) -> None:
        self._options = dict(options)
        request = self._request({"prompt": ""})
        if request.model is not None:
            locate(request.model, variant=request.family_options.get("variant"))
        self._cache = ComponentCache()
        self._workers = WarmWorkers()
        self._is_isolated, self._is_closed = isolate, False
        if isolate:
            self._workers.start(request.num_ranks)

    def generate(
        self,
        prompt: str | None = None,
        *,
        output: Output = "uint8",
        from_record: str | Path | Mapping[str, Any] | Video | None = None,
        run_dir: str | Path | None = None,
        on_event: Callable[[Event], None] | None = None,
        **options: Any,
    ) -> Video | list[Video]:
        """Make a video, or several; arguments, results and errors are those of `generate`."""
        given = {**self._options, **self._check_options(options)}
        call = GenerateCall.of(prompt, output, from_record, run_dir, given)
        self._check_options({"model": call.request.model})  # a record may name another
        events = self._events(call.job, call.keep)
        return call.videos(events, on_event)

    def stream(self, request: Request | str | None = None, **options: Any) -> Events:
        """Yield the events of a request as `everyframe.stream` does; `options` as in `plan`."""
        job = WorkerJob(self._request_of(request, options), root=runs_folder())
        return self._events(job, SaveOptions(runs_folder()))

    def resume(
        self,
        run: str | Path | None = None,
        *,
        output: Output = "uint8",
        on_event: Callable[[Event], None] | None = None,
    ) -> Video | list[Video]:
        """Resume an interrupted run of this model; see `everyframe.resume`."""
        self._check_open()
        folder = find_run(run)
        begun, trusts = load_run_for(output, folder), bool(self._options.get("trust_remote_code"))
        if self._is_isolated or ranks_of(folder) > 1:
            is_uint8 = output == "uint8"
            job = WorkerJob(run=folder.path, as_uint8=is_uint8, trust_remote_code=trusts)
            events = self._workers.run(job, begun.place_of_workers)
        else:
            events = resume_run(folder, trust_remote_code=trusts, cache=self._cache)
        videos = collect_videos(events, output, EventDelivery(on_event))
        return videos if len(videos) > 1 else videos[0]

    def plan(self, request: Request | str | None = None, **options: Any) -> Plan:
        """Plan a request as `everyframe.plan` does: a `Request`, or the prompt and options."""
        whole = self._request_of(request, options)
        if self._is_isolated:
            return self._workers.plan(whole)
        return resolve(whole, freed=self._cache.freed)

    def describe(self) -> list[WarmModel]:
        """What is in memory now."""
        return [*warm_models(self._cache.models()), *self._workers.describe()]

    def close(self) -> None:
        """Free all memory and end all workers. Interrupted runs can be resumed."""
        self._is_closed = True
        self._workers.close()
        self._cache.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _events(self, job: WorkerJob, keep: SaveOptions) -> Events:
        self._check_open()
        request = job.request
        assert request is not None
        if self._is_isolated or request.num_ranks > 1:
            return self._workers.run(job)
        check_input_files(request)
        return self._here(request, job.num_threads, keep)

    def _here(self, request: Request, num_threads: int | None, keep: SaveOptions) -> Events:
        """The events of a run in this process; one that ends after `close` leaves nothing."""
        events = engine.stream(request, num_threads=num_threads, keep=keep, cache=self._cache)
        try:
            with closing(events):
                yield from events
        finally:
            if self._is_closed:
                self._cache.clear()

    def _request_of(self, request: Request | str | None, options: Mapping[str, Any]) -> Request:
        if not isinstance(request, Request):
            given = options if request is None else {"prompt": request, **options}
            return self._request(given)
        if options:
            raise InputError(f"a request and options ({', '.join(options)}); give one of them")
        return self._request(request.given())

    def _request(self, given: Mapping[str, Any]) -> Request:
        return Request(**{**self._options, **self._check_options(given)})

    def _check_options(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options; `InputError` for another model."""
        own = self._options.get("model")
        other = given.get("model", own)
        if other is not None and str(other) != str(own or "shapes"):
            raise InputError(
                f"model={other}, and this engine is of {own or 'shapes'}; open another one: "
                f"everyframe.load({str(other)!r})"
            )
        return {name: value for name, value in given.items() if name != "model"}

    def _check_open(self) -> None:
        if self._is_closed:
            raise EveryframeError("this engine is closed; open another one: everyframe.load(...)")
