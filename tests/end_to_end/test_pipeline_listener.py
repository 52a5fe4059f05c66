"""Whoever listens to a pipeline's run, or calls the pipeline while a run of it is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everyframe
from everyframe.core.errors import EveryframeError, InputError
from everyframe.core.events import Event, FramesDecoded, Step
from helpers.pipeline_calls import MAKERS, asked_of, ours, theirs
from helpers.tiny_checkpoints.pipelines import loaded


@pytest.fixture(scope="module")
def wan(tiny_models: Callable[[str], Path]) -> Any:
    return loaded(tiny_models("wan"))


def test_events_are_reported_once_and_in_the_order_of_a_stream(wan: Any) -> None:
    received: list[Event] = []
    ours(wan, "wan", on_event=received.append)
    read = list(everyframe.stream(everyframe.Request(**asked_of("wan")), pipe=wan))

    def names(events: list[Event]) -> list[str]:
        return [f"{type(each).__name__} {getattr(each, 'step', '')}" for each in events]

    assert names(received) == names(read)


def test_an_event_arrives_while_the_call_is_under_way(wan: Any) -> None:
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    hooks = [each.register_forward_hook(count) for each in (wan.transformer, wan.transformer_2)]
    seen: list[int] = []
    ours(wan, "wan", on_event=lambda e: seen.append(calls[0]) if isinstance(e, Step) else None)
    for hook in hooks:
        hook.remove()
    assert seen[0] < calls[0]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_what_a_listener_raises_comes_out_as_it_is(wan: Any, error: BaseException) -> None:
    """A `ValueError` is no refusal of the pipeline's, which raises such of its own."""
    wanted, before = theirs(wan, "wan"), dict(vars(wan.scheduler))

    def raises(event: Event) -> None:
        if isinstance(event, Step):
            raise error

    with pytest.raises(type(error)) as caught:
        ours(wan, "wan", on_event=raises)
    assert caught.value is error
    assert vars(wan.scheduler).keys() == before.keys()
    assert not any(each._forward_pre_hooks for each in wan.transformer.modules())
    assert np.array_equal(ours(wan, "wan"), wanted)


def read_until_step(events: Iterator[Event]) -> None:
    next(each for each in events if isinstance(each, Step))


def test_calling_the_pipeline_in_the_middle_of_its_stream_is_refused(wan: Any) -> None:
    """It hung for ever; and the run can't go on either, since its scheduler is another now."""
    events = everyframe.stream(everyframe.Request(**asked_of("wan")), pipe=wan)
    read_until_step(events)
    with pytest.raises(InputError, match="was called while a run of it was under way"):
        theirs(wan, "wan")
    with pytest.raises(EveryframeError, match="the run is interrupted: the pipeline was called"):
        list(events)
    assert np.array_equal(ours(wan, "wan"), theirs(wan, "wan"))


def test_calling_the_pipeline_in_a_step_event_is_refused(wan: Any) -> None:
    def calls(event: Event) -> None:
        if isinstance(event, Step):
            theirs(wan, "wan")

    with pytest.raises(InputError, match="was called while a run of it was under way"):
        ours(wan, "wan", on_event=calls)


@MAKERS
def test_a_part_may_be_called_in_the_middle(wan: Any, make: Any) -> None:
    """A preview: the decoder of a pipeline whose steps are not done."""
    wanted = theirs(wan, "wan")
    latents = torch.randn(1, 16, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    events = everyframe.stream(everyframe.Request(**asked_of("wan")), pipe=wan)

    def preview() -> None:
        with torch.no_grad():
            wan.vae.decode(latents)

    if make is ours:
        frames = ours(wan, "wan", on_event=lambda e: preview() if isinstance(e, Step) else None)
        assert np.array_equal(frames, wanted)
        return
    got = []
    for event in events:
        if isinstance(event, Step):
            preview()
        elif isinstance(event, FramesDecoded):
            got.append(event.frames)
    assert np.array_equal(np.concatenate(got), wanted)


def test_a_second_run_of_one_pipeline_is_refused(wan: Any) -> None:
    events = everyframe.stream(everyframe.Request(**asked_of("wan")), pipe=wan)
    read_until_step(events)
    with pytest.raises(InputError, match="is in the middle of another run"):
        ours(wan, "wan")
    frames = [each.frames for each in events if isinstance(each, FramesDecoded)]
    assert np.array_equal(np.concatenate(frames), theirs(wan, "wan"))
    assert np.array_equal(ours(wan, "wan"), theirs(wan, "wan")), "afterwards it may"


def test_two_pipelines_that_share_a_part_do_not_run_at_once(wan: Any) -> None:
    other = type(wan)(**{**wan.components, "scheduler": wan.scheduler})
    events = everyframe.stream(everyframe.Request(**asked_of("wan")), pipe=wan)
    read_until_step(events)
    with pytest.raises(InputError, match="or a part of it, is in the middle of another run"):
        ours(other, "wan")
    events.close()  # type: ignore[attr-defined]
