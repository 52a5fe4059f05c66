"""Device groups: which jobs run on the same devices at a time, and which one is next.

A group runs one job, or a batch: jobs that differ in prompt and seed alone, as far as their plan
says that a step of several videos pays there and keeps each one's bits. A job may join while the
others run. Where the frames of a job are made, the next one alike goes to its worker at once and
begins there as soon as that one has ended, so that no device waits for the queue. Jobs that were
tried before, or left a batch, run alone.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass

from everyframe.core.errors import InputError, StoreError
from everyframe.core.plan import Plan
from everyframe.hardware import device_names
from everyframe.server.dispatch.group_health import GroupHealth
from everyframe.server.queue.jobs import Job
from everyframe.server.queue.store import JobStore

#: What a device may be called. Whether it is there is found by the plan of the first job.
_DEVICE = re.compile(r"\d{1,4}|[a-z]{2,16}(:\d{1,4})?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Claim:
    """A job that was claimed, and the name of its batch; None for a job alone."""

    job: Job
    batch: str | None


class DeviceGroup:
    """Jobs of one device group; thread-safe.

    Attributes:
        devices: such as ``0,1``; None is what a plan chooses.
        most: jobs at a time.
        health: whether the devices work.
    """

    def __init__(self, name: str, devices: str | None, most: int, warm_ahead: int) -> None:
        self.name, self.devices, self.most = name, devices, most
        self.health = GroupHealth(devices)
        self._warm_ahead = warm_ahead
        self._lock = threading.Lock()
        self._running: list[str] = []
        self._ending: set[str] = set()
        self._alone: set[str] = set()
        self._lead: Job | None = None
        self._room = 1
        self._warm, self._jumps = "", 0

    @property
    def job(self) -> str | None:
        """The job that runs for the longest time."""
        with self._lock:
            return next(iter(self._running), None)

    def claim(self, store: JobStore) -> Claim | None:
        """Begin the next job; None if none may begin now."""
        if not self.health.may_begin():
            return None
        with self._lock:
            may_jump = self._jumps < self._warm_ahead
            if not self._running:
                job = store.claim(self.name, self._warm if may_jump else None)
                self._lead, self._room = (job if self._may_lead(job) else None), 1
                if job is not None:
                    self._alone.discard(job.id)  # it has what it was named for
            elif self._lead is None or len(self._running) - len(self._ending) >= self._room:
                return None
            else:
                job = store.claim_alike(self.name, self._lead, self._alone, may_jump=may_jump)
            if job is None:
                return None
            self._jumps = self._jumps + 1 if _has_jumped(job, store) else 0
            self._warm = job.model
            self._running.append(job.id)
            return Claim(job, None if self._lead is None else f"{self.name} {self._lead.id}")

    def _may_lead(self, job: Job | None) -> bool:
        is_new = job is not None and job.run is None and job.attempts <= 1
        return self.most > 1 and is_new and job is not None and job.id not in self._alone

    def note_plan(self, plan: Plan) -> None:
        """Note how many jobs of this plan may run together."""
        with self._lock:
            self._room = 1 if plan.batch is None else min(self.most, plan.batch.num_videos)

    def note_end(self, id: str) -> None:  # noqa: A002
        """Note that a job has its frames, and soon leaves."""
        with self._lock:
            self._ending.add(id)

    def leave(self, id: str, *, is_alone: bool = False) -> None:  # noqa: A002
        """Note that the devices are done with a job, which is to run alone if it comes again."""
        with self._lock:
            self._running.remove(id)
            self._ending.discard(id)
            if is_alone:
                self._alone.add(id)


def _has_jumped(job: Job, store: JobStore) -> bool:
    """Whether an older job waits. If that can't be read, the job, which has begun, counts so."""
    try:
        return store.has_older(job)
    except StoreError:
        return True


def parse_groups(text: str | None) -> dict[str, str | None]:
    """Groups of ``0,1;2,3``; one group of what the plan chooses for None.

    Raises:
        InputError: a group is empty, holds no name of a device, or two share a device.
    """
    if text is None:
        return {"default": None}
    groups = [each.replace(" ", "") for each in text.split(";")]
    devices = [device for group in groups for device in group.split(",")]
    if not all(map(_DEVICE.fullmatch, devices)):
        raise InputError(f"groups must be lists of devices such as 0,1;2,3, got {text!r}")
    names = [_full_name(device) for device in devices]
    twice = [
        device for device, name in zip(devices, names, strict=True)
        if names.count(name) > 1 and name != "cpu"
    ]  # fmt: skip
    if twice:
        raise InputError(f"device {twice[0]} is in two groups of {text!r}; a device runs one job")
    found: dict[str, str | None] = {}
    for group in groups:
        number = [*found.values()].count(group)
        found[f"{group} ({number + 1})" if number else group] = group
    return found


def _full_name(device: str) -> str:
    """``cuda:0`` for ``0`` and for ``cuda``; the processor has no number."""
    (name,) = device_names(device.lower())
    kind, _, number = name.partition(":")
    return kind if kind == "cpu" else f"{kind}:{int(number or 0)}"


class News:
    """Something that threads wait for, each of them until it happens once more."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.count = 0

    def note(self) -> None:
        """It happened."""
        with self._condition:
            self.count += 1
            self._condition.notify_all()

    def wait(self, seen: int, seconds: float) -> None:
        """Wait until it has happened more often than `seen`, for some seconds at most."""
        with self._condition:
            self._condition.wait_for(lambda: self.count != seen, seconds)
