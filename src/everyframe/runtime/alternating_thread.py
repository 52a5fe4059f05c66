"""Run a function in a thread that alternates with its caller's: one of the two runs at a time.

The function waits where it hands over a value, and resumes with the answer. This turns a blocking
call into a generator of events (`diffusers_pipelines`), and lets runs of a batch wait for each
other inside a step (`engine.batched_runs`).

Not a greenlet: torch walks the stack when it builds an error, and the stack below a greenlet's
first frame is overwritten, which crashes the process.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from torch import nn

from everyframe.hardware.cpu import end_idle_threads
from everyframe.hardware.thread_state import current_card, use_card


class AlternatingThread:
    """A function in a thread of its own, which runs while `resume` waits for it.

    Attributes:
        is_over: the function has returned or raised; there is nothing to resume.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self.is_over = False
        # None once it runs, to break a reference cycle.
        self._function: Callable[[], Any] | None = function
        self._name = name
        self._thread: threading.Thread | None = None
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._found: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._is_stopped = False

    def resume(self, answer: Any = None) -> Any:
        """Let the function run with the answer to what it handed over last.

        Returns what it hands over next, or its result once it `is_over`. An exception of the
        function is raised here.
        """
        if self._thread is None:
            # The context is copied: it holds torch's compile switches. A daemon, so that a hanging
            # function does not keep the process alive.
            run, card = contextvars.copy_context().run, current_card()
            self._thread = threading.Thread(
                target=run, args=(self._run, card), name=self._name, daemon=True
            )
            self._thread.start()
        assert self._thread.is_alive(), "it is over"
        end_idle_threads()
        self._answers.put(answer)
        value, error = self._found.get()
        if self.is_over:
            self._thread.join()
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # with this frame in its traceback it would keep its tensors

    def hand_over(self, value: object) -> Any:
        """Hand a value to the caller and wait for its answer; called by the function."""
        end_idle_threads()
        self._found.put((value, None))
        return self._answer()

    def stop(self) -> None:
        """End the function where it waits, or at its next module call, and wait for that.

        A thread that was not seen to start, because of an interrupt, ends before the function.
        """
        self._is_stopped = True
        self._answers.put(None)
        if self._thread is None:
            self._function = None
        if self._thread is not None and self._thread.is_alive():
            handle = nn.modules.module.register_module_forward_pre_hook(self._leave)
            try:
                self._thread.join()
            finally:
                handle.remove()

    def _leave(self, module: nn.Module, args: Any) -> None:
        if threading.current_thread() is self._thread:
            raise _Stopped

    def _answer(self) -> Any:
        answer = self._answers.get()
        if self._is_stopped:
            raise _Stopped
        return answer

    def _run(self, card: int | None) -> None:
        function, self._function = self._function, None
        assert function is not None, "it runs once"
        try:
            use_card(card)
            self._answer()
            result = function()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._end(None, error)
        else:
            self._end(result, None)

    def _end(self, result: Any, error: BaseException | None) -> None:
        self.is_over = True
        self._found.put((result, error))


class _Stopped(BaseException):
    """Ends the function once its caller has stopped."""
