"""Certificates: the verdict on one fast path for one component on one device, and their store.

`certify` makes them. They are saved as JSON in the cache folder, one file per device and plan key.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from everyframe._version import __version__
from everyframe.checkpoints.folder import cache_folder, warn_unusable_cache
from everyframe.core.facts import DeviceFacts
from everyframe.core.field_types import mistyped
from everyframe.core.paths import replace_file
from everyframe.core.plan import Precision
from everyframe.hardware.cpu import processor_flags
from everyframe.hardware.facts import package_versions
from everyframe.hardware.software import driver_version, loaded_versions
from everyframe.ops.native.library import sources_digest

Verdict = Literal["certified", "refused"]

#: A smaller speedup can't be distinguished from noise in the few rounds of a trial.
LEAST_GAIN = 1.03


@dataclass(frozen=True)
class Certificate:
    """One verdict.

    `error`, `limit` and `gain` are None if the trial did not get that far.

    Attributes:
        what: name of the fast path.
        component: name of the component.
        device: key of the device (`device_key`); changes with driver and libraries.
        plan: key of the component (`plan_key`); changes with model, sizes and precision.
        verdict: certified or refused.
        reason: why.
        error: norm of the difference to float32 over float32's norm; for an exact path, to plain
            torch.
        limit: largest allowed error.
        gain: time of plain torch over time of the path.
        date: ISO date.
        packages: files of compiled code that it is about, in the certificates' folder.
    """

    what: str
    component: str
    device: str
    plan: str
    verdict: Verdict
    reason: str
    error: float | None
    limit: float | None
    gain: float | None
    date: str
    packages: tuple[str, ...] = ()


def judge(error: float, limit: float, gain: float) -> tuple[Verdict, str]:
    """Verdict on a completed trial, with the reason. NaN is always refused."""
    if not error <= limit:
        message = "is not finite" if not math.isfinite(error) else f"is off by {error:.1e}"
        allowed = f"allowed {limit:.1e} of float32" if limit else "and may not differ in a bit"
        return "refused", f"{message}, {allowed}"
    if not gain >= LEAST_GAIN:
        return "refused", "no faster than the plain way"
    return "certified", "right, and faster"


def from_json(value: Any) -> Certificate | None:
    """Certificate from plain data, or None if it is not one."""
    try:
        found = Certificate(**{**value, "packages": tuple(value.get("packages", ()))})
    except TypeError:  # no mapping, or one with other fields
        return None
    return None if any(mistyped(found)) else found


#: Form of the trials: verdicts of an earlier one are made again.
_TRIALS = 3


def device_key(device: DeviceFacts, num_threads: int) -> str:
    """Key of this device: driver, packages, and the libraries really loaded."""
    return digest(device_facts(device, num_threads))


def device_facts(device: DeviceFacts, num_threads: int) -> dict[str, Any]:
    """Facts that form a device's key. Imports torch for any device but a CPU."""
    facts: dict[str, Any] = {
        "everyframe": __version__,
        "trials": _TRIALS,
        "name": device.name,
        "kind": device.kind,
        "capability": device.capability,
        # Blocks of most models are diffusers' and transformers' code.
        "packages": dict(package_versions()),
        "torch": _torch_version(),
    }
    if device.kind == "cpu":
        own = {
            "threads": num_threads,
            "flags": sorted(processor_flags()),
            "kernels": sources_digest(),
        }
        return {**facts, **own, "capability": _torch_capability()}
    return {**facts, "driver": _driver(), "libraries": _libraries()}


def plan_key(component: str, precision: Precision, calls: Iterable[Hashable]) -> str:
    """Key of a component: its config and sizes, as in `calls`, and its precision."""
    inputs = sorted(repr(call) for call in calls)
    islands = [precision.parameters, precision.compute, *precision.islands]
    islands += [precision.weight_dtype] if precision.weight_dtype else []
    return digest([component, islands, inputs])


def digest(value: Any) -> str:
    """Hash of plain data, 20 hexadecimal digits."""
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
    """Value of the variable that limits torch's CPU kernels to older instructions, or empty."""
    return os.environ.get("ATEN_CPU_CAPABILITY", "")


@lru_cache(maxsize=1)
def _driver() -> str | None:
    return driver_version()


@lru_cache(maxsize=1)
def _libraries() -> dict[str, str]:
    return loaded_versions()


_log = logging.getLogger(__name__)

_SCHEMA = "everyframe.certificates/1"

#: Certificates that could not be written, for this process.
_UNWRITTEN: dict[Path, dict[str, Certificate]] = {}


def folder() -> Path:
    """Folder of all certificates."""
    return cache_folder() / "certificates"


def find(device: str, plan: str) -> dict[str, Certificate]:
    """Certificates of this device and plan, by path name; not those whose code is gone."""
    path = _file(device, plan)
    found = {**_read(path), **_UNWRITTEN.get(path, {})}
    # A file that was copied from another device or plan names that one, and is ignored.
    return {
        name: each
        for name, each in found.items()
        if (each.device, each.plan) == (device, plan)
        and all((folder() / file).is_file() for file in each.packages)
    }


def keep(certificates: Iterable[Certificate]) -> None:
    """Save certificates, replacing older ones of the same name."""
    by_file: dict[Path, list[Certificate]] = {}
    for each in certificates:
        by_file.setdefault(_file(each.device, each.plan), []).append(each)
    for path, new in by_file.items():
        kept = {**_read(path), **{each.what: each for each in new}}
        try:
            _write(path, kept)
        except OSError as error:
            warn_unusable_cache(error)
            _UNWRITTEN.setdefault(path, {}).update(kept)


def _file(device: str, plan: str) -> Path:
    return folder() / device / f"{plan}.json"


def _read(path: Path) -> dict[str, Certificate]:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        warn_unusable_cache(error)
        return {}
    except UnicodeDecodeError as error:
        _log.warning("certificates in %s can't be read (%s); they are made again", path, error)
        return {}
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    if not isinstance(whole, dict) or whole.get("schema") != _SCHEMA:
        _log.warning("%s is damaged; its certificates are made again", path)
        return {}
    listed = whole.get("certificates")
    found = [from_json(each) for each in listed] if isinstance(listed, list) else []
    return {each.what: each for each in found if each is not None}


def _write(path: Path, certificates: dict[str, Certificate]) -> None:
    whole = {"schema": _SCHEMA, "certificates": [asdict(each) for each in certificates.values()]}
    replace_file(path, json.dumps(whole, indent=1))
