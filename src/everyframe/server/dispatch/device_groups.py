"""Device groups: which jobs run on the same devices at the same time, and which job is next.

A group runs one job or a batch. The jobs of a batch differ only in prompt and seed. Their plan
limits its size: a step of several videos must be faster on the device and keep each video's bits.
A job may join while others run. When a job has all of its frames, the next similar job is sent to
the same worker and begins as soon as the first one ends, so no device waits for the queue. Jobs
that failed before, or left a batch, run alone.
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

#: Form of a device name. The plan of the first job finds out whether the device exists.
_DEVICE = re.compile(r"\d{1,4}|[a-z]{2,16}(:\d{1,4})?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Claim:
    """A claimed job and the name of its batch, or None for a job that runs alone."""

    job: Job
    batch: str | None


class DeviceGroup:
    """Jobs of one device group; thread-safe.

    Attributes:
        devices: names such as ``0,1``; None leaves the choice to the plan.
        most: maximum number of jobs at a time.
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
        """Id of the job that has run longest; None while idle."""
        with self._lock:
            return next(iter(self._running), None)

    def claim(self, store: JobStore) -> Claim | None:
        """Claim the next job; None if no job may begin now."""
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
        """Note that a job has all of its frames and will leave soon."""
        with self._lock:
            self._ending.add(id)

    def leave(self, id: str, *, is_alone: bool = False) -> None:  # noqa: A002
        """Note that a job has left the devices; with `is_alone` its next attempt runs alone."""
        with self._lock:
            self._running.remove(id)
            self._ending.discard(id)
            if is_alone:
                self._alone.add(id)


def _has_jumped(job: Job, store: JobStore) -> bool:
    """Whether an older job waits; true as well if the store can't be read."""
    try:
        return store.has_older(job)
    except StoreError:
        return True


def parse_groups(text: str | None) -> dict[str, str | None]:
    """Devices of each group in a text such as ``0,1;2,3``, by group name.

    None is one group whose devices the plan chooses.

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
    """``cuda:0`` for ``0`` and for ``cuda``; the CPU has no number."""
    (name,) = device_names(device.lower())
    kind, _, number = name.partition(":")
    return kind if kind == "cpu" else f"{kind}:{int(number or 0)}"


class ChangeNotifier:
    """Counter of changes that threads wait for: a job was queued, or a group has room."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.count = 0

    def note(self) -> None:
        """Count a change, and wake all waiting threads."""
        with self._condition:
            self.count += 1
            self._condition.notify_all()

    def wait(self, seen: int, seconds: float) -> None:
        """Wait for a change after the count `seen`, for at most `seconds`."""
        with self._condition:
            self._condition.wait_for(lambda: self.count != seen, seconds)
