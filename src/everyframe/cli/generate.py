"""``everyframe generate``: make a video from a prompt.

The steps: check the request, check the output path, plan, then show events and write frames as they
arrive. The last line on standard output is the path of the file.

Read next: `progress.py`, `everyframe.engine.output_files`, `everyframe.engine.run`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everyframe.cli import plan as plan_command
from everyframe.cli.executors import RayChoice, chosen_ray, executor_flags
from everyframe.cli.options import RUN_FLAGS, make_command
from everyframe.cli.parse_request import ParsedRequest, parse_request
from everyframe.cli.progress import Reporter, reporter
from everyframe.cli.tables import one_line
from everyframe.core.errors import (
    CannotRunError,
    EveryframeError,
    ExitCode,
    InputError,
    PeerLostError,
)
from everyframe.core.events import (
    AudioDecoded,
    Event,
    Events,
    FramesDecoded,
    Note,
    Planned,
    Preview,
    RunSaved,
    VideoDone,
    VideoWritten,
)
from everyframe.engine.workers.torchrun import under_torchrun
from everyframe.media.output_path import check_here
from everyframe.planning.input_checks import check_input_files, check_output_option
from everyframe.runs.folder import RunFolder, root_of
from everyframe.runs.resume_hint import resume_hint

if TYPE_CHECKING:
    from everyframe.engine.output_files import OutputFiles

_HELP = """Make a video from a prompt.

