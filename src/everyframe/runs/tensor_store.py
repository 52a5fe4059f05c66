"""Content-addressed tensor files of a run: each file is named by the hash of its content.

Files never change. Saving equal content twice writes once, and a new state does not touch the files
of the old one until it is complete. Corruption is detected on read. `sweep` deletes unreferenced
files. `everyframe.core.serialization` handles everything that is not bulky.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from everyframe.core.errors import CorruptRunError
from everyframe.core.paths import replace_file
from everyframe.media.picture_bytes import decode_picture, encode_picture
from everyframe.runs.checksummed_json import checksum

_ENDING = ".safetensors"
#: Name of the only tensor in a file.
_NAME = "value"
#: Gaps in a tensor's memory are saved too, up to this many times its size.
_MOST_GAPS = 4
#: Maximum elements of a tensor with repeated memory, such as an expanded one; 128 MiB in float32.
_MOST_REPEATED = 1 << 25


class TensorStore:
    """Tensor files in one folder, which is created on the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, value: Any) -> dict[str, Any] | None:
        """Save a tensor, array or image and return its reference; None for anything else."""
        if isinstance(value, Tensor):
            flat, layout = flatten(value)
            return {"as": "tensor", "hash": self._write(flat), **layout}
        if isinstance(value, np.generic):
            return {"as": "number", "dtype": value.dtype.name, "value": value.item()}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            # Tensors take no negative strides and no foreign byte order, and torch warns of
            # read-only arrays.
            plain = np.require(value, value.dtype.newbyteorder("="), ["C", "W"])
            return {"as": "array", "hash": self._write(torch.from_numpy(plain))}
        if isinstance(value, Image.Image):
            data = np.frombuffer(encode_picture(value), np.uint8).copy()
            return {"as": "picture", "hash": self._write(torch.from_numpy(data))}
        return None

    def fetch(self, saved: Mapping[str, Any]) -> Any:
        """Load what `keep` saved, to its original device.

        Raises:
            CorruptRunError: the file is missing or changed.
        """
        kind = saved["as"]
        if kind == "number":
            return _number(saved)
        tensor = self._read(str(saved["hash"]))
        if kind == "tensor":
            return laid_out(tensor, saved)
        if kind == "array":
            return tensor.numpy()
        if kind == "picture":
            return decode_picture(tensor.numpy().tobytes())
        raise CorruptRunError(f"a saved value is of the unknown kind {kind!r}")

    def sweep(self, used: Collection[str]) -> None:
        """Delete all files except those with these hashes."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name.removesuffix(_ENDING) not in used:
                path.unlink(missing_ok=True)

    def _write(self, tensor: Tensor) -> str:
        data = save_tensors({_NAME: tensor})
        name = checksum(data)
        path = self.folder / (name + _ENDING)
        if not path.exists():
            self.folder.mkdir(exist_ok=True)
            replace_file(path, data, is_durable=True)
        return name

    def _read(self, name: str) -> Tensor:
        path = self.folder / (Path(name).name + _ENDING)
        try:
            data = path.read_bytes()
            if checksum(data) != name:
                raise CorruptRunError(f"{path} is not as it was written")
            return load_tensors(data)[_NAME]
        except (OSError, SafetensorError, KeyError) as error:
            raise CorruptRunError(f"{path} can't be read: {error}") from error


def _number(saved: Mapping[str, Any]) -> np.generic:
    dtype = np.dtype(saved["dtype"])
    if dtype.kind not in "biufU":  # numpy.void(10**9) is as many bytes
        raise CorruptRunError(f"a saved number has the dtype {dtype.name}, which holds no numbers")
    number: np.generic = dtype.type(saved["value"])
    return number


def flatten(tensor: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The values of a tensor in memory order, on the CPU, and its memory layout.

    Layout is state: a convolution of equal numbers in another layout has other last bits.
    """
    tensor = tensor.detach()
    layout: dict[str, Any] = {}
    if tensor.device.type != "cpu":
        layout["device"] = str(tensor.device)
    if not tensor.is_contiguous() and tensor.numel():
        size, strides = list(tensor.shape), list(tensor.stride())
        span = 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
        if span <= _MOST_GAPS * tensor.numel():
            layout |= {"size": size, "strides": strides}
            tensor = tensor.as_strided((span,), (1,))
    return tensor.to("cpu", copy=True).contiguous(), layout


def laid_out(flat: Tensor, layout: Mapping[str, Any]) -> Tensor:
    """Restore the tensor that `flatten` was given.

    Raises:
        CorruptRunError: a small file would become a large tensor, which shows its values often.
    """
    tensor = flat.to(layout.get("device", "cpu"))
    if "size" not in layout:
        return tensor
    if math.prod(layout["size"]) > max(_MOST_REPEATED, tensor.numel()):
        raise CorruptRunError(
            f"a saved tensor of {tensor.numel():,} values has the size {layout['size']}"
        )
    return tensor.as_strided(layout["size"], layout["strides"])


def hashes_in(plain: Any) -> set[str]:
    """The hashes of all files referenced in plain data."""
    if isinstance(plain, list):
        return {name for each in plain for name in hashes_in(each)}
    if isinstance(plain, dict):
        own = {plain["hash"]} if "as" in plain and isinstance(plain.get("hash"), str) else set()
        return own | {name for each in plain.values() for name in hashes_in(each)}
    return set()
