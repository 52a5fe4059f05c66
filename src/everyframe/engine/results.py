"""Collect the results of a run for Python callers: event callbacks, warnings and videos."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from everyframe.core.errors import EveryframeWarning
from everyframe.core.events import (
    AudioDecoded,
    Event,
    Events,
    FramesDecoded,
    Note,
    Planned,
    Repaired,
    VideoDone,
)
from everyframe.media.audio import Audio
from everyframe.media.output_path import exact_fps
from everyframe.media.pixels import to_uint8
from everyframe.media.video import Video

Output = Literal["uint8", "float"]
OnEvent = Callable[[Event], None]


class EventDelivery:
    """Deliver each event to a callback once; notes and repairs are also warnings.

    Events inside a pipeline's call are delivered as they happen.
    """

    def __init__(self, on_event: OnEvent | None) -> None:
        self._on_event = on_event
        self._early: list[Event] = []

    def deliver_early(self, event: Event) -> None:
        """Deliver an event of the pipeline's call at once; it appears again among the `rest`."""
        self._early.append(event)
        self._deliver(event)

    def deliver_rest(self, events: Events) -> Iterator[Event]:
        """Yield all events and deliver those not delivered yet."""
        with closing(events):
            for event in events:
                if self._early and event is self._early[0]:
                    del self._early[0]
                else:
                    self._deliver(event)
                yield event

    def _deliver(self, event: Event) -> None:
        if isinstance(event, Note):
            _warn(event.text)
        elif isinstance(event, Repaired):
            _warn(f"repaired: {event.text}")
        if self._on_event is not None:
            self._on_event(event)


def _warn(text: str) -> None:
    """Warn at the line that called this package, so that Python's warning filters can match it."""
    level, frame, ours = 1, sys._getframe(), __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == ours:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, EveryframeWarning, stacklevel=level)


def collect_videos(events: Events, output: Output, delivery: EventDelivery) -> list[Video]:
    """The videos in order of their seeds, whichever device finishes first."""
    frames: dict[tuple[int, int | None], list[np.ndarray[Any, Any]]] = {}
    audio: dict[tuple[int, int | None], Audio] = {}
    videos: dict[tuple[int, int], Video] = {}
    fps = Fraction(0)
    for event in delivery.deliver_rest(events):
        if isinstance(event, Planned):
            # Checked first: not every number is a valid frame rate.
            fps = exact_fps(event.plan.settings.fps)
        elif isinstance(event, AudioDecoded):
            audio[event.seed, event.index] = Audio(event.samples, event.rate)
        elif isinstance(event, FramesDecoded):
            pieces = frames.setdefault((event.seed, event.index), [])
            first = sum(len(piece) for piece in pieces)
            # Checked for non-finite values before rounding, for either output form.
            whole = to_uint8(event.frames, first_index=first)
            pieces.append(whole if output == "uint8" else event.frames)
        elif isinstance(event, VideoDone):
            which = (event.seed, event.index)
            whole, own_audio = np.concatenate(frames.pop(which)), audio.pop(which, None)
            videos[event.seed, event.index or 0] = Video(whole, fps, event.record, own_audio)
    return [videos[which] for which in sorted(videos)]
