"""Compare two results of `everyframe bench`: measurements of the same work only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from everyframe.core.errors import InputError
from everyframe.doctor.benchmark.result import BenchResult

#: Load at which the times of a result say little.
_BUSY = 0.5


@dataclass(frozen=True)
class ComparedRow:
    """One measurement of both machines; a `ratio` above 1 means that the second is better."""

    name: str
    unit: str
    first: float
    second: float
    ratio: float


@dataclass(frozen=True)
class BenchComparison:
    """Measurements of the same work on both machines, and notes on all others."""

    rows: tuple[ComparedRow, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Measured:
    unit: str
    value: float
    is_larger_better: bool


def compare_results(first: BenchResult, second: BenchResult) -> BenchComparison:
    """Compare measurements of the same work in the same precision.

    Raises:
        InputError: nothing was measured alike.
    """
    one, other = dict(_measurements(first)), dict(_measurements(second))
    rows = []
    for name, mine in one.items():
        if name in other:
            theirs = other[name]
            ratio = (
                theirs.value / mine.value if mine.is_larger_better else mine.value / theirs.value
            )
            rows.append(ComparedRow(name, mine.unit, mine.value, theirs.value, ratio))
    if not rows:
        raise InputError(
            "these two results have no measurement of the same work in the same precision, so "
            "nothing can be compared; run `everyframe bench` of one version on both machines"
        )
    return BenchComparison(tuple(rows), tuple(_notes(first, second, {*one} ^ {*other})))


def _measurements(result: BenchResult) -> Iterator[tuple[str, _Measured]]:
    """Measurements by a name that holds the work and the precision."""
    for peak in result.peaks:
        unit = "FLOP/s" if peak.kind == "product" else "B/s"
        what = f"product in {peak.name}" if peak.kind == "product" else peak.name
        yield f"peak: {what}", _Measured(unit, peak.rate, True)
    for each in result.blocks:
        name = f"{each.work}, {each.precision}"
        yield f"{name}: a step", _Measured("s", each.seconds, False)
        yield f"{name}: a step, plain torch", _Measured("s", each.plain_seconds, False)
        if each.peak_bytes:
            yield f"{name}: memory", _Measured("B", each.peak_bytes, False)
    if result.video is not None:
        name = f"{result.video.work}, {result.video.precision}"
        yield f"{name}: steps", _Measured("1/s", result.video.steps_per_second, True)
        yield f"{name}: first frame", _Measured("s", result.video.first_frame_seconds, False)
        yield f"{name}: a video", _Measured("s", result.video.warm_seconds, False)


def _notes(first: BenchResult, second: BenchResult, lone: set[str]) -> Iterator[str]:
    if first.everyframe != second.everyframe:
        yield f"of different versions: {first.everyframe} and {second.everyframe}"
    if first.machine.num_threads != second.machine.num_threads:
        yield f"threads: {first.machine.num_threads} and {second.machine.num_threads}"
    for result, which in ((first, "first"), (second, "second")):
        if result.load > _BUSY:
            yield f"the {which} machine was busy as it was measured (load {result.load:g} a core)"
    if lone:
        yield f"measured on one of them alone, so not compared: {'; '.join(sorted(lone))}"
