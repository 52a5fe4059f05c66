"""Run a blocking pipeline call as a generator of its events.

A pipeline's `__call__` returns only when it is done, while a stream of events is read one at a
time. `run_in_thread` therefore makes the call in a second thread, which alternates with this one:
the call resumes when the next event is requested, and waits inside `emit` otherwise. Closing the
generator ends the call at its next module call. `run_here` needs no second thread: it makes the
call in the current thread and passes events to a callback at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from everyframe.core.events import Event
from everyframe.hardware.switches import Turn, is_exclusive
from everyframe.ops.attention import Kernels, lend_kernels
from everyframe.runtime.alternating_thread import AlternatingThread

_Result = TypeVar("_Result")

Emit = Callable[[Event], None]
Within = Callable[[], AbstractContextManager[Any]]
"""Makes the context that the call's thread enters before the call."""


Calling = Callable[[Callable[[Emit], Any]], Generator[Event, None, Any]]
"""Makes a call: yields its events; the generator's return value is its result."""


def run_in_thread(
    call: Callable[[Emit], _Result], within: Within
) -> Generator[Event, None, _Result]:
    """Run ``call(emit)`` in a thread and yield what it emits; the generator returns its result.

    For a run that sets torch's switches around each event. The call's thread enters ``within()``
    first. An exception in the call is raised here.
    """

    def emit(event: Event) -> None:
        # A run that holds the process exclusively restores attention kernels for the reader.
        with lend_kernels() if is_exclusive() else nullcontext():
            thread.hand_over(event)

    def run() -> _Result:
        # Not inference mode, if it is not the owner's: what a pipeline keeps in its modules
        # would be of no use to training afterwards.
        with within(), torch.no_grad():
            return call(emit)

    thread = AlternatingThread(run, "everyframe-pipeline")
    try:
        found = thread.resume()
        while not thread.is_over:
            yield found
            found = thread.resume()
    finally:
        if not thread.is_over:
            thread.stop()
    result: _Result = found
    return result


def run_beside_others(
    call: Callable[[Emit], _Result], within: Within
) -> Generator[Event, None, _Result]:
    """`run_in_thread` without process-wide switches, so that other runs can compute beside it."""
    return run_in_thread(_beside_others(call), within)


class _CallbackRaised(BaseException):
    """Ends the call when `on_event` has raised."""


def run_here(call: Callable[[Emit], _Result], on_event: Emit) -> Generator[Event, None, _Result]:
    """Run the call in this thread without process-wide switches.

    `on_event` gets each event at once; the events are yielded after the call. An exception from it
    ends the call and is raised here. Through the pipeline it passes as a BaseException, which no
    pipeline handles as an error of its own.
    """
    events: list[Event] = []
    raised: list[BaseException] = []

    def emit(event: Event) -> None:
        if raised:
            raise _CallbackRaised
        events.append(event)
        try:
            on_event(event)
        except BaseException as error:
            raised.append(error)
            raise _CallbackRaised from error

    try:
        with torch.no_grad():
            result = _beside_others(call)(emit)
    except _CallbackRaised:
        raise raised[0] from None
    except BaseException:
        yield from events
        raise
    if raised:
        raise raised[0]
    yield from events
    return result


def _beside_others(call: Callable[[Emit], _Result]) -> Callable[[Emit], _Result]:
    """The call beside other runs that set no switch; it releases its turn while an event is read.

    Attention kernels are process-wide. Once a repair of this run selects some, the run holds the
    process exclusively and restores the original kernels for readers of its events.
    """

    def made(emit: Emit) -> _Result:
        turn = Turn(is_alone=False)

        def between(event: Event) -> None:
            with lend_kernels(own) if turn.is_alone else nullcontext(), turn.left():
                emit(event)

        with turn:
            own = Kernels.now()
            try:
                return call(between)
            finally:
                if turn.is_alone and turn.is_held:
                    own.use()

    return made
