"""A function that alternates with its caller; what it leaves behind while it waits, and at its end.

That it ends at its next module call is in `diffusers_pipelines/calls/test_call_thread.py`.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from contextlib import suppress

import psutil
import pytest
import torch

from everyframe.hardware.cpu import cpu_threads
from everyframe.runtime.alternating_thread import AlternatingThread


def test_values_and_answers_go_to_and_fro() -> None:
    answers: list[object] = []

    def ask() -> str:
        answers.extend(thread.hand_over(number) for number in range(3))
        return "done"

    thread = AlternatingThread(ask, "asks")
    assert [thread.resume(each) for each in ("start", "a", "b")] == [0, 1, 2]
    assert not thread.is_over
    assert thread.resume("c") == "done"
    assert thread.is_over
    assert answers == ["a", "b", "c"]


def test_one_that_was_never_begun_is_stopped() -> None:
    begun: list[int] = []
    thread = AlternatingThread(lambda: begun.append(1), "never")
    thread.stop()
    assert not begun


def test_what_a_failed_function_held_is_freed_with_its_error() -> None:
    """At once, without the garbage collector: memory of a card is scarce after an error."""
    kept: list[weakref.ref[torch.Tensor]] = []

    def fail() -> None:
        tensor = torch.zeros(3)
        kept.append(weakref.ref(tensor))
        raise KeyError("inside")

    gc.disable()
    try:
        with suppress(KeyError):
            AlternatingThread(fail, "fails").resume()
        assert [each() for each in kept] == [None]
    finally:
        gc.enable()


def thread_ids() -> set[int]:
    return {each.id for each in psutil.Process().threads()}


def begun_by_an_operation() -> set[int]:
    before = thread_ids()
    torch.exp(torch.zeros(1 << 20))
    return thread_ids() - before


def are_gone(threads: set[int]) -> bool:
    """Linux lists a thread for a moment after it was joined."""
    until = time.monotonic() + 10
    while threads & thread_ids() and time.monotonic() < until:
        time.sleep(0.001)
    return not threads & thread_ids()


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP is torch's on Linux")
def test_threads_that_compute_for_one_end_while_it_waits() -> None:
    """With more of them than CPUs, GNU's OpenMP lets all of them sleep between operations."""
    begun = list[set[int]]()

    def computes() -> None:
        with cpu_threads(2):
            for _ in range(2):
                begun.append(begun_by_an_operation())
                thread.hand_over(None)

    thread = AlternatingThread(computes, "computes")
    with cpu_threads(2):
        thread.resume()  # ends the threads of this one, too
        assert are_gone(begun[0])
        of_this_one = begun_by_an_operation()
        thread.resume()
        assert are_gone(of_this_one | begun[1])
    assert [len(each) for each in (*begun, of_this_one)] == [1, 1, 1]
    thread.stop()
    assert thread.is_over
    assert not any(each.name == "computes" for each in threading.enumerate())


class Owner:
    """Holds its thread, whose function is a method of it, as a run of a batch does."""

    def __init__(self) -> None:
        self.thread = AlternatingThread(self._run, "owned")

    def _run(self) -> int:
        return 1


@pytest.mark.parametrize("is_begun", [True, False])
def test_what_a_function_holds_goes_without_the_collector(is_begun: bool) -> None:
    """Which may not look for hundreds of runs; each would hold its open files until then."""
    owner = Owner()
    seen = weakref.ref(owner)
    gc.disable()
    try:
        if is_begun:
            assert owner.thread.resume() == 1
        else:
            owner.thread.stop()
        del owner
        assert seen() is None
    finally:
        gc.enable()
