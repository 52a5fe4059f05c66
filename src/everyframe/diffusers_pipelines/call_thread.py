"""A call that can't be interrupted, as a generator of its events.

A pipeline's `__call__` returns when all is done, and a stream of events is read one at a time. So
`run_in_thread` makes the call in a thread of its own, and of the two threads one runs at a time:
the call goes on when the next event is asked for, and waits inside `emit` otherwise. A reader who
leaves ends the call at the next module that it calls. Who hears of events at once, as they happen,
needs no second thread: `InThread` makes the call where it is asked for. Read next: `stage.py`.
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
"""What a thread that is begun for a call enters for it."""


class Calling(Protocol):
    """A way to make a call whose events are yielded; the generator's value is its result."""

    def __call__(
        self, call: Callable[[Tell], _Result]
    ) -> Generator[Event, None, _Result]: ...  # fmt: skip


@dataclass(frozen=True)
class Apart:
    """In a thread of its own, for a run that sets torch's switches around each event."""

    within: Within

    def __call__(self, call: Callable[[Tell], _Result]) -> Generator[Event, None, _Result]:
        return run_in_thread(call, self.within)


@dataclass(frozen=True)
class Beside:
    """In a thread of its own, which sets no switch of the process, and so beside others."""

    within: Within

    def __call__(self, call: Callable[[Tell], _Result]) -> Generator[Event, None, _Result]:
        return run_in_thread(_beside_others(call), self.within)


@dataclass(frozen=True)
class InThread:
    """In this thread, which sets no switch; `tell` hears of events at once, and they come later."""

    tell: Tell

    def __call__(self, call: Callable[[Tell], _Result]) -> Generator[Event, None, _Result]:
        return _in_this_thread(_beside_others(call), self.tell)


class _Stopped(BaseException):
    """Raised in the call when nobody reads its events any more."""


class _Alternating:
    """The two threads' meeting place."""

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
        """Called in the call's thread: hand over an event and wait.

        Where the run computes alone its kernels of attention are put back for whoever reads it.
        """
        with kernels_lent() if is_exclusive() else nullcontext():
            self.answers.put(("event", event))
            self._wait()

    def stop(self) -> None:
        """End the call at the next module that it calls, and wait for that.

        An interrupt may have come before the thread was seen to begin: then it ends by itself.
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
    """``call(emit)``, yielding what it emits; the generator's value is what it returns.

    The call's thread enters ``within()`` first. Whatever the call raises is raised here.
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
    """The same without a second thread: `tell` hears of each event at once, it is yielded later.

    What `tell` raises ends the call, and is raised here; no pipeline takes it for a fault of its
    own.
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
    """The call, beside others that set no switch; it is nobody's turn while an event is read.

    Kernels of attention are the process' own, until a repair of this run chooses some: from there
    on it computes alone, and puts them back for whoever reads its events.
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
