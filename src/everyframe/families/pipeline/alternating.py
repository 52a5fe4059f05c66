"""A call that can't be interrupted, as a generator: it stands still between two of its events.

A pipeline's `__call__` returns when all is done, and a stream of events is read one at a time. So
the call runs in a thread of its own, and of the two threads one runs at a time: the call goes on
when the next event is asked for, and waits inside `emit` otherwise. A reader who leaves ends the
call at the next module that it calls.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Generator
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import nn

from everyframe.core.events import Event
from everyframe.ops.attention import kernels_kept

_Result = TypeVar("_Result")


class _Stopped(BaseException):
    """Raised in the call's thread when nobody reads its events any more."""


class _Alternating:
    """The two threads' meeting place."""

    def __init__(self, call: Callable[[Callable[[Event], None]], Any], num_threads: int) -> None:
        self._call = call
        self._num_threads = num_threads
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

        Whoever reads it chooses kernels of attention of their own meanwhile.
        """
        with kernels_kept():
            self.answers.put(("event", event))
            self._wait()

    def stop(self) -> None:
        """End the call at the next module that it calls, and wait for that."""
        self._is_stopped = True
        handle = nn.modules.module.register_module_forward_pre_hook(self._leave)
        try:
            self._go.release()
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
            # Both are a thread's own. Not inference mode: what a pipeline keeps in its modules
            # would be of no use to training afterwards.
            torch.set_num_threads(self._num_threads)
            with torch.no_grad(), kernels_kept():
                result = self._call(self.emit)
        except BaseException as error:  # noqa: BLE001 - raised again in the reader's thread
            self.answers.put(("error", error))
        else:
            self.answers.put(("result", result))


def alternating(
    call: Callable[[Callable[[Event], None]], _Result], num_threads: int
) -> Generator[Event, None, _Result]:
    """``call(emit)``, yielding what it emits; the generator's value is what it returns.

    `num_threads` are torch's for the call. Whatever the call raises is raised here.
    """
    both = _Alternating(call, num_threads)
    both.thread.start()
    try:
        while True:
            both.go_on()
            kind, value = both.answers.get()
            if kind == "event":
                yield value
            elif kind == "error":
                raise value
            else:
                result: _Result = value
                return result
    finally:
        if both.thread.is_alive():
            both.stop()
