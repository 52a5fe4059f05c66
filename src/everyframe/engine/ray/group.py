"""The ranks of one job on a Ray cluster: a placement group, an actor for each rank, their messages.

A group serves one job and is the unit of failure: Ray restarts no single rank.
`rank.py` is the other side; `job.py` decides what follows a loss.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from everyframe.core.errors import (
    CannotRunError,
    CorruptRunError,
    DevicesBusyError,
    InputError,
)
from everyframe.engine.ray.cluster_connection import has_head
from everyframe.engine.ray.message_bytes import from_bytes, to_bytes
from everyframe.engine.ray.rank import RayRank, software
from everyframe.engine.ray.rank_layout import Rank, RankJob, RankPlace, check_software, lay_out
from everyframe.engine.workers.error_transfer import error_from
from everyframe.engine.workers.launcher import log_level, log_record
from everyframe.engine.workers.stop_switch import StopSwitch
from everyframe.engine.workers.worker_process import WorkerJob

#: Ray colours what it says, also where no terminal reads it.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: Errors of a lost peer, and of a fault that all ranks of a video find.
_LOST_A_PEER, _SHARED = "PeerLostError", "NumericsError"
#: What an error says that holds for one machine: an absolute path, or a rank by its number.
_OF_A_NODE = re.compile(r"""(^|[\s'"(=])/[^\s/]+/|\branks? \d""")
#: Seconds for an actor to start and to say hello; a node may have to import from a slow disk.
_START = 120.0
#: Seconds to wait for the reason of a lost peer: a dead node is noticed late.
_REASON = 15.0
#: Seconds without the cluster's head, which may be restarted; Ray ends this process after 60.
_HEAD = 20.0
#: Seconds for an actor to remove its files.
_END = 5.0
#: Maximum number of unread messages of a rank.
_AHEAD = 16


class RankLostError(Exception):
    """A rank's actor or node is gone, or its peers can't reach it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class HeadLostError(Exception):
    """The head of the cluster does not answer any more; without it nothing can be asked of Ray."""


class RankFailedError(Exception):
    """A rank reported an error; `keeps` says whether its saved run is still of use."""

    def __init__(self, error: Exception, *, keeps: bool) -> None:
        super().__init__(str(error))
        self.error, self.keeps = error, keeps


class RayGroup:
    """The actors of one job. Use `placed_group`, which ends them."""

    def __init__(self, actors: Sequence[Any], stop: StopSwitch | None = None) -> None:
        self._actors = actors
        self._stop = stop
        self._places: list[RankPlace] = []
        self._headless_since: float | None = None

    def meet(self) -> list[Rank]:
        """Ask each actor where it is and what it runs.

        Raises:
            InputError: a node has other software than this machine, or lacks it.
            RankLostError: an actor died.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError

        asked = [each.hello.remote() for each in self._actors]
        _wait(_START, self._stop, lambda: not ray.wait(asked, num_returns=len(asked), timeout=1)[1])
        try:
            answers = ray.get(asked, timeout=1.0)
        except (RayActorError, GetTimeoutError) as error:
            _check_import(error)
            raise RankLostError(f"a rank did not start: {_reason(error)}") from error
        except RayError as error:
            _check_import(error)
            raise CannotRunError(f"a rank can't start on the cluster: {_reason(error)}") from error
        found = [from_bytes(answer)[1] for answer in answers]
        for each in found:
            check_software(software(), each["software"], each["place"])
        self._places = [each["place"] for each in found]
        return lay_out(self._places)

    def events(
        self, ranks: Sequence[Rank], job: WorkerJob, name: str, run: bytes, inputs: bytes
    ) -> Iterator[tuple[str, Any]]:
        """Run the job and yield the messages of all ranks: events and states.

        Raises:
            RankFailedError: a rank reported an error.
            RankLostError: an actor or a node is gone.
            HeadLostError: the cluster's head is gone.
        """
        import ray

        shared = ray.put(run), ray.put(inputs)
        at_work: dict[Any, int] = {}
        for rank in ranks:
            what = RankJob(rank.job_of(job), name, rank.environment, log_level())
            method = self._actors[rank.place].run.options(
                num_returns="streaming", _generator_backpressure_num_objects=_AHEAD
            )
            at_work[method.remote(to_bytes("job", what), *shared)] = rank.numbers.rank
        while at_work:
            if self._stop is not None:
                self._stop.check()
            ready = _ready(at_work)
            if not ready:
                self._check_head()
            for stream in ready:
                name_, value = self._next(stream, at_work[stream], ranks)
                if name_ == "end":
                    del at_work[stream]
                elif name_ == "error":
                    raise self._explain(at_work, stream, value, ranks)
                elif name_ == "log":
                    log_record(value)
                else:
                    yield name_, value

    def _check_head(self) -> None:
        """Raise `HeadLostError` if the head has been gone for a while; ranks go on without it."""
        if has_head():
            self._headless_since = None
        elif self._headless_since is None:
            self._headless_since = time.monotonic()
        elif time.monotonic() - self._headless_since > _HEAD:
            raise _head_lost()

    def _next(self, stream: Any, rank: int, ranks: Sequence[Rank]) -> tuple[str, Any]:
        """The next message of a rank."""
        import ray
        from ray.exceptions import RayError

        try:
            return from_bytes(ray.get(next(stream)))
        except (RayError, StopIteration, CorruptRunError) as error:
            place = self._places[ranks[rank].place]
            where = f"rank {rank} on the node {place.host} ({place.address})"
            raise RankLostError(f"{where} was lost: {_reason(error)}") from error

    def _explain(
        self, at_work: dict[Any, int], stream: Any, value: Any, ranks: Sequence[Rank]
    ) -> Exception:
        """The error that explains a failure: a rank that lost a peer does not know why.

        Of values that are not finite, which all ranks of a video find, the first rank's counts: it
        knows whether the run is still of use.
        """
        until = time.monotonic() + _REASON
        others = {each: rank for each, rank in at_work.items() if each is not stream}
        first, rank = value, at_work[stream]
        while _has_better(value, others) and time.monotonic() < until:
            for each in _ready(others):
                try:
                    name, found = self._next(each, others[each], ranks)
                except RankLostError as lost:
                    return lost
                if name in ("end", "error"):
                    if name == "error" and _is_better(found, value, others[each]):
                        value, rank = found, others[each]
                    del others[each]
        if value["error"]["class"] == _LOST_A_PEER:
            return RankLostError(first["error"]["text"])
        error = self._with_node(error_from(value["error"], rank), self._places[ranks[rank].place],
                                rank)  # fmt: skip
        return RankFailedError(error, keeps=value["keeps"])

    @staticmethod
    def _with_node(error: Exception, place: RankPlace, rank: int) -> Exception:
        """The error with the node of its rank where it is about files, which are those there."""
        if not isinstance(error, InputError) or not _OF_A_NODE.search(str(error)):
            return error
        return error.reworded(f"{error} (rank {rank} on the node {place.host}, {place.address})")


def _has_better(value: Any, others: dict[Any, int]) -> bool:
    """Whether another rank may know more of a failure."""
    kind = value["error"]["class"]
    return (kind == _LOST_A_PEER and bool(others)) or (kind == _SHARED and 0 in others.values())


def _is_better(found: Any, value: Any, rank: int) -> bool:
    """Whether the error that this rank has reported explains more than `value`."""
    kind, before = found["error"]["class"], value["error"]["class"]
    return kind != before if before == _LOST_A_PEER else kind == before and rank == 0


def _reason(error: BaseException) -> str:
    """What Ray says, in one line without colours: of an actor's constructor the error itself."""
    lines = _COLOUR.sub("", str(error)).strip().splitlines() or [type(error).__name__]
    line = lines[-1] if "creation task" in lines[0] else lines[0]
    return line.strip().rstrip(".")


def _head_lost() -> HeadLostError:
    return HeadLostError(f"the head of the Ray cluster does not answer for {_HEAD:g} s")


def _answers_in_a_second() -> bool:
    time.sleep(1.0)
    return has_head()


def _ready(streams: dict[Any, int]) -> list[Any]:
    """Streams with a message, or an end; waits a second for one."""
    import ray

    return list(ray.wait(list(streams), num_returns=1, timeout=1.0)[0])


def _check_import(error: BaseException) -> None:
    """Raise `InputError` if a node could not import this package."""
    if "ModuleNotFoundError" in str(error) or "ImportError" in str(error):
        wanted = ", ".join(f"{name} {text}" for name, text in software().items())
        raise InputError(
            "a node of the cluster can't import Everyframe; install the same on every node "
            f"({wanted}): {str(error).strip().splitlines()[-1]}"
        ) from error


@contextmanager
def placed_group(
    num_ranks: int, kind: str, seconds: float, stop: StopSwitch | None = None
) -> Iterator[RayGroup]:
    """Context: a group of that many ranks on devices of `kind`, ``GPU`` or ``CPU``.

    All on one node if one has room within half of `seconds`, else on several.

    Raises:
        DevicesBusyError: there is no room within `seconds`.
        HeadLostError: the cluster's head is gone.
        RunStoppedError: `stop` was set.
    """
    if not has_head() and not _wait(_HEAD, stop, _answers_in_a_second):
        raise _head_lost()
    import ray
    from ray.util.placement_group import remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = {"CPU": 1.0, **({"GPU": 1.0} if kind == "GPU" else {})}
    placed = _place([bundle] * num_ranks, seconds, stop)
    actors: list[Any] = []
    try:
        for at in range(num_ranks):
            strategy = PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=at)
            kind_of_actor = ray.remote(RayRank).options(
                num_cpus=1, num_gpus=bundle.get("GPU", 0), max_restarts=0, max_task_retries=0,
                max_concurrency=2, scheduling_strategy=strategy,
            )  # fmt: skip
            actors.append(kind_of_actor.remote())
        yield RayGroup(actors, stop)
    finally:
        if has_head():  # else nothing can be ended, and Ray would wait for it
            _end(actors)
            remove_placement_group(placed)


def _place(bundles: list[dict[str, float]], seconds: float, stop: StopSwitch | None) -> Any:
    """A placement group of these bundles, on one node if possible."""
    from ray.util.placement_group import placement_group, remove_placement_group

    fits_one = any(
        all(node.get(name, 0) >= need * len(bundles) for name, need in bundles[0].items())
        for node in _nodes()
    )
    tries = (
        (("STRICT_PACK", seconds / 2), ("PACK", seconds / 2)) if fits_one else (("PACK", seconds),)
    )
    for strategy, each in tries:
        found = placement_group(bundles, strategy=strategy)
        is_placed = False
        try:
            is_placed = _wait(each, stop, partial(found.wait, 1))
        finally:
            if not is_placed:
                remove_placement_group(found)
        if is_placed:
            return found
    kind = "GPU" if "GPU" in bundles[0] else "CPU"
    total = sum(int(node.get(kind, 0)) for node in _nodes())
    raise DevicesBusyError(
        f"no {len(bundles)} free {kind}s within {seconds:g} s: the Ray cluster has {total} and "
        f"{num_free(kind)} are free; wait for other jobs, add nodes, or give a smaller "
        "--num-devices"
    )


def _wait(seconds: float, stop: StopSwitch | None, is_done: Callable[[], bool]) -> bool:
    """Ask `is_done`, which waits a second each time; whether it came true in time."""
    until = time.monotonic() + seconds
    while not is_done():
        if stop is not None:
            stop.check()
        if time.monotonic() > until:
            return False
    return True


def _nodes() -> list[dict[str, float]]:
    """Resources of each node that is alive."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def num_free(kind: str) -> int:
    """Free devices of that kind in the whole cluster, as Ray last heard."""
    import ray

    return int(ray.available_resources().get(kind, 0))


def has_gpus() -> bool:
    """Whether any node has GPUs."""
    return any(node.get("GPU", 0) >= 1 for node in _nodes())


def _end(actors: Sequence[Any]) -> None:
    """End the actors; each removes its files first if it still answers."""
    import ray
    from ray.exceptions import RayError

    try:
        ray.wait([each.end.remote() for each in actors], num_returns=len(actors), timeout=_END)
        for each in actors:
            ray.kill(each, no_restart=True)
    except (RayError, ValueError) as error:
        # The cluster is gone, and its actors with it.
        logging.getLogger(__name__).debug("actors can't be ended: %s", error)
