"""Report as notes what differs between a recorded run and the run that repeats it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from everyframe.core.events import Event, Events, Note, WeightsReady


def compare_with(record: Mapping[str, Any] | None, events: Events) -> Events:
    """Pass events through and add, after `WeightsReady`, one note per reason why frames may differ.

    `record` is the record that the run repeats, or None.
    """
    with closing(events):
        for event in events:
            yield event
            if record is not None and isinstance(event, WeightsReady):
                yield from _differences(record, event)


def _differences(record: Mapping[str, Any], ready: WeightsReady) -> Iterator[Event]:
    from everyframe.engine.records.provenance import differences  # not on top: it brings torch

    for line in differences(record, ready.record):
        yield Note(f"the frames may differ from the recorded ones: {line}")
