"""Calls of `generate` and `resume`: their request or run, and their videos."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyframe.core.errors import InputError
from everyframe.core.events import Event, Events
from everyframe.core.request import Request
from everyframe.engine.records.comparison import compare_with
from everyframe.engine.records.recorded_request import record_in, request_from, threads_to_repeat
from everyframe.engine.results import EventDelivery, Output, collect_videos
from everyframe.engine.resumption.interrupted_run import InterruptedRun, load_run
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.media.video import Video
from everyframe.runs.folder import RunFolder, root_of
from everyframe.runs.run_state import SaveOptions


@dataclass(frozen=True)
class GenerateCall:
    """The arguments of `everyframe.generate`, resolved.

    Attributes:
        request: the request.
        record: the record that it repeats, if any.
        num_threads: CPU threads to repeat that record.
        root: folder of runs to save in; None saves nothing.
        output: format of the frames.
    """

    request: Request
    record: Mapping[str, Any] | None
    num_threads: int | None
    root: Path | None
    output: Output

    @classmethod
    def of(
        cls,
        prompt: object,
        output: Output,
        from_record: str | Path | Mapping[str, Any] | Video | None,
        run_dir: str | Path | None,
        options: Mapping[str, Any],
    ) -> GenerateCall:
        """The call with these arguments; `InputError` if one is invalid."""
        check_output(output)
        if prompt is not None and not isinstance(prompt, str):
            raise InputError(
                f"prompt must be text, got a {type(prompt).__name__}; give one prompt after the "
                "other, or a list to a pipeline in memory: everyframe.run(pipe, [...])"
            )
        given = options if prompt is None else {"prompt": prompt, **options}
        record = None if from_record is None else record_in(from_record)
        request = Request(**given) if record is None else request_from(record, given)
        num_threads = None if record is None else threads_to_repeat(record)
        return cls(request, record, num_threads, root_of(run_dir), output)

    @property
    def keep(self) -> SaveOptions:
        """How the run is saved."""
        return SaveOptions(self.root, as_uint8=self.output == "uint8")

    @property
    def job(self) -> WorkerJob:
        """The job of workers."""
        is_uint8 = self.output == "uint8"
        job = WorkerJob(
            self.request, num_threads=self.num_threads, root=self.root, as_uint8=is_uint8
        )
        return job.of_ranks(self.request.num_ranks)

    def videos(
        self, events: Events, on_event: Callable[[Event], None] | None
    ) -> Video | list[Video]:
        """The video of the run, or a list of several: one call of a pipeline may make more."""
        compared = compare_with(self.record, events)
        videos = collect_videos(compared, self.output, EventDelivery(on_event))
        return videos if len(videos) > 1 else videos[0]


def check_output(output: str) -> None:
    """Raise `InputError` for an unknown format of frames."""
    if output not in ("uint8", "float"):
        raise InputError(f'output must be "uint8" or "float", got {output!r}')


def load_run_for(output: str, folder: RunFolder) -> InterruptedRun:
    """The run in that folder, to be resumed with frames of that format.

    Raises:
        InputError: an unknown format, or the clips so far are saved in a coarser one.
        CorruptRunError: the folder has no run, or its files are corrupt.
    """
    check_output(output)
    begun = load_run(folder)
    if output == "float" and begun.as_uint8 and begun.plan.settings.chain > 1:
        raise InputError(f'{folder.name} was begun for output="uint8"; its clips are kept so')
    return begun
