"""Facts of this machine and the doctor's findings, for the server's routes.

Both come from separate processes, since torch is needed to query an accelerator and this process
never imports it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import anyio.to_thread

from everyframe.hardware.isolation import run_isolated
from everyframe.server.errors import ApiError

#: Seconds for which facts and the doctor's report stay cached.
FACTS_SECONDS, DOCTOR_SECONDS = 30.0, 600.0
#: Seconds that the doctor may take.
_DOCTOR_TIMEOUT = 300.0


class CachedResult:
    """Cached result of a slow function, which is called again after `max_age` seconds.

    Callers that arrive during a call wait for it, and get its result or its error.
    """

    def __init__(self, function: Callable[[], Any], max_age: float) -> None:
        self._function, self._max_age = function, max_age
        self._answer: Any = None
        self._since = float("-inf")
        self._call: asyncio.Task[None] | None = None

    async def get(self) -> Any:
        """The result; the function runs in a thread, and its errors pass through."""
        if self._call is None and time.monotonic() - self._since > self._max_age:
            self._call = asyncio.create_task(self._update())
        if self._call is not None:
            await asyncio.shield(self._call)  # a cancelled caller does not cancel it for others
        return self._answer

    async def _update(self) -> None:
        try:
            self._answer = await anyio.to_thread.run_sync(self._function)
            self._since = time.monotonic()
        finally:
            self._call = None


def read_facts() -> dict[str, Any]:
    """Devices, cores and versions, as JSON data; torch is imported in a separate process."""
    from everyframe.hardware.facts import query_machine

    facts = query_machine().machine
    devices = [
        {"name": each.name, "device": each.torch_name, "memory_bytes": each.memory,
         "free_bytes": each.free_memory}
        for each in facts.devices
    ]  # fmt: skip
    return {"devices": devices, "num_cores": facts.num_cores, "versions": dict(facts.versions)}


def run_doctor() -> dict[str, Any]:
    """Run `doctor_report` in a separate process. Raises `ApiError` if it died or took too long."""
    result = run_isolated(doctor_report, seconds=_DOCTOR_TIMEOUT)
    if not result.is_well:
        how = result.error or result.signal or f"no answer in {_DOCTOR_TIMEOUT:.0f} seconds"
        raise ApiError("server_error", f"the doctor could not be asked: {how}")
    found: dict[str, Any] = result.value
    return found


def doctor_report() -> dict[str, Any]:
    """The doctor's report as JSON data, without names of this machine's folders."""
    from everyframe.doctor.diagnose import diagnose
    from everyframe.doctor.report import shareable

    found: dict[str, Any] = shareable(diagnose().model_dump(mode="json"))
    return found
