"""Facts of this machine: what can compute here, how much memory it has, which versions are there.

Nothing here decides anything: `everyframe.precision` and `everyframe.planning` do, by these facts.
Read next: `facts` (the one function that planning calls), `processor` (cores, memory and
instructions of the CPU), `accelerators` (what torch sees beside it).
"""

from everyframe.hardware.facts import machine_facts, pick_device

__all__ = ["machine_facts", "pick_device"]
