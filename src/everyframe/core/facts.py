"""Facts of a machine, as data: what planning, precision and the doctor decide by.

`everyframe.hardware.facts` reads them off the real machine. A made-up machine is the same type.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class DeviceFacts:
    """One device that can compute. `memory` in bytes; `kind` is torch's device type."""

    name: str
    kind: str
    index: int | None
    memory: int
    free_memory: int
    capability: tuple[int, int] | None = None
    has_fast_bf16: bool = False
    has_fast_fp16: bool = False

    @property
    def torch_name(self) -> str:
        """What `torch.device` takes, such as ``cpu`` or ``cuda:0``."""
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


@dataclass(frozen=True)
class MachineFacts:
    """A whole machine: its devices (the CPU is always the last), cores and versions."""

    devices: tuple[DeviceFacts, ...]
    num_cores: int
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def cpu(self) -> DeviceFacts:
        """The processor, which is always there."""
        return next(device for device in self.devices if device.kind == "cpu")

    def to_json(self) -> dict[str, Any]:
        """Plain data for a plan or a record."""
        return asdict(self)
