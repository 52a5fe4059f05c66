"""Active probes: small computations of a run, each compared with a known result.

A probe is a function of a device name (``cuda:0``) that returns an `outcome`. It runs in its own
process with a time limit, because the worst finding is a crash. It reports wrong values and notes
itself; crashes and hangs are detected from outside.

Read next: `arithmetic`, `layers`, `system`, `collectives`, and `everyframe.hardware.isolation`,
which runs them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Probe:
    """A probe.

    Attributes:
        name: its name.
        title: one line for people.
        place: where its function is.
        seconds: time limit.
        advice: what to do if it fails.
        needs_several: run once for all accelerators, and only with two or more.
        is_optional: a failure is only a note; no run needs it.
        again_with: environment variables with which a failed probe is repeated once.
    """

    name: str
    title: str
    place: str
    seconds: float
    advice: str
    needs_several: bool = False
    is_optional: bool = False
    again_with: Mapping[str, str] = field(default_factory=dict)


_HERE = "everyframe.doctor.probes"

PROBES = (
    Probe(
        "products", "matrix products against float64", f"{_HERE}.arithmetic:products", 60,
        "do not use the dtype that is named: everyframe generate … --dtype fp32",
    ),
    Probe(
        "linear", "linear layers of the sizes that killed others", f"{_HERE}.arithmetic:linear", 60,
        'pip install -U torch (on NVIDIA cards also: pip install "nvidia-cublas-cu12>=12.5.2.13")',
    ),
    Probe(
        "attention", "attention with large keys", f"{_HERE}.arithmetic:large_keys", 60,
        "compute in float32 here: everyframe generate … --dtype fp32",
    ),
    Probe(
        "strides", "attention of permuted, masked and long rows", f"{_HERE}.arithmetic:strides", 60,
        "pip install -U torch, or compute on the CPU: everyframe generate … --device cpu",
    ),
    Probe(
        "timestep", "embedding of timesteps", f"{_HERE}.arithmetic:timestep", 30,
        "compute on the CPU: everyframe generate … --device cpu",
    ),
    Probe(
        "layers", "layers of every dtype", f"{_HERE}.layers:layers", 60,
        "do not use the dtype that is named: everyframe generate … --dtype fp32",
    ),
    Probe(
        "convolution", "3D convolution, its value and memory", f"{_HERE}.layers:convolution", 90,
        "decode in float32: everyframe generate … --dtype fp32",
    ),
    Probe(
        "upsampling", "upsampling in autoencoders", f"{_HERE}.layers:upsampling", 30,
        "decode in float32: everyframe generate … --dtype fp32",
    ),
    Probe(
        "bf16", "whether bf16 is emulated, by timing", f"{_HERE}.system:bf16", 60,
        "compute in float32: everyframe generate … --dtype fp32", is_optional=True,
    ),
    Probe(
        "extensions", "attention packages that are installed", f"{_HERE}.system:extensions", 60,
        "pip uninstall the package that is named; torch's own attention is used then",
    ),
    Probe(
        "compile", "compiling a small kernel", f"{_HERE}.system:compile_kernel", 120,
        "no run needs it; to have it, install a C++ compiler (apt install g++) or update torch",
        is_optional=True,
    ),
    Probe(
        "collectives", "all-reduce and uneven all-to-all", f"{_HERE}.collectives:collectives", 90,
        "look at the cards' connection: nvidia-smi topo -m", needs_several=True,
        again_with={"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
    ),
)  # fmt: skip


def call(place: str, device: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Call the probe at that place with these environment variables added.

    It imports torch and changes the environment, so use a separate process.
    """
    os.environ.update(environment or {})
    module, _, name = place.partition(":")
    found: dict[str, Any] = getattr(import_module(module), name)(device)
    return found


def outcome(
    wrong: list[str] | None = None,
    notes: list[str] | None = None,
    skipped: str | None = None,
    **measured: Any,
) -> dict[str, Any]:
    """Result of a probe: sentences on what is wrong, notes, and measured numbers."""
    return {
        "wrong": wrong or [],
        "notes": notes or [],
        "skipped": skipped,
        "measured": measured,
    }
