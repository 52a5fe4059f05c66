"""The facts of the real machine, taken once, and the device that a request means.

Only reading: nothing is chosen by speed, nothing is probed by running it. torch is imported only
where an accelerator may exist. Read next: `everyframe.core.facts` (the types), `processor` and
`accelerators` (where each fact comes from), `everyframe.precision.policy` (what follows from them).
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from typing import Any

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.core.serialization import from_jsonable, to_jsonable
from everyframe.hardware.accelerators import accelerator_facts, accelerator_versions, may_have_any
from everyframe.hardware.cpu import num_usable_cores, processor_facts
from everyframe.hardware.isolation import ProcessResult, run_isolated
from everyframe.hardware.software import software_facts, with_loaded

#: Packages whose version changes what comes out, in the order in which they are printed.
_PACKAGES = ("torch", "diffusers", "transformers")


def machine_facts(device: str = "auto") -> MachineFacts:
    """The facts of this machine: accelerators first, the CPU last.

    `device` is what was asked: with ``"cpu"`` accelerators are not looked for, and torch is not
    imported. Free memory is that of this moment, in bytes. No CUDA context is made as long as
    nvidia-smi is there to tell free memory.
    """
    versions = _versions()
    devices: tuple[DeviceFacts, ...] = ()
    if device != "cpu" and may_have_any(versions.get("torch", "")):
        devices = accelerator_facts()
        versions |= accelerator_versions()
    return MachineFacts(
        devices=(*devices, processor_facts()),
        num_cores=num_usable_cores(),
        versions=versions,
    )


def pick_device(facts: MachineFacts, asked: str = "auto") -> DeviceFacts:
    """The device that `asked` means: ``auto`` is the first one, ``cuda`` the first of its kind.

    Raises:
        InputError: this machine has no such device; the text lists those that it has.
    """
    wanted = asked.strip().casefold()
    if wanted == "auto":
        return facts.devices[0]
    for device in facts.devices:
        if wanted in (device.torch_name, device.kind):
            return device
    if wanted == "cpu:0":
        return facts.cpu
    raise InputError(
        f"device {asked!r} {_why_not(wanted, facts.devices)}; "
        f"give auto or one that this machine has: {_listed(facts.devices)}"
    )


def _why_not(wanted: str, devices: Sequence[DeviceFacts]) -> str:
    kind, colon, index = wanted.partition(":")
    same_kind = [device for device in devices if device.kind == kind]
    if same_kind and colon and index.isdigit():
        return f"is not there: this machine has {len(same_kind)} of {kind}, counted from 0"
    if kind in ("cuda", "mps", "xpu") and not same_kind:
        return "is not there: torch finds none"
    return "is not a device"


def _listed(devices: Sequence[DeviceFacts]) -> str:
    return ", ".join(f"{device.torch_name} ({device.name})" for device in devices)


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "system": _system(), **package_versions()}


@cache
def package_versions() -> Mapping[str, str]:
    """Versions of the packages whose code computes.

    Looked up once a process: it parses pages of text, and what is imported doesn't change."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # absent here means not installed, which is a fact too
    return versions


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]} {platform.machine()}"
    return f"{platform.system()} {platform.machine()}"


#: Importing torch from a cold disk takes long; beyond this it hangs.
_SECONDS = 120.0


@dataclass(frozen=True)
class MachineQuery:
    """The facts, and how the process that was asked for them `ended`.

    Where it ended badly these are the facts that are left without torch.
    """

    machine: MachineFacts
    ended: ProcessResult


def query_machine() -> MachineQuery:
    """Every fact of this machine; whatever torch does when it is asked, this returns."""
    ended = run_isolated(_as_plain, seconds=_SECONDS)
    return MachineQuery(from_jsonable(ended.value) if ended.is_well else without_torch(), ended)


def whole_machine() -> MachineFacts:
    """Every fact of this machine, with what torch loaded. Imports torch; may touch the cards."""
    machine = machine_facts()
    return replace(machine, software=with_loaded(software_facts()))


def without_torch() -> MachineFacts:
    """The facts that are left where torch can't be asked: the processor and the software."""
    return replace(machine_facts("cpu"), software=software_facts())


def _as_plain() -> Any:
    return to_jsonable(whole_machine())
