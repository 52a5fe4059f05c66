"""Runs of tiny diffusers pipelines among ranks, as requests and as what came of each rank."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from everyframe.core.events import Repaired
from everyframe.core.request import Request
from everyframe.engine.distributed import Rendezvous
from everyframe.engine.run import stream
from everyframe.parallel.communicator import Communicator
from everyframe.runs.run_state import SaveOptions
from helpers.interrupted_ranks import summarize


def requests_of(names: Iterable[str], root: Path) -> dict[str, dict[str, Any]]:
    """What is asked of each pipeline, which is written to the folder."""
    from helpers.tiny_checkpoints import pipelines as tiny_pipelines

    found = {}
    for name in names:
        tiny_pipelines.TINY[name](root / name)
        found[name] = {
            "prompt": "a red fox runs", "model": str(root / name), "dtype": "fp32", "seed": 3,
            "num_inference_steps": 3, "device": "cpu", **tiny_pipelines.CALLS[name],
            **({"size": "32x16"} if name == "wan" else {}),  # four tokens
        }  # fmt: skip
    return found


def run(group: Communicator, asked: dict[str, Any], fault: Any = None) -> dict[str, Any]:
    """One rank's run."""
    undo = fault(group) if fault is not None else None
    try:
        request = Request(**{"num_devices": group.size, **asked})
        join = Rendezvous(group.rank, lambda _: group)
        events = list(stream(request, keep=SaveOptions(None), num_threads=1, join=join))
    finally:
        if undo is not None:
            undo()
    repairs = [(each.component, each.module) for each in events if isinstance(each, Repaired)]
    return {**summarize(events, speaks=True), "sent": dict(group.sent), "repairs": repairs}
