"""A run that repeats a record: what is here and was not there, told as notes of the run.

Read next: `provenance.py`, which finds the differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from everyframe.core.events import Event, Events, Note, WeightsReady


def compare_with(record: Mapping[str, Any] | None, events: Events) -> Events:
    """The same events, and after `WeightsReady` a note for each reason why the frames may differ.

    `record` is what the run repeats, None where it repeats none.
    """
    with closing(events):
        for event in events:
            yield event
            if record is not None and isinstance(event, WeightsReady):
                yield from _differences(record, event)


def _differences(record: Mapping[str, Any], ready: WeightsReady) -> Iterator[Event]:
    from everyframe.engine.provenance import differences  # not on top: it brings torch

    for line in differences(record, ready.record):
        yield Note(f"the frames may differ from the recorded ones: {line}")
