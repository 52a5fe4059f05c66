"""Seeded noise that is independent of device, number of devices and batch.

Each draw has its own generator, seeded with a hash of (seed, label, step). No draw depends on an
earlier one, so a resumed run draws the same noise as an uninterrupted one. Numbers are drawn on the
CPU, one sample at a time, in float64 and then rounded to float32: PyTorch's float32 normals come
from vector code that differs in the last bits between kinds of CPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def start_noise(seed: int, shape: Sequence[int]) -> Tensor:
    """Initial noise of one sample: unit variance, float32, on the CPU.

    `shape` has no batch dimension: stack the noise of several seeds.
    """
    return _normal(generator(seed, "start"), shape)


def step_noise(seed: int, step: int, shape: Sequence[int]) -> Tensor:
    """Noise of one sample at step `step` (from 0), with the properties of `start_noise`."""
    return _normal(generator(seed, "step", step), shape)


def plain_noise(seed: int, shape: Sequence[int], draw: int = 0) -> Tensor:
    """Noise as diffusers pipelines draw it: float32, from a CPU generator with this very seed.

    `draw` counts earlier draws of the same shape. For small noise that must match such a pipeline.
    PyTorch's float32 normals may differ in the last bits between kinds of CPU; use `start_noise`
    for large noise.
    """
    source = torch.Generator(device="cpu")
    source.manual_seed(seed)
    for _ in range(draw):
        torch.randn(tuple(shape), generator=source, dtype=torch.float32, device="cpu")
    return torch.randn(tuple(shape), generator=source, dtype=torch.float32, device="cpu")


def generator(seed: int, label: str, step: int = 0) -> torch.Generator:
    """CPU generator for one purpose: blake2b of ``"seed/label/step"``, its first 8 bytes.

    The bytes form a big-endian number without its top bit.
    """
    made = torch.Generator(device="cpu")
    made.manual_seed(derived_seed(seed, label, step))
    return made


def derived_seed(seed: int, label: str, number: int = 0) -> int:
    """Seed derived for one purpose, such as each clip of a chain; see `generator`."""
    digest = hashlib.blake2b(f"{seed}/{label}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & (2**63 - 1)


def _normal(source: torch.Generator, shape: Sequence[int]) -> Tensor:
    numbers = torch.randn(tuple(shape), generator=source, dtype=torch.float64, device="cpu")
    return numbers.to(torch.float32)