The ending of the output sets its format. The last line printed is the path of the file.
"""


def generate(
    *,
    output: str | None = None,
    from_record: str | None = None,
    json: bool = False,
    dry_run: bool = False,
    as_profile: str | None = None,
    run_dir: str | None = None,
    executor: str | None = None,
    ray_address: str | None = None,
    place_timeout: str | None = None,
    **given: Any,
) -> int:
    """Make the video; the exit code. `given` holds the options of the request by name."""
    wanted = parse_request(given, from_record)
    ray = chosen_ray(executor, ray_address, place_timeout)
    if ray is not None and (dry_run or as_profile is not None):
        raise InputError("a dry run plans for this machine; leave out --executor ray")
    check_output_option(wanted.request, output)
    if dry_run and is_silent():
        return int(ExitCode.DONE)
    if dry_run:
        return plan_command.show(wanted.request, output, as_json=json, profile=as_profile)
    if as_profile is not None:
        raise InputError(
            f"--as {as_profile} plans for another machine and can make nothing here; give --dry-run"
        )
    if ray is None:  # else the nodes check them, which have the models
        check_input_files(wanted.request)
    if output is None:
        check_here()
    return make(_events(wanted, output, run_dir, ray), output, json=json)


def _events(
    wanted: ParsedRequest, output: str | None, run_dir: str | None, ray: RayChoice | None
) -> Callable[[], Events]:
    """Starter of the engine, on a cluster or in worker processes if possible."""
    place = None if output is None else absolute(output)

    def started() -> Events:
        # Late import: brings NumPy, or torch, and a wrong option should be refused at once.
        from everyframe.engine.records.comparison import compare_with
        from everyframe.engine.workers.launcher import run_in_workers
        from everyframe.engine.workers.worker_process import WorkerJob
        from everyframe.engine.workers.worker_start import is_possible

        root = root_of(run_dir)
        if ray is not None or is_possible():
            job = WorkerJob(wanted.request, num_threads=wanted.num_threads, root=root, output=place,
                      as_uint8=True)  # fmt: skip
            ranked = job.of_ranks(wanted.request.num_ranks, under_torchrun())
            events = run_in_workers(ranked) if ray is None else ray.run(ranked, Path.cwd())
            return events if wanted.record is None else compare_with(wanted.record, events)
        from everyframe.engine.run import stream
        from everyframe.runs.run_state import SaveOptions

        keep = SaveOptions(root, place, as_uint8=True)
        events = stream(wanted.request, num_threads=wanted.num_threads, keep=keep)
        return events if wanted.record is None else compare_with(wanted.record, events)

    return started


def is_silent() -> bool:
    """Whether this is a torchrun rank other than the one that prints."""
    ranks = under_torchrun()
    return ranks is not None and ranks.rank > 0


def absolute(output: str) -> str:
    """The absolute output path; a folder keeps its trailing separator."""
    return os.path.abspath(output) + ("/" if output.endswith(("/", os.sep)) else "")


def make(
    start: Callable[[], Events],
    output: str | None,
    *,
    json: bool,
) -> int:
    """Consume the events of a run and write its videos; return the exit code.

    Under torchrun only the first rank shows and writes anything.
    """
    if is_silent():
        with closing(start()) as events:
            for _ in events:
                pass
        return int(ExitCode.DONE)
    with _print_paths(json) as finished, reporter(json) as shown:
        with shown.starting():
            events = start()
            # Late import: brings FFmpeg. The worker, where there is one, is starting meanwhile.
            from everyframe.engine.output_files import OutputFiles as OpenFiles
            from everyframe.engine.output_files import paths_for

            planned = next(events)
        assert isinstance(planned, Planned), "the plan comes first"
        if planned.plan.infeasible is not None:
            with closing(events):
                shown.refused(planned.plan)
                raise CannotRunError(planned.plan.infeasible)
        paths = paths_for(planned.plan, output)
        shown.show(planned)
        run: RunFolder | None = None
        try:
            with closing(events), OpenFiles(paths, planned.plan.settings.fps) as sink:
                for event in events:
                    if isinstance(event, RunSaved):
                        run = RunFolder(Path(event.path))
                    _take(event, sink, shown)
                    if isinstance(event, VideoDone):
                        finished[event.seed] = _finish(event, sink, shown, run)
        except KeyboardInterrupt as error:
            how = resume_hint(run) or "nothing unfinished was left behind"
            raise KeyboardInterrupt(f"interrupted; {how}") from error
        except BaseException as error:
            _print_resume_hint(error, run)
            raise
    return int(ExitCode.DONE)


@contextmanager
def _print_paths(json: bool) -> Iterator[dict[int, str]]:
    """Context: the path of each finished video by seed; they are printed at the end."""
    paths: dict[int, str] = {}
    try:
        yield paths
    finally:
        # After the bar is gone; and what was finished is named even if a later video failed.
        if not json:
            for _, path in sorted(paths.items()):
                # A program that reads it wants the very name; a terminal must not be steered by it.
                print(one_line(path) if sys.stdout.isatty() else path, flush=True)


def _print_resume_hint(error: BaseException, run: RunFolder | None) -> None:
    """Name the run on standard error, unless the message of `error` does that."""
    # Our errors do, but for a rank that another one ended: it alone knows the folder.
    is_ended = isinstance(error, PeerLostError) and under_torchrun() is not None
    is_named = isinstance(error, EveryframeError) and not is_ended
    if not is_named and (hint := resume_hint(run)):
        print(f"interrupted; {hint}", file=sys.stderr, flush=True)


def _take(event: Event, sink: OutputFiles, shown: Reporter) -> None:
    if isinstance(event, FramesDecoded):
        sink.add(event)
    if isinstance(event, AudioDecoded):
        _show_note(shown, sink.add_audio(event))
    if isinstance(event, Preview):
        _show_note(shown, sink.show_preview(event))
    shown.show(event)


def _finish(event: VideoDone, sink: OutputFiles, shown: Reporter, run: RunFolder | None) -> str:
    path = sink.finish(event)
    if run is not None and run.path.is_dir():
        run.mark_done(event.seed)
    shown.show(VideoWritten(path, event.seed))
    return path


def _show_note(shown: Reporter, text: str | None) -> None:
    if text is not None:
        shown.show(Note(text))


COMMAND = make_command(generate, tuple(RUN_FLAGS), _HELP, executor_flags())
