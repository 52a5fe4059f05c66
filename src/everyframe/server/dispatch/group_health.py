"""Whether the devices of a group work, asked where jobs end their workers before a first step.

A job that ends its workers is to blame for that itself, and fails after some attempts. A device
that the driver lost ends the workers of every job, and a queue must not fail one by one. So after
two such deaths in a row a process of its own computes on the group's devices. If it can't, jobs
wait, and the devices are asked again after a pause that grows.
"""

from __future__ import annotations

import threading
import time

from everyframe.hardware.isolation import ProcessResult, run_isolated

#: Deaths in a row before a first step, after which the devices are asked.
_DEATHS = 2
#: Seconds of the first pause, and of the longest.
PAUSES = 10.0, 600.0
#: Seconds that the devices have for a product.
_SECONDS = 120.0


class GroupHealth:
    """Health of one device group; thread-safe.

    Attributes:
        trouble: why no job begins here; None while the devices work, or nobody had to ask.
    """

    def __init__(self, devices: str | None) -> None:
        self.trouble: str | None = None
        self._devices = devices
        self._deaths, self._pause, self._until = 0, PAUSES[0], 0.0
        self._asking = threading.Lock()

    def may_begin(self) -> bool:
        """Whether a job may begin; asks failed devices again once their pause is over."""
        if self.trouble is None:
            return True
        return time.monotonic() >= self._until and self._are_well()

    def note_work(self) -> None:
        """Note that a job made a step: the devices work."""
        self._deaths = 0

    def note_death(self, *, is_last: bool) -> str | None:
        """Note that workers died before a first step; why the devices fail, None if they work.

        They are asked after two deaths in a row, or if the job has its last attempt.
        """
        self._deaths += 1
        if self._deaths >= _DEATHS or is_last:
            self._are_well()
        return self.trouble

    def _are_well(self) -> bool:
        if not self._asking.acquire(blocking=False):
            return False  # another thread asks
        try:
            answer = ask_devices(self._devices)
            if answer.is_well:
                self.trouble, self._deaths, self._pause = None, 0, PAUSES[0]
                return True
            self._until = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, PAUSES[1])
            self.trouble = str(answer)
            return False
        finally:
            self._asking.release()


def ask_devices(devices: str | None) -> ProcessResult:
    """Compute on the devices of a group, in a process of its own: how that ended."""
    return run_isolated(compute_on, devices, seconds=_SECONDS)


def compute_on(devices: str | None) -> list[str]:
    """A product on each device, checked; their names. Any error says that one does not work."""
    import torch

    from everyframe.hardware import device_names, machine_facts, pick_device

    names = ["auto"] if devices is None else device_names(devices)
    facts, found = machine_facts(), []
    for name in dict.fromkeys(names):
        device = pick_device(facts, name).torch_name
        ones = torch.ones(64, 64, device=device)
        total = float((ones @ ones).sum())
        if total != 64**3:
            raise ArithmeticError(f"{device} computes {total} in place of {64**3}")
        found.append(device)
    return found
