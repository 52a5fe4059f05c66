"""Health of a device group: probe its devices after workers that died before a first step.

A job that kills its own workers fails after a few attempts. A device that the driver lost kills the
workers of every job, and must not fail the whole queue. So after two such deaths in a row a
separate process computes on the group's devices. If it fails, the group's jobs wait, and the
devices are probed again after a pause that doubles each time, from 10 seconds to 10 minutes.
"""

from __future__ import annotations

import threading
import time

from everyframe.hardware.isolation import ProcessResult, run_isolated

#: Deaths in a row before a first step, after which the devices are probed.
_DEATHS = 2
#: Seconds of the first pause, and of the longest.
PAUSES = 10.0, 600.0
#: Seconds that the devices have for a product.
_SECONDS = 120.0


class GroupHealth:
    """Health of one device group; thread-safe.

    Attributes:
        problem: why no job begins here; None if the last probe passed, or none was needed.
    """

    def __init__(self, devices: str | None) -> None:
        self.problem: str | None = None
        self._devices = devices
        self._deaths, self._pause, self._until = 0, PAUSES[0], 0.0
        self._asking = threading.Lock()

    def may_begin(self) -> bool:
        """Whether a job may begin; probes failed devices again once their pause is over."""
        if self.problem is None:
            return True
        return time.monotonic() >= self._until and self._are_well()

    def note_work(self) -> None:
        """Note that a job made a step: the devices work."""
        self._deaths = 0

    def note_death(self, *, is_last: bool) -> str | None:
        """Note that workers died before a first step; returns why the devices fail, else None.

        The devices are probed after two deaths in a row, or if this was the job's last attempt.
        """
        self._deaths += 1
        if self._deaths >= _DEATHS or is_last:
            self._are_well()
        return self.problem

    def _are_well(self) -> bool:
        if not self._asking.acquire(blocking=False):
            return False  # another thread probes
        try:
            answer = probe_devices(self._devices)
            if answer.is_well:
                self.problem, self._deaths, self._pause = None, 0, PAUSES[0]
                return True
            self._until = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, PAUSES[1])
            self.problem = str(answer)
            return False
        finally:
            self._asking.release()


def probe_devices(devices: str | None) -> ProcessResult:
    """Run `check_devices` in a process of its own; returns how it ended."""
    return run_isolated(check_devices, devices, seconds=_SECONDS)


def check_devices(devices: str | None) -> list[str]:
    """Check a matrix product on each device; returns the devices' names.

    Raises any error of a device that does not work.
    """
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
