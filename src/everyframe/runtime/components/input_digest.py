"""Digest of the inputs of a stage: equal for equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def digest_of(value: object) -> str | None:
    """Hash of tensors, arrays and plain values in containers; None if it holds anything else."""
    hasher = hashlib.sha256()
    for each in _leaves(value):
        if each is _UNKNOWN:
            return None
        hasher.update(each)
    return hasher.hexdigest()


_UNKNOWN: Any = object()


def _leaves(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        flat = value.detach().to("cpu").contiguous()
        yield f"tensor {value.dtype} {tuple(value.shape)} {value.device}".encode()
        yield flat.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"array {value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield f"{type(value).__name__} {value!r};".encode()
    elif isinstance(value, (tuple, list)):
        yield f"{type(value).__name__} {len(value)}:".encode()
        for each in value:
            yield from _leaves(each)
    elif is_dataclass(value) and not isinstance(value, type):
        yield f"{type(value).__qualname__}:".encode()
        for part in fields(value):
            yield from _leaves(getattr(value, part.name))
    else:
        yield _UNKNOWN
