"""Report what differs between a recorded run and the run that repeats it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from everyframe.core.events import Events, Note, WeightsReady
from everyframe.engine.records.record_schema import check_record, rejected_options


def compare_with(record: Mapping[str, Any] | None, events: Events) -> Events:
    """Pass events through and add, after `WeightsReady`, one note per reason why frames may differ.

    `record` is the record that the run repeats, or None.
    """
    with closing(events):
        for event in events:
            yield event
            if record is not None and isinstance(event, WeightsReady):
                for line in differences(record, event.record):
                    yield Note(f"the frames may differ from the recorded ones: {line}")


def differences(
    record: Mapping[str, Any], other: Mapping[str, Any], *, is_same_run: bool = False
) -> tuple[str, ...]:
    """List what differs between two records and prevents equal bits, one line each.

    Includes options of the first record that are never taken from a record, unless `is_same_run`.

    Raises:
        InputError: not a valid record.
    """
    check_record(record)
    found = [] if is_same_run else [*_not_taken(record, other)]
    if record.get("model", {}).get("sha256") != other["model"]["sha256"]:
        found.append("the model's weights are not those that made the video")
    if record.get("everyframe") != other["everyframe"]:
        found.append(f"everyframe was {record.get('everyframe')}, is {other['everyframe']}")
    for name, version in record.get("versions", {}).items():
        if other["versions"].get(name) != version:
            found.append(f"{name} was {version}, is {other['versions'].get(name)}")
    device = record.get("plan", {}).get("device", {}).get("name")
    if device != other["plan"]["device"]["name"]:
        found.append(f"the device was {device}, is {other['plan']['device']['name']}")
    found += _other_switches(record, other)
    found += [
        f"it ran out of memory in {repair.get('stage')} and went on otherwise: {repair.get('to')}"
        for repair in record.get("repairs", ())
        if repair.get("cause") == "memory"
    ]
    if record.get("request") == other["request"]:
        # The request is the same, so a setting that differs has a new default.
        was, now = (_flat(each.get("settings", {})) for each in (record, other))
        found += [
            f"the default of {name} was {was[name]!r}, is {now[name]!r}"
            for name in was
            if name in now and was[name] != now[name]
        ]
    return tuple(found)


def _not_taken(record: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Recorded options that were not applied again."""
    yield from rejected_options(record.get("request", {}), other["request"])
    threads = record.get("plan", {}).get("num_threads")
    if threads not in (None, other["plan"]["num_threads"]):
        yield f"it was computed with {threads} threads, and is with {other['plan']['num_threads']}"
    now = {part["name"]: set(part["fast_paths"] or ()) for part in other["plan"]["components"]}
    for part in record.get("plan", {}).get("components", ()):
        less = sorted(set(part.get("fast_paths") or ()) - now.get(part["name"], set()))
        if less:
            yield f"{part['name']} ran by {', '.join(less)}, and does not here"


def _other_switches(record: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Torch switches that differ between runs of in-memory pipelines; their owner sets them."""
    plans = json.loads(json.dumps([record.get("plan"), other["plan"]]))
    was, now = (each.get("switches") if isinstance(each, Mapping) else None for each in plans)
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for name in now:
            if name in was and was[name] != now[name]:
                setting = name.replace("_", " ")
                yield f"torch's {setting} was {was[name]!r}, is {now[name]!r}"


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and family options by name, in JSON types."""
    plain = json.loads(json.dumps(settings))
    options = {str(name): value for name, value in plain.pop("options", ())}
    return {**plain, **options}
