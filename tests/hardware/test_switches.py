"""Turns at computing: one run alone or several beside each other, and nobody waits for ever."""

from __future__ import annotations

import contextvars
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from everyframe.hardware import switches
from everyframe.hardware.switches import Turn, exclusive, is_exclusive, stay_exclusive


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    yield
    assert not switches._PROCESS._holders
    assert not switches._PROCESS._waiting


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread, seconds: float = 20) -> bool:
    thread.join(seconds)
    return not thread.is_alive()


def tries(*, is_alone: bool) -> bool:
    """Whether another thread gets its turn just now."""
    done = threading.Event()

    def work() -> None:
        with Turn(is_alone=is_alone):
            done.set()

    thread = in_thread(work)
    got = done.wait(0.3)
    if not got:
        _WAITING.append(thread)
    return got


_WAITING: list[threading.Thread] = []


def test_alone_is_alone_and_beside_is_beside() -> None:
    with Turn(is_alone=True):
        assert not tries(is_alone=False)
    assert ended(_WAITING.pop())
    with Turn(is_alone=False):
        assert tries(is_alone=False)
        assert not tries(is_alone=True)
    assert ended(_WAITING.pop())


def test_who_wants_to_be_alone_is_not_kept_waiting_by_new_ones() -> None:
    with Turn(is_alone=False):
        assert not tries(is_alone=True)
        assert not tries(is_alone=False), "it came later"
    assert all(ended(_WAITING.pop()) for _ in range(2))


def test_within_a_turn_of_its_own_a_run_may_be_alone() -> None:
    with Turn(is_alone=True), exclusive(), exclusive(), Turn(is_alone=False):
        assert is_exclusive()
    with Turn(is_alone=False) as turn:
        with exclusive():
            assert is_exclusive()
            assert not tries(is_alone=False)
        assert not is_exclusive()
        assert turn.is_held
        assert ended(_WAITING.pop())


def test_two_that_are_beside_each_other_may_both_want_to_be_alone() -> None:
    """A lock that is held while another is waited for would never be free."""
    meet, order = threading.Barrier(2), []

    def work() -> None:
        with Turn(is_alone=False):
            meet.wait()
            with exclusive():
                order.append("in")
                time.sleep(0.05)
                order.append("out")

    threads = [in_thread(work) for _ in range(2)]
    assert all(ended(each) for each in threads)
    assert order == ["in", "out"] * 2


def test_a_run_that_stays_alone_is_so_in_its_later_turns() -> None:
    turn = Turn(is_alone=False)
    with turn:
        stay_exclusive()
        assert not tries(is_alone=False)
        with turn.left():
            assert ended(_WAITING.pop())
        assert is_exclusive()
    assert tries(is_alone=False)
    stay_exclusive()  # nobody's turn: nothing


def test_a_thread_that_works_for_a_run_is_in_its_turn() -> None:
    seen = []

    def work() -> None:
        with exclusive():
            seen.append(is_exclusive())

    with Turn(is_alone=True):
        context = contextvars.copy_context()
        assert ended(in_thread(lambda: context.run(work)))
    assert seen == [True]


def test_who_leaves_by_an_exception_does_not_wait() -> None:
    turn = Turn(is_alone=False)
    with pytest.raises(KeyError), turn, turn.left():
        raise KeyError
    with pytest.raises(KeyError), turn, exclusive():
        raise KeyError


def test_a_run_within_what_is_read_of_another_leaves_that_ones_turn_as_it_was() -> None:
    turn = Turn(is_alone=True)
    with turn:
        with turn.left(), Turn(is_alone=False):
            assert not turn.is_held
        assert is_exclusive()


def test_who_waits_can_be_interrupted() -> None:
    # A shell starts background jobs without one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            _wait_and_be_interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


def _wait_and_be_interrupted() -> None:
    is_in, end = threading.Event(), threading.Event()

    def hold() -> None:
        with exclusive():
            is_in.set()
            end.wait(20)

    holder = in_thread(hold)
    is_in.wait(20)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    try:
        with exclusive():
            raise AssertionError("not reached")
    finally:
        assert time.monotonic() - began < 10
        end.set()
        assert ended(holder)


def test_a_process_that_is_forked_has_no_turns_of_its_parent() -> None:
    read, write = os.pipe()
    with exclusive():
        child = os.fork()
        if not child:
            _turns_in_a_child(write)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 1) == b"+"
    os.close(read)
    os.close(write)


def _turns_in_a_child(write: int) -> None:
    context = contextvars.Context()

    def work() -> None:
        with exclusive():
            os.write(write, b"+")

    signal.alarm(20)
    context.run(work)
    os._exit(0)


def test_where_no_process_can_be_forked_there_is_no_fork_to_prepare_for() -> None:
    """Windows: Python has no `register_at_fork` there."""
    code = (
        "import importlib, os, everyframe.hardware.switches as switches; "
        "del os.register_at_fork; importlib.reload(switches)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
