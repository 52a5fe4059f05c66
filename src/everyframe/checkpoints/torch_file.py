"""Locate the tensors in a ``torch.save`` file; nothing but tensors is unpickled.

The current format is an uncompressed zip. torch reads its pickle under fake tensors (no memory, no
code beyond ``weights_only=True``), which gives each tensor's position in the file; `read_entry`
reads from there. The format before torch 1.6 has no such positions and is read whole.
"""

from __future__ import annotations

import pickle
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from everyframe.checkpoints.folder import listing
from everyframe.checkpoints.read_progress import report_reading
from everyframe.core.errors import CannotRunError, CheckpointError


@dataclass(frozen=True)
class TensorLocation:
    """Location of one tensor: `num_bytes` from byte `offset` of `path`, little-endian.

    Attributes:
        stride: in elements; None for a contiguous tensor.
        resident: the tensor itself, for the old pickle format, which can only be read whole.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    stride: tuple[int, ...] | None = None
    resident: torch.Tensor | None = None


def read_entry(entry: TensorLocation, name: str) -> torch.Tensor:
    """Read the tensor at a location, into memory that it shares with no other.

    Raises:
        CheckpointError: the file cannot be read or ends too early; `name` is for the text.
    """
    if entry.resident is not None:
        return entry.resident.clone()
    if sys.byteorder != "little":
        raise CannotRunError("checkpoints are little-endian and this machine is not")
    raw = torch.empty(entry.num_bytes, dtype=torch.uint8)
    view = raw.numpy().data
    done = 0
    try:
        with report_reading(), entry.path.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            while done < entry.num_bytes:
                got = file.readinto(view[done:])
                if not got:
                    break
                done += got
    except OSError as error:
        raise CheckpointError(f"{entry.path} can't be read: {error.strerror or error}") from error
    if done < entry.num_bytes:
        raise CheckpointError(f"{entry.path} ended within tensor {name!r}; it is truncated")
    flat = raw.view(entry.dtype)
    if entry.stride is None:
        return flat.reshape(entry.shape)
    return flat.as_strided(entry.shape, entry.stride).contiguous()


_WRAPPERS = ("ema", "state_dict", "model", "module")


def pickle_entries(path: Path, payload: str | None = None) -> dict[str, TensorLocation]:
    """Name -> location of each tensor in a ``.pth``, ``.pt``, ``.bin`` or ``.ckpt``.

    Args:
        path: the file.
        payload: the wanted state dict, if the file holds several.

    Raises:
        CheckpointError: not a torch file, truncated, needs more than tensors, or several state
            dicts and none was named.
    """
    if zipfile.is_zipfile(path):
        _check_stored(path)
        state = _state_dict(path, _load(path, fake=True), payload)
        return {name: _place(path, name, tensor) for name, tensor in state.items()}
    state = _state_dict(path, _load(path, fake=False), payload)
    return {
        name: TensorLocation(
            path, tensor.dtype, tuple(tensor.shape), 0, tensor.nbytes, resident=tensor
        )
        for name, tensor in state.items()
    }


def _load(path: Path, *, fake: bool) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        if not fake:
            return torch.load(path, map_location="cpu", weights_only=True)
        with FakeTensorMode():
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: {_reason(error)}; a checkpoint may hold tensors only, "
            "ask its author for a safetensors file"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} can't be read as a torch file, it is truncated or foreign: {_line(error)}"
        ) from error


def _reason(error: pickle.UnpicklingError) -> str:
    """Core of torch's error text, without its advice to disable the check."""
    text = str(error)
    if "Unsupported global" in text or "GLOBAL" in text:
        after = text.partition("GLOBAL ")[2]
        name = after.split()[0].rstrip(",.") if after else ""
        return f"its pickle would run code ({name})" if name else "its pickle would run code"
    return "it is no torch file, or its pickle needs more than tensors"


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _check_stored(path: Path) -> None:
    """Raise for a compressed file, whose tensors have no positions; torch never compresses."""
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [i.filename for i in archive.infolist() if i.compress_type]
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path} is a broken zip archive: {error}") from error
    if packed:
        raise CheckpointError(f"{path} is a compressed zip, which torch.save never writes")


def _state_dict(path: Path, loaded: Any, payload: str | None) -> dict[str, torch.Tensor]:
    if payload is not None:
        if not isinstance(loaded, dict) or payload not in loaded:
            keys = listing([str(key) for key in loaded]) if isinstance(loaded, dict) else "no keys"
            raise CheckpointError(f"{path} has no {payload!r}; it holds {keys}")
        loaded = loaded[payload]
    if _is_state_dict(loaded):
        return dict(loaded)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, expected tensors by name")
    plausible = [key for key in _WRAPPERS if _is_state_dict(loaded.get(key))]
    if len(plausible) == 1:
        return dict(loaded[plausible[0]])
    if plausible:
        raise CheckpointError(
            f"{path} holds several state dicts: {', '.join(plausible)}; name the one that is meant"
        )
    foreign = [str(key) for key, value in loaded.items() if not _is_state_dict({key: value})]
    raise CheckpointError(
        f"{path} holds no state dict: looked for tensors by name, also under "
        f"{', '.join(_WRAPPERS)}; "
        + (f"not tensors by name are {listing(foreign)}" if foreign else "it is empty")
    )


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in value.items())
    )


def _place(path: Path, name: str, fake: torch.Tensor) -> TensorLocation:
    """Byte range of the tensor's own span of its storage in the file."""
    if fake.layout != torch.strided or fake.is_quantized:
        raise CheckpointError(f"{path}: tensor {name!r} is not a plain tensor ({fake.layout})")
    start = getattr(fake.untyped_storage(), "_checkpoint_offset", None)
    if start is None:
        raise CheckpointError(
            f"{path}: this torch ({torch.__version__}) does not say where {name!r} lies in the "
            "file; torch 2.11 or newer does"
        )
    shape, item = tuple(fake.shape), fake.element_size()
    offset = int(start) + int(fake.storage_offset()) * item
    if fake.is_contiguous():
        num_bytes, stride = fake.numel() * item, None
    else:
        stride = tuple(fake.stride())
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        num_bytes = (last + 1) * item
        if num_bytes < fake.numel() * item:
            raise CheckpointError(
                f"{path}: tensor {name!r} of shape {shape} shows {num_bytes:,} bytes over and over "
                f"(strides {stride}); save it contiguous"
            )
    if offset + num_bytes > path.stat().st_size:
        raise CheckpointError(f"{path} is truncated: it ends before tensor {name!r} does")
    return TensorLocation(path, fake.dtype, shape, offset, num_bytes, stride)
