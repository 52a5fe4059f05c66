"""Write the HTML report of a run with repairs or numeric errors: one page, works offline.

Reporting tracks the largest value of each module at every call, which costs a few per cent of run
time. A run without faults writes no page. `runtime/stages/guard.py` finds and repairs faults.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from everyframe.core.bytes import format_bytes
from everyframe.core.errors import NumericsError
from everyframe.core.events import Events, Note, Repaired, event_of
from everyframe.core.paths import replace_file
from everyframe.core.plan import ComponentPlan, Plan
from everyframe.numerics.heat_map import heat_map
from everyframe.numerics.tensor_stats import Magnitudes
from everyframe.runs.run_state import RunState
from everyframe.runtime.components.component_observers import on_component_loaded
from everyframe.runtime.interface import ModelSpec

_NAME = "report.html"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: #141414; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; } img { max-width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0;
  border-bottom: 1px solid #ddd; } code { overflow-wrap: anywhere; }
.verdict { font-size: 1.15rem; }
"""


def loaded_in(model: ModelSpec) -> dict[str, nn.Module]:
    """Modules of an in-memory pipeline by name; empty for a model on disk."""
    parts: Mapping[str, Any] = getattr(getattr(model, "pipe", None), "components", {})
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def repairs_of(progress: RunState) -> list[Repaired]:
    """Repairs made in the completed portion of a run."""
    events = (
        event_of({name: value for name, value in each.items() if name != "clip"})
        for each in progress.repairs
    )
    return [event for event in events if isinstance(event, Repaired)]


def with_repair_report(
    events: Events,
    plan: Plan,
    record: Mapping[str, Any],
    folder: Path,
    loaded: Mapping[str, nn.Module],
    before: Sequence[Repaired] | None = None,
) -> Events:
    """Pass events through; write a page to `folder` on a repair or numeric error.

    `loaded` are modules already in memory. `before` are repairs made before a resume: the new page
    includes them and lies beside the first page, which has the values of that time.

    Raises:
        NumericsError: the run's own error, with the path of the page added.
    """
    magnitudes = Magnitudes()
    repairs: list[Repaired] = list(before or ())
    num_before = len(repairs)
    name_of_page = _NAME if before is None else _free(folder)
    for name, module in loaded.items():
        magnitudes.watch(name, module)

    def write(error: str = "") -> Path:
        text = page(plan, record, repairs, magnitudes, error, is_resumed=before is not None)
        replace_file(folder / name_of_page, text)
        return folder / name_of_page

    try:
        with closing(events):
            while True:
                # Entered per event: the consumer may load its own models between events.
                with on_component_loaded(magnitudes.watch):
                    event = next(events, None)
                if event is None:
                    break
                yield event
                if isinstance(event, Repaired):
                    repairs.append(event)
                    if len(repairs) == num_before + 1:
                        yield Note(f"report of the repairs: {write()}")
        if len(repairs) > num_before or (repairs and not (folder / _NAME).exists()):
            write()
    except NumericsError as error:
        raise NumericsError(f"{error}; report: {write(str(error))}") from error
    finally:
        magnitudes.remove()


def page(
    plan: Plan,
    record: Mapping[str, Any],
    repairs: Sequence[Repaired],
    magnitudes: Magnitudes,
    error: str = "",
    *,
    is_resumed: bool = False,
) -> str:
    """Render the report as HTML: faults and repairs, heat maps, plan and device.

    If `is_resumed`, the heat maps cover the time after the resume only.
    """
    since = " They begin where the run was resumed." if is_resumed else ""
    faulty = dict.fromkeys(each.component for each in repairs)
    pictures = [_picture(name, magnitudes, repairs) for name in _order(magnitudes, faulty, error)]
    options = dict(record["settings"].get("options", ()))
    settings = {**record["settings"], "options": None, **options}
    settings = {k: v for k, v in settings.items() if v not in (None, (), [], "")}
    facts = {"device": plan.device.name, **record["versions"], "everyframe": record["everyframe"]}
    verdict = (
        error
        or f"{len(repairs)} {'repair' if len(repairs) == 1 else 'repairs'}; the run continued."
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{_text(plan.model)}: report</title>
<style>{_STYLE}</style></head><body>
<h1>{_text(plan.title)}</h1>
<p class="verdict">{_text(verdict)}</p>
<h2>Faults and repairs</h2>
{_repairs(repairs)}
<h2>Magnitude of values</h2>
<p>The largest absolute value of each module's output, call by call. Repeated calls (to find a fault
or to compute it again) count as calls.{since}</p>
{"".join(pictures)}
<h2>Plan</h2>
{_components(plan.components)}
{_pairs(settings)}
<h2>Device and versions</h2>
{_pairs(facts)}
<p>In a bug report, include the output of <code>everyframe doctor --share</code>.</p>
</body></html>
"""


def _order(magnitudes: Magnitudes, faulty: Mapping[str, None], error: str) -> Iterator[str]:
    """Called components: faulty ones, then the one where a failed run ended, then the others."""
    called = magnitudes.components()
    first = [name for name in called if name in faulty]
    last = [called[-1]] if called and error and called[-1] not in first else []
    yield from (*first, *last)
    yield from (name for name in called if name not in (*first, *last))


def _picture(component: str, magnitudes: Magnitudes, repairs: Sequence[Repaired]) -> str:
    """Heat map of a component; frames mark the first bad call of each faulty module."""
    names, table = magnitudes.table(component)
    marked: set[tuple[int, int]] = set()
    for each in repairs:
        if each.component == component and each.module in names:
            row = names.index(each.module)
            bad = np.flatnonzero(np.isinf(table[row]))
            marked.update({(row, int(bad[0]))} if len(bad) else ())
    png = heat_map(
        table,
        [name or component for name in names],
        [str(number + 1) for number in range(table.shape[1])],
        title=component,
        unit="largest value, by module and call",
        marked=marked,
    )
    picture = base64.b64encode(png).decode("ascii")
    return f'<p><img alt="{_text(component)}" src="data:image/png;base64,{picture}"></p>\n'


def _repairs(repairs: Sequence[Repaired]) -> str:
    if not repairs:
        return "<p>Nothing could be done.</p>"
    rows = [
        (f"step {each.step} of {each.stage}", each.cause, each.operation, each.dtype,
         ".".join(part for part in (each.component, each.module) if part), each.text)
        for each in repairs
    ]  # fmt: skip
    return _table(("where", "cause", "operation", "dtype", "module", "in words"), rows)


def _components(components: Sequence[ComponentPlan]) -> str:
    rows = []
    for component in components:
        begun_with = ", ".join(f"{each.module or 'all'}: {each.to}" for each in component.repairs)
        size = format_bytes(component.weight_bytes)
        rows.append((component.name, component.device, str(component.precision), size, begun_with))
    return _table(("component", "device", "precision", "weights", "repaired from the start"), rows)


def _pairs(values: Mapping[str, Any]) -> str:
    return _table(
        ("", ""), [(name.replace("_", " "), str(value)) for name, value in values.items()]
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(each)}</th>" for each in heads) if any(heads) else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(each)}</td>" for each in row) + "</tr>\n" for row in rows
    )
    return f"<table>\n<tr>{head}</tr>\n{body}</table>" if head else f"<table>\n{body}</table>"


def _text(value: str) -> str:
    return html.escape(value)


def _free(folder: Path) -> str:
    """An unused file name for a page."""
    stem, ending = _NAME.split(".")
    names = (f"{stem}-{number}.{ending}" if number > 1 else _NAME for number in count(1))
    return next(name for name in names if not (folder / name).exists())
