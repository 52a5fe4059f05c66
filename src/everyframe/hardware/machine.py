"""Every fact of this machine, with what torch loads on it; asked for in a process of its own.

A library that breaks on this machine may end the process that asks, or hang it, so whoever must
live on calls `ask`. Not here: facts of devices alone (`facts`), which a run takes in its own
process. Read next: `loaded`, `isolated`; who asks are `everyframe.doctor.diagnose` and
`everyframe.engine.obituary`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from everyframe.core.facts import MachineFacts
from everyframe.core.plain import from_plain, to_plain
from everyframe.hardware.facts import machine_facts
from everyframe.hardware.isolated import Ended, run_isolated
from everyframe.hardware.loaded import with_loaded
from everyframe.hardware.software import software_facts

#: Importing torch from a cold disk takes long; beyond this it hangs.
_SECONDS = 120.0


@dataclass(frozen=True)
class Asked:
    """The facts, and how the process that was asked for them `ended`.

    Where it ended badly these are the facts that are left without torch.
    """

    machine: MachineFacts
    ended: Ended


def ask() -> Asked:
    """Every fact of this machine; whatever torch does when it is asked, this returns."""
    ended = run_isolated(_as_plain, seconds=_SECONDS)
    return Asked(from_plain(ended.value) if ended.is_well else without_torch(), ended)


def whole_machine() -> MachineFacts:
    """Every fact of this machine, with what torch loaded. Imports torch; may touch the cards."""
    machine = machine_facts()
    return replace(machine, software=with_loaded(software_facts()))


def without_torch() -> MachineFacts:
    """The facts that are left where torch can't be asked: the processor and the software."""
    return replace(machine_facts("cpu"), software=software_facts())


def _as_plain() -> Any:
    return to_plain(whole_machine())
