"""Write a safetensors file tensor by tensor: memory is that of one tensor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from everyframe.checkpoints.tensor_file import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor of a file, which `read` gives when it is its turn."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def write_safetensors(path: Path, tensors: Iterable[TensorToWrite]) -> None:
    """Write these tensors to a new file and sync it to disk.

    Raises:
        OSError: the file can't be written.
    """
    listed = list(tensors)
    header: dict[str, object] = {}
    end = 0
    for each in listed:
        begin, end = end, end + math.prod(each.shape) * each.dtype.itemsize
        header[each.name] = {
            "dtype": _NAMES[each.dtype], "shape": list(each.shape), "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for each in listed:
            tensor = each.read()
            assert (tensor.dtype, tuple(tensor.shape)) == (each.dtype, each.shape), each.name
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
