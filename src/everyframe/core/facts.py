"""Facts of a machine, as data: what planning, precision and the doctor decide by.

`everyframe.hardware.facts` reads them off the real machine. A made-up machine is the same type.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class OpShape:
    """A matrix product, convolution or attention of certain sizes: what a device is fast at or not.

    `kind` is ``product``, ``convolution`` or ``attention``; `shapes` are those of its operands,
    `told` a convolution's stride, padding and so on, as `torch.convolution` takes them; of an
    attention ``masked`` where it has a mask, and then the kernel that computes it, if chosen.
    """

    kind: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    told: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Throughput:
    """How fast a device is: `products` in operations a second by dtype, the rest in bytes a second.

    `memory` is what passing over tensors takes, `load` the way from a file into place, `mapping`
    what the system takes to hand out memory in large blocks, None where that is no matter; `launch`
    are the seconds that any operation takes at least. `source` says whether they were measured or
    are a maker's numbers; `measured` are the rates of products that were tried by themselves.
    """

    products: tuple[tuple[str, float], ...]
    memory: float
    load: float
    source: str
    launch: float = 1e-5
    measured: tuple[tuple[OpShape, float], ...] = ()
    mapping: float | None = None

    def product(self, dtype: str) -> float:
        """Multiplications and additions a second in that dtype; as slow as the slowest if unknown.

        A dtype that nobody measured is computed in another one, with casts.
        """
        known = dict(self.products)
        return known.get(dtype) or min(known.values())


#: Floating dtypes that a device computes in unless its facts say otherwise.
ALL_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class DeviceFacts:
    """One device that can compute. `memory` in bytes; `kind` is torch's device type.

    `dtypes` are the floating dtypes that exist on it, if only emulated; `max_array_bytes` is the
    largest tensor that its library can address, None where memory is the only limit. `rates` are
    those of a profile; a real device's are measured. `fp16_slowdown` is how many times as long a
    CPU's products take in float16 as in float32, None where nobody tried.
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
        """What `torch.device` takes, such as ``cpu`` or ``cuda:0``."""
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


@dataclass(frozen=True)
class SoftwareFacts:
    """What is around the devices: the system, packages, libraries as they are loaded, variables.

    `system` is ``linux``, ``wsl``, ``macos`` or ``windows``. `packages` are what pip lists, by
    canonical name; `libraries` what is really in the process, by name (``cublas``, ``cudnn``, …),
    which may be another copy; `copies` the libraries of which several are. `cuda` and `rocm` are
    those that torch was built for, `architectures` those that it has kernels for. `environment`
    holds the variables that matter, nothing secret.
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
        """The version of a library: the loaded one's, else that of the package that brings it."""
        if name in self.libraries:
            return self.libraries[name]
        package = self.package_of(name)
        return None if package is None else self.packages[package]

    def package_of(self, library: str) -> str | None:
        """The package that brings a library of NVIDIA's; None where pip lists none."""
        names = (f"nvidia-{library}", f"nvidia-{library}-cu12", f"nvidia-{library}-cu13")
        return next((each for each in names if each in self.packages), None)


@dataclass(frozen=True)
class MachineFacts:
    """A whole machine: its devices (the CPU is always the last), cores, versions and software.

    `software` is None where nobody asked for it: plans don't need it.
    """

    devices: tuple[DeviceFacts, ...]
    num_cores: int
    versions: dict[str, str] = field(default_factory=dict)
    software: SoftwareFacts | None = None

    @property
    def cpu(self) -> DeviceFacts:
        """The processor, which is always there."""
        return next(device for device in self.devices if device.kind == "cpu")

    def to_json(self) -> dict[str, Any]:
        """Plain data for a plan or a record."""
        return asdict(self)
