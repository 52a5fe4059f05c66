"""``everyframe generate``: make a video of a prompt.

The order: check what was asked, check where it goes, plan, then let events flow to the screen and
frames into the file. The last line on standard output is the bare path of the file.
Read next: `sink.py`, `progress.py`, `everyframe.engine.run`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from everyframe.cli import plan as plan_command
from everyframe.cli.asking import Asked, asked
from everyframe.cli.options import RUN_FLAGS, composed
from everyframe.cli.progress import Reporter, reporter
from everyframe.core.errors import CannotRunError, ExitCode, InputError
from everyframe.core.events import Frames, Note, Planned, Ready, Sound, VideoDone, Written
from everyframe.core.request import Request
from everyframe.media.paths import check_output

if TYPE_CHECKING:
    from everyframe.cli.sink import Sink

_HELP = """Make a video of a prompt.

The ending of the output tells its kind. The last line printed is the path of the file.
"""


def generate(
    *,
    output: str | None = None,
    from_record: str | None = None,
    json: bool = False,
    dry_run: bool = False,
    as_profile: str | None = None,
    **given: Any,
) -> int:
    """Make the video; the exit code. `given` holds the options of the request by name."""
    wanted = asked(given, from_record)
    if output is not None:
        check_output(output)
    if dry_run:
        return plan_command.show(wanted.request, output, as_json=json, profile=as_profile)
    if as_profile is not None:
        raise InputError(
            f"--as {as_profile} plans for another machine and can make nothing here; give --dry-run"
        )
    paths: list[str] = []
    try:
        with reporter(json) as shown:
            _make(wanted, output, shown, paths)
    except CannotRunError:
        _show_impossible(wanted.request, as_json=json)
        raise
    finally:
        # After the bar is gone; and what was finished is named even if a later video failed.
        if not json:
            for path in paths:
                print(path, flush=True)
    return int(ExitCode.DONE)


def _make(wanted: Asked, output: str | None, shown: Reporter, finished: list[str]) -> None:
    """Run the request and write its videos; the path of each goes into `finished`."""
    # Not on top: these bring torch and FFmpeg, and a wrong option should be told at once.
    with shown.starting():
        from everyframe.cli.sink import Sink as OpenFiles
        from everyframe.cli.sink import paths_for
        from everyframe.engine.run import stream

    events = stream(wanted.request, num_threads=wanted.num_threads)
    planned = next(events)
    assert isinstance(planned, Planned), "the plan comes first"
    paths = paths_for(planned.plan, output)
    shown.show(planned)
    with OpenFiles(paths, planned.plan.settings.fps) as sink:
        for event in events:
            if isinstance(event, Frames):
                sink.add(event)
            if isinstance(event, Sound):
                _keep_sound(sink, event, shown)
            shown.show(event)
            if isinstance(event, Ready):
                _show_differences(wanted, event, shown)
            if isinstance(event, VideoDone):
                path = sink.finish(event)
                finished.append(path)
                shown.show(Written(path, event.seed))


def _keep_sound(sink: Sink, event: Sound, shown: Reporter) -> None:
    """Put the sound beside the frames, or say why it can't be."""
    why_not = sink.add_sound(event)
    if why_not is not None:
        shown.show(Note(why_not))


def _show_differences(wanted: Asked, ready: Ready, shown: Reporter) -> None:
    """Say why the frames may differ from those of the record that is repeated."""
    if wanted.record is None:
        return
    from everyframe.engine.record import differences

    for line in differences(wanted.record, ready.record):
        shown.show(Note(f"the frames may differ from the recorded ones: {line}"))


def _show_impossible(request: Request, *, as_json: bool) -> None:
    """The plan that can't be done here, so that it can be seen what is in the way."""
    from everyframe.planning.resolve import resolve

    plan = resolve(request)
    if plan.obstacle is not None:
        plan_command.print_it(plan, sys.stdout if as_json else sys.stderr, as_json=as_json)


COMMAND = composed(generate, tuple(RUN_FLAGS), _HELP)
