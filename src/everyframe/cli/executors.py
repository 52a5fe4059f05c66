"""Executor flags: ``--executor ray`` with its own flags, and the executor that they select."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import TYPE_CHECKING

from everyframe.cli.options import flag
from everyframe.core.errors import InputError
from everyframe.core.events import Events
from everyframe.engine.workers.torchrun import under_torchrun

if TYPE_CHECKING:
    from everyframe.engine.workers.worker_process import WorkerJob

_EXECUTORS = ("workers", "ray")


class RayChoice:
    """A Ray cluster that a command names; joined when a job runs."""

    def __init__(self, address: str | None, seconds: float | None) -> None:
        self._address, self._seconds = address, seconds

    def run(self, job: WorkerJob, place: Path) -> Events:
        """Join the cluster, run the job on it, and leave. `place` is where relative paths are."""
        from everyframe.engine.ray.executor import PLACE_TIMEOUT, ray_executor

        seconds = PLACE_TIMEOUT if self._seconds is None else self._seconds
        executor = ray_executor(self._address, place_timeout=seconds)
        try:
            yield from executor.run(job, place)
        finally:
            executor.close()


def chosen_ray(
    executor: str | None, ray_address: str | None, place_timeout: str | None
) -> RayChoice | None:
    """The cluster that the flags choose; None for this machine.

    Raises:
        InputError: an unknown executor, or flags that have no effect on it.
    """
    if not is_ray(executor, ray_address, place_timeout):
        return None
    if under_torchrun() is not None:
        raise InputError(
            "torchrun has started this process as one rank, and Ray starts ranks too; give "
            "--executor ray to a single process, or leave it out"
        )
    return RayChoice(ray_address, None if place_timeout is None else _seconds(place_timeout))


def is_ray(executor: str | None, ray_address: str | None, place_timeout: str | None) -> bool:
    """Whether the flags choose a Ray cluster; raises as `chosen_ray`."""
    if executor not in (None, *_EXECUTORS):
        raise InputError(f"executor must be one of {', '.join(_EXECUTORS)}, got {executor!r}")
    for name, value in (("ray-address", ray_address), ("place-timeout", place_timeout)):
        if value is not None and executor != "ray":
            raise InputError(f"--{name} needs --executor ray")
    return executor == "ray"


def _seconds(text: str) -> float:
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InputError(f"place-timeout must be seconds above 0, such as 60, got {text!r}")
    return seconds


def executor_flags() -> list[inspect.Parameter]:
    """The flags, for a command that runs jobs."""
    return [
        flag("executor", str, "Where ranks run: workers (this machine) or ray (a Ray cluster)."),
        flag("ray_address", str, "The Ray cluster: auto (default), local, or HOST:PORT."),
        flag(
            "place_timeout", str, "Seconds to wait for free devices of the cluster; 60 by default."
        ),
    ]
