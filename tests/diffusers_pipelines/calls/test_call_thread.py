"""A call as a generator: it stands still between its events and ends when nobody reads them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import _cur_sdpa_kernel_backends

from everyframe.core.events import Event, Note
from everyframe.diffusers_pipelines.calls.call_thread import (
    run_beside_others,
    run_here,
    run_in_thread,
)
from everyframe.hardware.cpu import cpu_threads
from everyframe.hardware.switches import exclusive, is_exclusive
from everyframe.ops.attention import KERNELS, PLAIN, attend_by, restore_kernels

Emit = Callable[[Event], None]
one_thread = partial(cpu_threads, 1)


def drained(events: Generator[Event, None, Any]) -> tuple[list[str], Any]:
    texts = []
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            return texts, end.value
        assert isinstance(event, Note)
        texts.append(event.text)


def test_events_come_in_order_and_then_the_result() -> None:
    def call(emit: Emit) -> int:
        for number in range(3):
            emit(Note(str(number)))
        return 7

    assert drained(run_in_thread(call, one_thread)) == (["0", "1", "2"], 7)


def test_what_was_set_before_holds_in_the_call() -> None:
    """torch keeps its switches of compiling in context variables, which a new thread lacks."""
    config: Any = torch._dynamo.config
    before = config.skip_nnmodule_hook_guards
    with config.patch(skip_nnmodule_hook_guards=not before):
        events = run_in_thread(lambda emit: config.skip_nnmodule_hook_guards, one_thread)
        assert drained(events) == ([], not before)


def test_nothing_runs_while_an_event_is_read() -> None:
    done: list[int] = []

    def call(emit: Emit) -> None:
        for number in range(3):
            done.append(number)
            emit(Note(""))

    events = run_in_thread(call, one_thread)
    assert done == [], "nothing before the first event is asked for"
    for number in range(3):
        next(events)
        assert done == list(range(number + 1))
    events.close()


def test_what_the_call_raises_is_raised_to_the_reader() -> None:
    def call(emit: Emit) -> None:
        emit(Note(""))
        raise KeyError("inside")

    events = run_in_thread(call, one_thread)
    next(events)
    with pytest.raises(KeyError, match="inside"):
        next(events)


def test_a_reader_who_leaves_ends_the_call_at_its_next_module() -> None:
    layer, count = nn.Identity(), [0]

    def call(emit: Emit) -> None:
        try:
            emit(Note(""))
        except BaseException:
            # A pipeline that catches everything goes on; its next module does not.
            while True:
                count[0] += 1
                layer(torch.zeros(1))
        raise AssertionError("not reached")

    before = set(threading.enumerate())
    events = run_in_thread(call, one_thread)
    next(events)
    events.close()
    assert count == [1]
    assert not set(threading.enumerate()) - before
    assert not nn.modules.module._global_forward_pre_hooks


def test_the_call_has_no_gradients_and_its_own_number_of_threads() -> None:
    def call(emit: Emit) -> tuple[bool, bool, int]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()

    with torch.inference_mode():
        _, seen = drained(run_in_thread(call, partial(cpu_threads, 2)))
    assert seen == (False, False, 2)


def test_attention_is_chosen_as_before_when_a_reader_leaves_inside_of_a_module() -> None:
    """What ends the call there is no `Exception`, for which torch calls no hook."""

    class Attends(nn.Module):
        def forward(self, emit: Emit) -> None:
            emit(Note(""))

    layer, before = Attends(), _cur_sdpa_kernel_backends(with_priority=True)
    attend_by(layer, PLAIN)
    events = run_in_thread(layer, one_thread)
    with restore_kernels():  # as the engine does for each event
        next(events)
        assert _cur_sdpa_kernel_backends(with_priority=True) != before
    assert _cur_sdpa_kernel_backends(with_priority=True) == before
    events.close()
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


@pytest.mark.parametrize("way", ["in this thread", "beside"])
def test_a_repair_by_the_plain_kernel_is_alone_and_is_put_back_for_whoever_reads(way: str) -> None:
    """Kernels are the process': others that compute beside would be put on it, too."""

    class Attends(nn.Module):
        def forward(self, emit: Emit) -> None:
            seen.append(kernels())
            emit(Note(""))
            seen.append(kernels())

    def kernels() -> list[Any]:
        found: list[Any] = _cur_sdpa_kernel_backends(with_priority=True)
        return found

    def call(emit: Emit) -> None:
        attend_by(layer, PLAIN)
        layer(emit)
        assert is_exclusive()

    def read(_: Event) -> None:
        assert not is_exclusive()
        with exclusive():  # nobody computes while it is read
            read_by.append(kernels())

    layer, before = Attends(), kernels()
    seen: list[list[Any]] = []
    read_by: list[list[Any]] = []
    if way == "beside":
        for event in run_beside_others(call, one_thread):
            read(event)
    else:
        list(run_here(call, read))
    assert read_by == [before]
    assert seen == [[KERNELS[PLAIN]]] * 2
    assert kernels() == before
    assert not is_exclusive()
