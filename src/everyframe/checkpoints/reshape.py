"""Reshaped views of a file's tensors: split, transposed, or 1x1 kernels flattened to matrices.

Nothing is read or copied: a piece is another byte range of the same file, so a checkpoint with
another layout loads tensor by tensor like any other. `TensorReshape` says how tensors are split;
`key_map.KeyMap` renames the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from everyframe.core.errors import CheckpointError

if TYPE_CHECKING:  # plans read names of tensors before torch is there
    from everyframe.checkpoints.tensor_file import TensorFile
    from everyframe.checkpoints.torch_file import TensorLocation


@dataclass(frozen=True)
class TensorReshape:
    r"""Reshape of the tensors whose whole name matches `pattern`.

    Attributes:
        pattern: a regular expression for the name.
        names: name of each piece, in which ``\1`` is the pattern's first group; the first dimension
            is split evenly among them.
        transposed: a matrix becomes its transpose.
        is_kernel: a convolution kernel of one position becomes a matrix.
    """

    pattern: str
    names: tuple[str, ...]
    transposed: bool = False
    is_kernel: bool = False


def rearranged(checkpoint: TensorFile, cuts: Sequence[TensorReshape]) -> TensorFile:
    """Copy of `checkpoint` with every matching tensor replaced by its pieces.

    Raises:
        CheckpointError: a tensor that cannot be split so, named.
    """
    from everyframe.checkpoints.tensor_file import TensorFile  # brings torch

    entries: dict[str, TensorLocation] = {}
    for name in checkpoint:
        entry = checkpoint.entry(name)
        cut = next((cut for cut in cuts if re.fullmatch(cut.pattern, name)), None)
        if cut is None:
            entries[name] = entry
            continue
        for number, piece in enumerate(cut.names):
            made = _piece(checkpoint, name, entry, cut, number)
            entries[re.sub(cut.pattern, piece, name)] = made
    return TensorFile(checkpoint.source, entries)


def _piece(
    checkpoint: TensorFile, name: str, entry: TensorLocation, cut: TensorReshape, number: int
) -> TensorLocation:
    shape, parts = entry.shape, len(cut.names)
    if not shape or shape[0] % parts:
        _refuse(checkpoint, name, shape, f"{parts} equal pieces")
    if entry.resident is not None:
        raise CheckpointError(
            f"{checkpoint.source} is a pickle of the old kind, of which no part can be read alone; "
            "save it as safetensors"
        )
    stride = entry.stride or _contiguous(shape)
    rows = shape[0] // parts
    offset = entry.offset + number * rows * stride[0] * entry.dtype.itemsize
    shape = (rows, *shape[1:])
    if cut.is_kernel:
        if any(size != 1 for size in shape[2:]) or len(shape) < 2:
            _refuse(checkpoint, name, shape, "a kernel of one position")
        shape, stride = shape[:2], stride[:2]
    if cut.transposed:
        if len(shape) != 2:
            _refuse(checkpoint, name, shape, "a matrix")
        shape, stride = shape[::-1], stride[::-1]
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    plain = stride == _contiguous(shape)
    return replace(
        entry,
        shape=shape,
        offset=offset,
        num_bytes=(last + 1) * entry.dtype.itemsize,
        stride=None if plain else stride,
    )


def _refuse(checkpoint: TensorFile, name: str, shape: tuple[int, ...], wanted: str) -> None:
    raise CheckpointError(f"{checkpoint.source}: {name!r} has shape {shape}, expected {wanted}")


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return tuple(reversed(stride))
