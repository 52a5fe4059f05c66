"""An executor on a Ray cluster: each job in a placement group, its saved state on this machine.

A lost actor or node costs the step at work: the job resumes in a new group from its last saved
state, on as many devices as there are. Errors of a rank come back in their own class and are not
tried again, as on one machine. `docs/how-to/cluster.md` is for people who run clusters.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from everyframe.core.errors import MissingPackageError
from everyframe.core.events import Events
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine.ray.cluster_connection import (
    join_cluster,
    leave_cluster,
    require_token,
)
from everyframe.engine.ray.job import run_on_cluster
from everyframe.engine.workers.executor import WarmModel, feasible_plan, with_own_ranks
from everyframe.engine.workers.stop_switch import StopSwitch
from everyframe.engine.workers.worker_process import WorkerJob

#: Seconds to wait for room, by default.
PLACE_TIMEOUT = 60.0


def ray_executor(
    address: str | None = None, *, place_timeout: float = PLACE_TIMEOUT
) -> RayExecutor:
    """Connect to a Ray cluster and return an executor on it.

    Args:
        address: ``auto`` (default) for the cluster of this machine or of ``RAY_ADDRESS``,
            ``HOST:PORT``, or ``local`` for a new one on this machine that ends with the executor.
        place_timeout: seconds that a job waits for free devices.

    Raises:
        MissingPackageError: Ray is not installed.
        InputError: there is no cluster at the address, or it refuses the token.
    """
    require_token()
    try:
        import ray
    except ImportError as error:
        raise MissingPackageError(
            "--executor ray needs Ray: pip install 'everyframe[ray]'"
        ) from error
    if ray.is_initialized():
        return RayExecutor(place_timeout, disconnects=False)
    join_cluster(address or "auto")
    return RayExecutor(place_timeout, disconnects=True)


class RayExecutor:
    """Runs jobs on the Ray cluster that this process has joined; see `ray_executor`."""

    has_batches = False

    def __init__(self, place_timeout: float = PLACE_TIMEOUT, *, disconnects: bool = True) -> None:
        self._place_timeout = place_timeout
        self._disconnects = disconnects

    def run(
        self, job: WorkerJob, place: Path | None = None, stop: StopSwitch | None = None
    ) -> Events:
        """Run a job on the cluster; see `everyframe.engine.workers.executor.Executor.run`."""
        where = (Path.cwd() if place is None else place).absolute()
        return run_on_cluster(with_own_ranks(job), where, self._place_timeout, stop)

    def plan(self, request: Request) -> Plan:
        """Plan a request on a node, or on as many as it has ranks; see `Executor.plan`."""
        job = WorkerJob(request, plans=request.num_ranks == 1)
        with closing(self.run(job)) as events:
            return feasible_plan(events)

    def describe(self) -> list[WarmModel]:
        """Nothing: a group ends with its job."""
        return []

    def close(self) -> None:
        """Leave the cluster, which ends the actors of all jobs; their run folders stay."""
        if self._disconnects:
            leave_cluster()
