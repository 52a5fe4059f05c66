"""Read the facts of the real machine, and select the device of a request.

Facts are read, not benchmarked. torch is imported only if an accelerator may exist. The types are
in `everyframe.core.facts`, the sources in `cpu` and `accelerators`.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
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

#: Packages whose version changes results, in printing order.
_PACKAGES = ("torch", "diffusers", "transformers", "torchao")


Freed = Callable[[MachineFacts], MachineFacts]
"""The facts of this machine with memory that is taken now and will be free for a run."""


def machine_facts(device: str = "auto", freed: Freed | None = None) -> MachineFacts:
    """Facts of this machine: accelerators first, the CPU last; with what will be `freed`, if given.

    `device` is the requested device: with ``"cpu"`` accelerators are not queried and torch is not
    imported. Free memory is that of this moment, in bytes. With nvidia-smi present, no CUDA context
    is created.
    """
    versions = {"python": platform.python_version(), "system": _system(), **package_versions()}
    devices: tuple[DeviceFacts, ...] = ()
    if device != "cpu" and may_have_any(versions.get("torch", "")):
        devices = accelerator_facts()
        versions |= accelerator_versions()
    found = MachineFacts(
        devices=(*devices, processor_facts()),
        num_cores=num_usable_cores(),
        versions=versions,
    )
    return found if freed is None else freed(found)


def pick_device(facts: MachineFacts, asked: str = "auto") -> DeviceFacts:
    """Device that `asked` names: ``auto`` is the first one, ``cuda`` the first of its kind.

    Raises:
        InputError: this machine has no such device; the text lists its devices.
    """
    wanted = asked.strip().casefold()
    if wanted == "auto":
        return facts.devices[0]
    for device in facts.devices:
        # torch numbers a lone device too: tensors of an Apple GPU are on mps:0.
        numbered = f"{device.kind}:{device.index or 0}"
        if wanted in (device.kind, numbered):
            return device
    raise InputError(
        f"device {asked!r} {_why_not(wanted, facts.devices)}; "
        f"give auto or one that this machine has: {_join_devices(facts.devices)}"
    )


def device_names(listed: str) -> list[str]:
    """Names of a list of devices, such as ``0,1`` or ``cuda:0,cpu``; a number is one of CUDA's."""
    names = [name.strip() for name in listed.split(",")]
    return [f"cuda:{name}" if name.isdigit() else name for name in names]


def _why_not(wanted: str, devices: Sequence[DeviceFacts]) -> str:
    kind, colon, index = wanted.partition(":")
    same_kind = [device for device in devices if device.kind == kind]
    if same_kind and colon and index.isdigit():
        return f"is not there: this machine has {len(same_kind)} of {kind}, counted from 0"
    if kind in ("cuda", "mps") and not same_kind:
        return "is not there: torch finds none"
    if kind == "xpu":
        return "is an Intel GPU, and those aren't supported yet"
    return "is not a device"


def _join_devices(devices: Sequence[DeviceFacts]) -> str:
    return ", ".join(f"{device.torch_name} ({device.name})" for device in devices)


@cache
def package_versions() -> Mapping[str, str]:
    """Versions of the installed packages that compute.

    Read once a process: it parses long texts, and imported packages do not change.
    """
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


#: Time limit in seconds: importing torch from a cold disk is slow; beyond this it hangs.
_SECONDS = 120.0


@dataclass(frozen=True)
class MachineQuery:
    """Machine facts, and how the process that queried them `ended`.

    If it failed, the facts are those that need no torch.
    """

    machine: MachineFacts
    ended: ProcessResult


def query_machine() -> MachineQuery:
    """Facts of this machine, read in a separate process; returns even if torch crashes or hangs."""
    ended = run_isolated(_as_plain, seconds=_SECONDS)
    return MachineQuery(from_jsonable(ended.value) if ended.is_well else without_torch(), ended)


def whole_machine() -> MachineFacts:
    """Machine facts including libraries that torch loads. Imports torch; may touch the GPUs."""
    machine = machine_facts()
    return replace(machine, software=with_loaded(software_facts()))


def without_torch() -> MachineFacts:
    """Facts that need no torch: CPU and software."""
    return replace(machine_facts("cpu"), software=software_facts())


def _as_plain() -> Any:
    return to_jsonable(whole_machine())
