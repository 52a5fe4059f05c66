"""Noise that depends on the seed alone: the same whatever the device, their number or the batch.

Every draw has a generator of its own, seeded with a hash of (seed, label, step), so nothing depends
on what was drawn before it: a resumed run draws what the unbroken one would have drawn. Numbers are
drawn on the CPU, one sample at a time, in float64 and then rounded to float32: PyTorch's float32
normals come from vector code that differs in the last bits between kinds of CPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def start_noise(seed: int, shape: Sequence[int]) -> Tensor:
    """What one sample begins with: unit variance, float32, on the CPU.

    `shape` is one sample's, without the batch: stack those of several seeds.
    """
    return _normal(generator(seed, "start"), shape)


def step_noise(seed: int, step: int, shape: Sequence[int]) -> Tensor:
    """What one sample is given at step `step` (counted from 0), as `start_noise` gives it."""
    return _normal(generator(seed, "step", step), shape)


def plain_noise(seed: int, shape: Sequence[int], draw: int = 0) -> Tensor:
    """What a CPU generator of that very seed draws, float32: what a diffusers pipeline draws.

    The first time, or after `draw` times of the same shape. For small noise that has to be
    comparable with such a pipeline. PyTorch's float32 normals may differ in the last bits between
    kinds of CPU; whatever is large is drawn by `start_noise`.
    """
    source = torch.Generator(device="cpu")
    source.manual_seed(seed)
    for _ in range(draw):
        torch.randn(tuple(shape), generator=source, dtype=torch.float32, device="cpu")
    return torch.randn(tuple(shape), generator=source, dtype=torch.float32, device="cpu")


def generator(seed: int, label: str, step: int = 0) -> torch.Generator:
    """A CPU generator for one purpose: blake2b of ``"seed/label/step"``, its first 8 bytes.

    Bytes are read as a big-endian number, and the top bit is dropped.
    """
    made = torch.Generator(device="cpu")
    made.manual_seed(derived_seed(seed, label, step))
    return made


def derived_seed(seed: int, label: str, number: int = 0) -> int:
    """Another seed for a purpose of its own, such as each clip of a chain; see `generator`."""
    digest = hashlib.blake2b(f"{seed}/{label}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & (2**63 - 1)


def _normal(source: torch.Generator, shape: Sequence[int]) -> Tensor:
    numbers = torch.randn(tuple(shape), generator=source, dtype=torch.float64, device="cpu")
    return numbers.to(torch.float32)
