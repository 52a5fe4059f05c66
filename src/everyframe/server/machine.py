"""This machine as the server shows it: its facts and the doctor's findings.

Both come from processes of their own: asking an accelerator imports torch, which this process does
not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import anyio.to_thread

from everyframe.hardware.isolation import run_isolated
from everyframe.server.errors import ApiError

#: Seconds for which an answer holds.
FACTS_HOLD, DOCTOR_HOLDS = 30.0, 600.0
#: Seconds that the doctor may take.
_DOCTOR_TAKES = 300.0


class RememberedAnswer:
    """The answer of a function that takes long, asked for again after `holds` seconds.

    All who ask meanwhile wait for the one call, and get its answer or its error.
    """

    def __init__(self, function: Callable[[], Any], holds: float) -> None:
        self._function, self._holds = function, holds
        self._answer: Any = None
        self._since = float("-inf")
        self._call: asyncio.Task[None] | None = None

    async def get(self) -> Any:
        """The answer; the function runs in a thread, and its errors pass through."""
        if self._call is None and time.monotonic() - self._since > self._holds:
            self._call = asyncio.create_task(self._ask())
        if self._call is not None:
            await asyncio.shield(self._call)  # who leaves does not take it from the others
        return self._answer

    async def _ask(self) -> None:
        try:
            self._answer = await anyio.to_thread.run_sync(self._function)
            self._since = time.monotonic()
        finally:
            self._call = None


def read_facts() -> dict[str, Any]:
    """Devices, cores and versions, as JSON data; torch is asked in a process of its own."""
    from everyframe.hardware.facts import query_machine

    facts = query_machine().machine
    devices = [
        {"name": each.name, "device": each.torch_name, "memory_bytes": each.memory,
         "free_bytes": each.free_memory}
        for each in facts.devices
    ]  # fmt: skip
    return {"devices": devices, "num_cores": facts.num_cores, "versions": dict(facts.versions)}


def ask_doctor() -> dict[str, Any]:
    """The report of `read_findings`. Raises `ApiError` if its process died or took too long."""
    result = run_isolated(read_findings, seconds=_DOCTOR_TAKES)
    if not result.is_well:
        how = result.error or result.signal or f"no answer in {_DOCTOR_TAKES:.0f} seconds"
        raise ApiError("server_error", f"the doctor could not be asked: {how}")
    found: dict[str, Any] = result.value
    return found


def read_findings() -> dict[str, Any]:
    """The doctor's report without names of this machine's folders, as JSON data."""
    from everyframe.doctor.diagnose import diagnose
    from everyframe.doctor.report import shareable

    found: dict[str, Any] = shareable(diagnose().model_dump(mode="json"))
    return found
