"""A comparison as a picture: rows are modules in the order of their calls, columns are calls.

Read next: `everyframe.numerics.heat_map`, which draws; `diff`.
"""

from __future__ import annotations

import math

import numpy as np

from everyframe.numerics.heat_map import heat_map
from everyframe.numerics.trace.diff import Comparison


def picture(compared: Comparison, title: str) -> bytes:
    """The png of the relative differences of what modules gave, the first place in a frame."""
    trace = compared.a
    called = dict.fromkeys(call.part for call in trace.calls)
    rows = {part: row for row, part in enumerate(called)}
    columns = max((call.number for call in trace.calls), default=1)
    table = np.full((len(rows), columns), np.nan)
    for apart, seen in zip(compared.apart, trace.seen, strict=True):
        if seen.kind == "output" and not math.isnan(apart):
            call = trace.calls[seen.call]
            cell = rows[call.part], call.number - 1
            table[cell] = np.fmax(table[cell], apart)
    marked = set()
    for place in compared.places[:1]:
        call = trace.calls[trace.seen[place.seen].call]
        marked.add((rows[call.part], call.number - 1))
    return heat_map(
        table,
        [trace.parts[part].name for part in rows],
        [str(column + 1) for column in range(columns)],
        title=title,
        unit="relative difference, by module and call",
        marked=marked,
    )
