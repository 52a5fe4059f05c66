"""Show progress: a bar, plain lines, or JSON lines.

All output except JSON goes to standard error. The bar needs a terminal; without one, a line is
printed every 5 seconds. `everyframe.core.events` defines the events.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from everyframe.cli.streams import print_message
from everyframe.cli.tables import (
    clock,
    console,
    duration,
    headline,
    json_line,
    one_line,
    print_plan,
)
from everyframe.core.events import (
    ComponentLoaded,
    Event,
    Note,
    Planned,
    Repaired,
    StageDone,
    StageStarted,
    Step,
)
from everyframe.core.plan import Plan

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Seconds between plain lines of one stage.
_PAUSE = 5.0


class Reporter(AbstractContextManager["Reporter"]):
    """Show events; the base class shows nothing."""

    def starting(self) -> AbstractContextManager[object]:
        """Context while the engine is imported, which takes seconds on a slow disk."""
        return nullcontext()

    def show(self, event: Event) -> None:
        """Show one event; most reporters ignore most events."""

    def refused(self, plan: Plan) -> None:
        """Show a plan that can't run here, so that the obstacle is visible."""

        print_plan(plan, sys.stderr)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Restore the terminal."""


def reporter(as_json: bool) -> Reporter:
    """The reporter that suits standard error."""
    if as_json:
        return JsonLines()

    screen = console(sys.stderr)
    is_screen = sys.stderr.isatty() and screen.is_terminal and not screen.is_dumb_terminal
    return Bar() if is_screen else Lines()


class JsonLines(Reporter):
    """Print each event as one JSON line on standard output at once."""

    def show(self, event: Event) -> None:
        print(json_line(event.to_json()), flush=True)

    def refused(self, plan: Plan) -> None:
        self.show(Planned(plan))


@dataclass
class _Stage:
    """Progress of a stage. Time left uses the mean step time without loading.

    In a resumed run `done` counts earlier steps too; `seen` counts those of this run.
    """

    label: str
    num_steps: int
    done: int = 0
    seen: int = 0
    seconds: float = 0.0

    @classmethod
    def started(cls, event: StageStarted) -> _Stage:
        clip = f" {event.clip + 1}/{event.num_clips}" if event.num_clips > 1 else ""
        return cls(one_line(f"{event.stage}{clip}"), event.num_steps)

    def step(self, event: Step) -> None:
        self.done = event.step
        self.seen += 1
        self.seconds += event.seconds

    @property
    def time_left(self) -> str:
        if not 0 < self.done < self.num_steps:
            return ""
        return f"{clock(self.seconds / self.seen * (self.num_steps - self.done))} left"


class Lines(Reporter):
    """Plain lines on standard error, for logs: the end of each stage, and one every few seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last = now()
        self._stage = _Stage("", 0)

    def show(self, event: Event) -> None:
        if isinstance(event, Planned):
            self._print(*headline(event.plan))
        elif isinstance(event, Note):
            self._print(f"note: {event.text}")
        elif isinstance(event, Repaired):
            self._print(f"repaired: {event.text}")
        elif isinstance(event, StageStarted):
            self._stage = _Stage.started(event)
        elif isinstance(event, StageDone):
            self._print(f"{self._stage.label}: done in {duration(event.seconds)}")
        elif isinstance(event, Step):
            stage = self._stage
            stage.step(event)
            if self._now() - self._last >= _PAUSE and stage.done < stage.num_steps:
                self._print(f"{stage.label} {stage.done}/{stage.num_steps}, {stage.time_left}")

    def _print(self, *lines: str) -> None:
        self._last = self._now()
        for line in lines:
            print_message(one_line(line))


class Bar(Reporter):
    """One row per stage on the terminal: bar, steps, time left; finished rows stay."""

    def __init__(self) -> None:
        self._progress = _rows()
        self._row: TaskID | None = None
        self._stage = _Stage("", 0)
        self._row_of: dict[str, TaskID] = {}

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._row is not None and error is not None:
            self._progress.update(self._row, tail="stopped")
            self._progress.stop_task(self._row)
        self._progress.stop()

    def starting(self) -> AbstractContextManager[object]:
        return self._progress.console.status("starting")

    def show(self, event: Event) -> None:
        if isinstance(event, Planned):
            for line in headline(event.plan):
                self._progress.console.print(line)
            # Not before: what has to be fetched shows a bar of its own.
            self._progress.start()
        elif isinstance(event, Note):
            self._progress.console.print(f"note: {event.text}", style="yellow")
        elif isinstance(event, Repaired):
            self._progress.console.print(f"repaired: {event.text}", style="yellow", markup=False)
        elif isinstance(event, StageStarted):
            if event.stage in self._row_of:  # of the clip before; many clips would fill the screen
                self._progress.remove_task(self._row_of[event.stage])
            self._stage = _Stage.started(event)
            self._row = self._progress.add_task(self._stage.label, total=None, tail="loading")
            self._row_of[event.stage] = self._row
        elif isinstance(event, ComponentLoaded) and self._row is not None:
            self._progress.update(self._row, total=self._stage.num_steps or None, tail="")
        elif isinstance(event, Step):
            self._step(event)
        elif isinstance(event, StageDone):
            self._end(event)

    def _step(self, event: Step) -> None:
        assert self._row is not None
        stage = self._stage
        stage.step(event)
        self._progress.update(
            self._row, completed=stage.done, total=stage.num_steps, tail=stage.time_left
        )

    def _end(self, event: StageDone) -> None:
        assert self._row is not None
        total = max(1, self._stage.done)
        self._progress.update(self._row, completed=total, total=total, tail=duration(event.seconds))


def _rows() -> Progress:
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class Steps(ProgressColumn):
        """``12/30``, or nothing while the number of steps is unknown."""

        def render(self, task: Task) -> Text:
            return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")

    return Progress(
        TextColumn("{task.description:<10}", style="bold", markup=False),
        BarColumn(bar_width=40),
        Steps(),
        TextColumn("{task.fields[tail]}", style="dim", markup=False),
        console=console(sys.stderr),
        # What is printed on standard output is the result and must not be drawn on the screen.
        redirect_stdout=False,
    )
