"""Cache of the repairs that earlier runs needed, by weights and device, in the cache folder.

What overflowed once will overflow again, so the next plan has the repair from the start. Weights
are identified by digest, a device by its name and the versions of its libraries; when any of them
changes, the cache has no entry and the guard finds the repairs again. An unreadable file counts as
empty.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everyframe.checkpoints.folder import cache_folder
from everyframe.core.facts import DeviceFacts
from everyframe.core.paths import replace_file
from everyframe.core.plan import ComponentPlan, Repair
from everyframe.runtime.components.patchable import known_digest_with_loras
from everyframe.runtime.interface import ModelSpec

_log = logging.getLogger(__name__)
_SCHEMA = "everyframe.repairs/1"
#: Versions that do not affect what overflows.
_NO_MATTER = ("python", "system")


@dataclass(frozen=True)
class RepairCacheKey:
    """Digest of the weights, and of the device with its libraries."""

    model: str
    device: str

    @property
    def _file(self) -> Path:
        return cache_folder() / "repairs" / self.device / f"{self.model[:32]}.json"


def key_of(sha256: str, device: DeviceFacts, versions: Mapping[str, str]) -> RepairCacheKey:
    """Key of weights with that digest on that device with these library versions."""
    libraries = {name: text for name, text in versions.items() if name not in _NO_MATTER}
    identity = [
        device.name,
        device.kind,
        device.capability,
        device.dtypes,
        sorted(libraries.items()),
    ]
    return RepairCacheKey(sha256, hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20])


def cached_key(
    model: ModelSpec, device: DeviceFacts, versions: Mapping[str, str]
) -> RepairCacheKey | None:
    """The key, if an earlier run has hashed these files; hashes nothing itself.

    Also None if there are no repairs for this device at all: then no file is opened, which would
    import torch.
    """
    if not key_of("", device, versions)._file.parent.is_dir():
        return None
    weights = known_digest_with_loras(model)
    return None if weights is None else key_of(weights, device, versions)


def load_repairs(key: RepairCacheKey) -> tuple[Repair, ...]:
    """Repairs of earlier runs, in the order in which they are applied."""
    path = key._file
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        listed = whole["repairs"] if whole["schema"] == _SCHEMA else ()
        return tuple(repair_from(each) for each in listed)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        _log.warning("%s can't be read, so no repairs are remembered: %s", path, error)
        return ()


def save_repair(key: RepairCacheKey, repair: Repair) -> None:
    """Save one more repair, and drop those that it covers."""
    others = [each for each in load_repairs(key) if not _holds(repair, each)]
    whole = {"schema": _SCHEMA, "repairs": [asdict(each) for each in (*others, repair)]}
    path = key._file
    try:
        replace_file(path, json.dumps(whole, indent=1))
    except OSError as error:
        _log.warning("a repair is not remembered, %s: %s", path.parent, error)


def delete_repairs(key: RepairCacheKey) -> int:
    """Delete the saved repairs and return how many there were."""
    count = len(load_repairs(key))
    key._file.unlink(missing_ok=True)
    return count


def repair_from(data: Any) -> Repair:
    """Build a repair from plain data, as records and the cache store it.

    Raises:
        TypeError: the data is not a repair.
    """
    if not isinstance(data, Mapping) or not all(isinstance(text, str) for text in data.values()):
        raise TypeError(f"not a repair: {data}")
    return Repair(**data)


def repairs_for(component: str, dtype: str, repairs: Iterable[Repair]) -> tuple[Repair, ...]:
    """The repairs for this component in that dtype."""
    return tuple(each for each in repairs if (each.component, each.dtype) == (component, dtype))


def repair_notes(component: ComponentPlan) -> Sequence[str]:
    """The plan's notes on its repairs, one line each."""
    return [
        f"{repair.place} runs in {repair.to}: in {repair.dtype} an earlier run of this model was "
        "wrong here (--forget-repairs begins without)"
        for repair in component.repairs
    ]


def _holds(outer: Repair, inner: Repair) -> bool:
    """Whether `outer` covers `inner`."""
    same = (outer.component, outer.to, outer.dtype) == (inner.component, inner.to, inner.dtype)
    around = not outer.module or f"{inner.module}.".startswith(f"{outer.module}.")
    return same and around
