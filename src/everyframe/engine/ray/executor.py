"""An executor on a Ray cluster: each job in a placement group, its saved state on this machine.

A lost actor or node costs the step at work: the job resumes in a new group from its last saved
state, on as many devices as there are. Errors of a rank come back in their own class and are not
tried again, as on one machine. `docs/how-to/cluster.md` is for people who run clusters.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import closing
from pathlib import Path

from everyframe.core.errors import InputError, MissingPackageError, first_line
from everyframe.core.events import Events
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine.ray.job import run_on_cluster
from everyframe.engine.workers.executor import WarmModel, feasible_plan, with_own_ranks
from everyframe.engine.workers.stop_switch import StopSwitch
from everyframe.engine.workers.worker_process import WorkerJob

#: Seconds to wait for room, by default.
PLACE_TIMEOUT = 60.0
_MODE = "RAY_AUTH_MODE"


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
    _ask_for_token()
    try:
        import ray
    except ImportError as error:
        raise MissingPackageError(
            "--executor ray needs Ray: pip install 'everyframe[ray]'"
        ) from error
    if ray.is_initialized():
        return RayExecutor(place_timeout, disconnects=False)
    address = address or "auto"
    _connect(address)
    return RayExecutor(place_timeout, disconnects=True)


def _ask_for_token() -> None:
    """Switch token authentication on unless a person chose; Ray reads it once, on import.

    Raises:
        InputError: Ray was imported without it.
    """
    if _MODE in os.environ:
        return
    if sys.modules.get("ray") is not None:
        raise InputError(
            f"Ray was imported without token authentication: set {_MODE}=token before that, or "
            f"{_MODE}=disabled to let whoever reaches the cluster's ports run code on it"
        )
    os.environ[_MODE] = "token"


def _connect(address: str) -> None:
    """Join the cluster as a driver, and undo what Ray changes in this process besides.

    It takes over SIGTERM, and puts our current folder on its workers' import path.
    """
    import ray
    from ray.exceptions import AuthenticationError, RayError

    here, handler = os.getcwd(), signal.getsignal(signal.SIGTERM)
    # Only this package's location belongs there.
    os.chdir(Path(__file__).parents[3])
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR",
                 include_dashboard=False if address == "local" else None)  # fmt: skip
    except AuthenticationError as error:
        raise InputError(
            f"no Ray cluster can be joined at {address!r}: its token is not known here; copy it to "
            "~/.ray/auth_token (`ray get-auth-token` prints it on a machine of the cluster)"
        ) from error
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        why = first_line(error).rstrip(" .")
        raise InputError(
            f"no Ray cluster can be joined at {address!r} ({why}); start one "
            "(RAY_AUTH_MODE=token ray start --head), give --ray-address HOST:PORT, or compare the "
            "token in ~/.ray/auth_token, since a wrong one is refused like this"
        ) from error
    finally:
        os.chdir(here)
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


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
            import ray

            ray.shutdown()
