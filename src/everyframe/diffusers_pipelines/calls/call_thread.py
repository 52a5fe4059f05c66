"""Run a blocking pipeline call as a generator of its events.

A pipeline's `__call__` returns only when it is done, while a stream of events is read one at a
time. `run_in_thread` therefore makes the call in a second thread. Only one of the two threads runs
at a time: the call resumes when the next event is requested, and waits inside `emit` otherwise.
Closing the generator ends the call at its next module call. `InThread` needs no second thread: it
makes the call in the current thread and passes events to a callback at once.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from everyframe.core.events import Event
from everyframe.hardware.switches import Turn, is_exclusive
from everyframe.ops.attention import Kernels, kernels_lent

_Result = TypeVar("_Result")

Tell = Callable[[Event], None]
Within = Callable[[], AbstractContextManager[Any]]
"""Makes the context that the call's thread enters before the call."""


class Calling(Protocol):
    """Strategy for making a call: yields its events; the generator's return value is its result."""

    def __call__(
        self, call: Callable[[Tell], _Result]
    ) -> Generator[Event, None, _Result]: ...  # fmt: skip


@dataclass(frozen=True)
class InOwnThread:
    """Run the call in its own thread, for a run that sets torch's switches around each event."""

    within: Within

    def __call__(self, call: Callable[[Tell], _Result]) -> Generator[Event, None, _Result]:
        return run_in_thread(call, self.within)


@dataclass(frozen=True)
class Beside:
    """Run the call in its own thread without process-wide switches, so others can run beside it."""

    within: Within

    def __call__(self, call: Callable[[Tell], _Result]) -> Generator[Event, None, _Result]:
        return run_in_thread(_beside_others(call), self.within)


@dataclass(frozen=True)
class InThread:
    """Run the call in this thread without process-wide switches.

    `tell` gets each event at once; the events are yielded after the call.
    """

    tell: Tell

    def __call__(self, call: Callable[[Tell], _Result]) -> Generator[Event, None, _Result]:
        return _in_this_thread(_beside_others(call), self.tell)


class _Stopped(BaseException):
    """Raised inside the call when its events are no longer read."""


class _Alternating:
    """Hand-over point of the two threads."""

    def __init__(self, call: Callable[[Tell], Any], within: Within) -> None:
        self._call = call
        self._within = within
        self._go = threading.Semaphore(0)
        self._is_stopped = False
        self.answers: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        # A thread begins without what was set in this one's context, torch's switches of compiling
        # among it. A daemon, so that a call that hangs does not keep the process from ending.
        context = contextvars.copy_context()
        self.thread = threading.Thread(
            target=context.run, args=(self._run,), name="everyframe-pipeline", daemon=True
        )

    def go_on(self) -> None:
        """Let the call run to its next event."""
        self._go.release()

    def emit(self, event: Event) -> None:
        """Hand over an event and wait; called in the call's thread.

        If the run holds the process exclusively, its attention kernels are restored for the reader.
        """
        with kernels_lent() if is_exclusive() else nullcontext():
            self.answers.put(("event", event))
            self._wait()

    def stop(self) -> None:
        """End the call at its next module call, and wait for that.

        If an interrupt came before the thread was seen to start, the thread ends in `_wait`.
        """
        self._is_stopped = True
        self._go.release()
        if self.thread.is_alive():
            handle = nn.modules.module.register_module_forward_pre_hook(self._leave)
            try:
                self.thread.join()
            finally:
                handle.remove()

    def _leave(self, module: nn.Module, args: Any) -> None:
        if threading.current_thread() is self.thread:
            raise _Stopped

    def _wait(self) -> None:
        self._go.acquire()
        if self._is_stopped:
            raise _Stopped

    def _run(self) -> None:
        try:
            self._wait()
            # Not inference mode, if it is not the owner's: what a pipeline keeps in its modules
            # would be of no use to training afterwards.
            with self._within(), torch.no_grad():
                result = self._call(self.emit)
        except BaseException as error:  # noqa: BLE001 - raised again in the reader's thread
            self.answers.put(("error", error))
        else:
            self.answers.put(("result", result))


def run_in_thread(
    call: Callable[[Tell], _Result], within: Within
) -> Generator[Event, None, _Result]:
    """Run ``call(emit)`` in a thread and yield what it emits; the generator returns its result.

    The call's thread enters ``within()`` first. An exception in the call is raised here.
    """
    both = _Alternating(call, within)
    is_over = False
    try:
        both.thread.start()
        while not is_over:
            both.go_on()
            kind, value = both.answers.get()
            if kind == "event":
                yield value
            is_over = kind != "event"
    finally:
        if not is_over:
            both.stop()
    both.thread.join()
    if kind == "error":
        raise value
    result: _Result = value
    return result


def _in_this_thread(call: Callable[[Tell], _Result], tell: Tell) -> Generator[Event, None, _Result]:
    """Run the call without a second thread; `tell` gets each event at once, before it is yielded.

    An exception from `tell` ends the call and is raised here. It passes through the pipeline as
    `_Stopped`, a BaseException, so no pipeline handles it as an error of its own.
    """
    events: list[Event] = []
    raised: list[BaseException] = []

    def emit(event: Event) -> None:
        if raised:
            raise _Stopped
        events.append(event)
        try:
            tell(event)
        except BaseException as error:
            raised.append(error)
            raise _Stopped from error

    try:
        with torch.no_grad():
            result = call(emit)
    except _Stopped:
        raise raised[0] from None
    except BaseException:
        yield from events
        raise
    if raised:
        raise raised[0]
    yield from events
    return result


def _beside_others(call: Callable[[Tell], _Result]) -> Callable[[Tell], _Result]:
    """The call beside other runs that set no switch; it releases its turn while an event is read.

    Attention kernels are process-wide. Once a repair of this run selects some, the run holds the
    process exclusively and restores the original kernels for readers of its events.
    """

    def made(emit: Tell) -> _Result:
        turn = Turn(is_alone=False)

        def between(event: Event) -> None:
            with kernels_lent(own) if turn.is_alone else nullcontext(), turn.left():
                emit(event)

        with turn:
            own = Kernels.now()
            try:
                return call(between)
            finally:
                if turn.is_alone and turn.is_held:
                    own.use()

    return made
