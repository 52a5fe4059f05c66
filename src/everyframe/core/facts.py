"""Machine facts as data: devices, throughput and software, which planning and the doctor read.

`everyframe.hardware.facts` reads them from the real machine. A machine profile gives the same
types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class OpShape:
    """One operation of given sizes, whose speed depends on the device.

    Attributes:
        kind: ``product``, ``convolution`` or ``attention``.
        dtype: torch's name of the dtype.
        shapes: shapes of the operands.
        parameters: for a convolution its stride, padding and so on, as in `torch.convolution`;
            for an attention ``masked`` if it has a mask, then its kernel if one is chosen.
    """

    kind: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    parameters: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Throughput:
    """Throughput of a device: operations and bytes a second.

    Attributes:
        products: (dtype, operations a second) of matrix products.
        memory: bytes a second of a pass over tensors.
        load: bytes a second from a file into place.
        source: whether the rates were measured here or are a maker's numbers.
        launch: seconds that any operation takes at least.
        measured: (operation, operations a second) for operations that were timed individually.
        mapping: bytes a second at which the system hands out large blocks of memory; None where
            that has no cost.
        link: bytes a second to another device of the machine; None where it is unknown.
    """

    products: tuple[tuple[str, float], ...]
    memory: float
    load: float
    source: str
    launch: float = 1e-5
    measured: tuple[tuple[OpShape, float], ...] = ()
    mapping: float | None = None
    link: float | None = None

    def product(self, dtype: str) -> float:
        """Multiplications and additions a second in `dtype`; the slowest known rate if unknown.

        An unmeasured dtype is computed in another one, with casts.
        """
        known = dict(self.products)
        return known.get(dtype) or min(known.values())


#: Floating dtypes of a device unless its facts list others.
ALL_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class DeviceFacts:
    """One compute device.

    Attributes:
        kind: torch's device type.
        memory: bytes in all.
        free_memory: bytes that are free now for the tensors of a process.
        capability: CUDA compute capability.
        dtypes: floating dtypes that exist on it, emulated ones included.
        max_array_bytes: largest tensor that its library can address; None if memory is the limit.
        rates: throughput from a profile; that of a real device is measured.
        fp16_slowdown: how many times as long a CPU's products take in float16 as in float32; None
            if not measured.
    """

    name: str
    kind: str
    index: int | None
    memory: int
    free_memory: int
    capability: tuple[int, int] | None = None
    has_fast_bf16: bool = False
    has_fast_fp16: bool = False
    dtypes: tuple[str, ...] = ALL_DTYPES
    max_array_bytes: int | None = None
    rates: Throughput | None = None
    fp16_slowdown: float | None = None

    @property
    def torch_name(self) -> str:
        """Name for `torch.device`, such as ``cpu`` or ``cuda:0``."""
        return self.kind if self.index is None else f"{self.kind}:{self.index}"

    def kind_only(self) -> DeviceFacts:
        """The device without memory and speed, which change nothing that a dry run finds."""
        return replace(self, memory=0, free_memory=0, rates=None, index=None, fp16_slowdown=None)


@dataclass(frozen=True)
class SoftwareFacts:
    """Software around the devices: operating system, packages, loaded libraries, variables.

    Attributes:
        system: ``linux``, ``wsl``, ``macos`` or ``windows``.
        packages: versions that pip lists, by canonical name.
        libraries: versions of the libraries in the process, by name (``cublas``, ``cudnn``, ...);
            they may be other copies than the packages.
        copies: libraries that are present several times.
        cuda: version that torch was built for; `rocm` likewise.
        architectures: GPU architectures that torch has kernels for.
        environment: variables that can change a result; no secrets.
    """

    system: str
    system_version: str = ""
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)
    copies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cuda: str | None = None
    rocm: str | None = None
    driver: str | None = None
    architectures: tuple[str, ...] = ()
    cpu_flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def library(self, name: str) -> str | None:
        """Version of a library: the loaded one, or else that of the package that ships it."""
        if name in self.libraries:
            return self.libraries[name]
        package = self.package_of(name)
        return None if package is None else self.packages[package]

    def package_of(self, library: str) -> str | None:
        """Package that ships an NVIDIA library; None if pip lists none."""
        names = (f"nvidia-{library}", f"nvidia-{library}-cu12", f"nvidia-{library}-cu13")
        return next((each for each in names if each in self.packages), None)


@dataclass(frozen=True)
class MachineFacts:
    """One machine: devices (the CPU last), cores, versions and software.

    `software` is None if it was not queried: plans do not need it.
    """

    devices: tuple[DeviceFacts, ...]
    num_cores: int
    versions: dict[str, str] = field(default_factory=dict)
    software: SoftwareFacts | None = None

    @property
    def cpu(self) -> DeviceFacts:
        """The CPU, which every machine has."""
        return next(device for device in self.devices if device.kind == "cpu")

    def with_freed(
        self, freed: Mapping[str, int], least: Mapping[str, int] = MappingProxyType({})
    ) -> MachineFacts:
        """The machine once `freed` bytes more are free, and at least `least`, by device."""

        def of(device: DeviceFacts) -> DeviceFacts:
            free = device.free_memory + freed.get(device.torch_name, 0)
            free = max(free, least.get(device.torch_name, 0))
            return replace(device, free_memory=min(free, max(device.memory, device.free_memory)))

        return replace(self, devices=tuple(map(of, self.devices)))

    def to_json(self) -> dict[str, Any]:
        """Plain data for a plan or a record."""
        return asdict(self)
