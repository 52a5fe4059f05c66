"""What a certificate is good for: keys of a device with its libraries, and of a model at its sizes.

A key is a digest. When anything that it is made of changes, so does the key, and a certificate that
was made before is not found any more. Read next: `store`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Hashable, Iterable
from functools import lru_cache
from importlib import metadata
from typing import Any

from everyframe import __version__
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision
from everyframe.hardware.facts import package_versions
from everyframe.hardware.loaded import loaded_versions
from everyframe.hardware.processor import processor_flags
from everyframe.hardware.software import driver_version


def device_key(device: DeviceFacts, num_threads: int) -> str:
    """The key of this device as it is now: driver, packages, and the libraries really loaded."""
    return digest(device_facts(device, num_threads))


def device_facts(device: DeviceFacts, num_threads: int) -> dict[str, Any]:
    """What a device's key is made of. Imports torch for any other than a CPU."""
    facts: dict[str, Any] = {
        "everyframe": __version__,
        "name": device.name,
        "kind": device.kind,
        "capability": device.capability,
        # Blocks of most models are diffusers' and transformers' code.
        "packages": dict(package_versions()),
        "torch": _torch_version(),
    }
    if device.kind == "cpu":
        own = {"threads": num_threads, "flags": sorted(processor_flags())}
        return {**facts, **own, "capability": _torch_capability()}
    return {**facts, "driver": _driver(), "libraries": _libraries()}


def plan_key(component: str, precision: Precision, calls: Iterable[Hashable]) -> str:
    """The key of a component: its config and sizes, as `calls` tell them, and its precision."""
    told = sorted(repr(call) for call in calls)
    islands = [precision.parameters, precision.compute, *precision.islands]
    islands += [precision.weights] if precision.weights else []
    return digest([component, islands, told])


def digest(value: Any) -> str:
    """Twenty letters that stand for plain data."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@lru_cache(maxsize=1)
def _torch_version() -> str:
    try:
        return metadata.version("torch")  # a plan may need nothing else of torch
    except metadata.PackageNotFoundError:
        import torch

        return str(torch.__version__)


def _torch_capability() -> str:
    """What holds torch's own kernels to older instructions than the processor's; empty: nothing."""
    return os.environ.get("ATEN_CPU_CAPABILITY", "")


@lru_cache(maxsize=1)
def _driver() -> str | None:
    return driver_version()


@lru_cache(maxsize=1)
def _libraries() -> dict[str, str]:
    return loaded_versions()
