"""Facts of this machine: devices, memory, software, throughput and known issues.

Facts only: `everyframe.precision` and `everyframe.planning` decide by them.

Read next: `facts` (the entry point of planning), `cpu` (cores, memory and instructions),
`accelerators` (devices that torch finds), `known_issues` (conditions on the facts).
"""

from everyframe.hardware.facts import device_names, machine_facts, pick_device

__all__ = ["device_names", "machine_facts", "pick_device"]
