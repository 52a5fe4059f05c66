"""ComfyUI's 8-bit weights with scales, dequantized as they are read.

There are two formats. In the older one, ``scaled_fp8`` marks a file whose layers have
``scale_weight``. In the newer one they have ``weight_scale``, and their format is in
``comfy_quant`` (JSON as bytes) or in the header's ``_quantization_metadata``. Product and result
are float32. Scales of inputs, which only 8-bit products need, are ignored. Source: ComfyUI,
`comfy/quant_ops.py` and `comfy/utils.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from everyframe.checkpoints.folder import listing
from everyframe.checkpoints.safetensors_header import read_header
from everyframe.checkpoints.tensor_file import TensorFile
from everyframe.core.errors import CheckpointError
from everyframe.core.options import shown

_METADATA = "_quantization_metadata"
_MARKER, _FORMAT = "scaled_fp8", "comfy_quant"
_SCALES = ("scale_weight", "weight_scale")
#: Tensors beside a scaled weight that only eight-bit products need.
_OF_INPUTS = ("scale_input", "input_scale")
#: ComfyUI's formats that are a weight in that dtype times its scale.
_FORMATS = {
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
    "int8_tensorwise": torch.int8,
}  # fmt: skip
#: Stored dtype of our kinds of eight bits.
_KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_EIGHT_BITS = {torch.float8_e4m3fn, torch.float8_e5m2}
#: Elements that are widened at once.
_AT_ONCE = 1 << 20
#: Longest description of a format, in bytes.
_MOST_BYTES = 1 << 16


class ScaledFile(TensorFile):
    """The tensors of `base` without their scales; scaled weights are read as float32."""

    def __init__(self, base: TensorFile, scales: Mapping[str, str], left: Sequence[str]) -> None:
        super().__init__(base.source, {name: base.entry(name) for name in base if name not in left})
        self._base, self._scales = base, scales

    def dtype(self, name: str) -> torch.dtype:
        """Dtype as it is read."""
        return torch.float32 if name in self._scales else self._base.dtype(name)

    def load(
        self,
        name: str,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See `TensorFile.load`."""
        if name not in self._scales:
            return self._base.load(name, device, dtype)
        shape = self.shape(name)
        values = torch.empty(shape, dtype=dtype or torch.float32)
        # In pieces: the tensor is in memory once, in the dtype that it gets.
        step = max(1, _AT_ONCE // max(1, math.prod(shape[1:])))
        for first in range(0, shape[0], step):
            end = min(first + step, shape[0])
            values[first:end] = self.load_rows(name, [(first, end)])
        return values.to(device)

    def quantized(self, name: str, kind: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `TensorFile.quantized`."""
        if name not in self._scales or self._base.dtype(name) != _KINDS.get(kind):
            return None
        codes, scale = self._base.load(name), self._scale(name)
        return codes.view(torch.int8), scale.view(-1, 1).expand(len(codes), 1).contiguous()

    def load_rows(self, name: str, rows: Sequence[tuple[int, int]]) -> torch.Tensor:
        """See `TensorFile.load_rows`."""
        values = self._base.load_rows(name, rows)
        if name not in self._scales:
            return values
        scale = self._scale(name)
        if scale.ndim:
            scale = torch.cat([scale[first:end] for first, end in rows])
        return values.to(torch.float32).mul_(scale)

    def _scale(self, name: str) -> torch.Tensor:
        """Scale of a weight: one number, or one a row."""
        scale = self._base.load(self._scales[name], dtype=torch.float32)
        if not torch.isfinite(scale).all():
            raise CheckpointError(
                f"{self.source}: {self._scales[name]!r} holds values that are not finite"
            )
        shape = self.shape(name)
        return scale.reshape(()) if scale.numel() == 1 else scale.view(-1, *[1] * (len(shape) - 1))


def with_scales(base: TensorFile) -> tuple[TensorFile, tuple[str, ...]]:
    """The file with its scaled weights widened, and notes on how it is stored.

    Raises:
        CheckpointError: a format that is not read, a scale without its weight, or of another shape.
    """
    formats = dict(_formats(base))
    scales: dict[str, str] = {}
    left: list[str] = []
    for name in base:
        stem, _, own = name.rpartition(".")
        if own in _SCALES:
            _check_scale(base, name, f"{stem}.weight")
            if f"{stem}.weight" in scales:
                raise CheckpointError(f"{base.source}: {stem!r} has two scales of its weight")
            scales[f"{stem}.weight"] = name
        if own in (*_SCALES, _FORMAT, _MARKER) or (own in _OF_INPUTS and f"{stem}.weight" in base):
            left.append(name)
    for layer, kind in formats.items():
        _check_format(base, layer, kind, scales)
    lone = [
        name for name in base if base.dtype(name) in _EIGHT_BITS and name not in {*scales, *left}
    ]
    bare = [
        name for name in base if base.dtype(name) == torch.int8 and name not in {*scales, *left}
    ]
    if bare:
        raise CheckpointError(
            f"{base.source}: {listing(bare)} in int8 without a scale, which says nothing of values"
        )
    marked = any(name.rpartition(".")[2] == _MARKER for name in left)
    if marked and not scales:
        raise CheckpointError(f"{base.source} is marked {_MARKER} and has no scale_weight")
    notes = []
    if lone:
        notes.append(
            f"{base.source.name}: {len(lone)} tensors are stored in 8-bit without scales, which "
            "rounds each weight by up to 6 %; a scaled or 16-bit file is closer to the model"
        )
    if scales:
        notes.append(f"{base.source.name}: {len(scales)} weights are stored in 8-bit with scales")
    return (ScaledFile(base, scales, left) if left else base), tuple(notes)


def _check_scale(base: TensorFile, name: str, weight: str) -> None:
    if weight not in base:
        raise CheckpointError(f"{base.source}: {name!r} is a scale without {weight!r}")
    shape, wide = base.shape(name), base.shape(weight)
    if base.dtype(weight) not in {*_EIGHT_BITS, torch.int8}:
        raise CheckpointError(
            f"{base.source}: {weight!r} has a scale and is stored in {base.dtype(weight)}, "
            "expected fp8 or int8; its format is not read"
        )
    count = math.prod(shape)
    if not wide or (count != 1 and not shape[:1] == wide[:1] == (count,)):
        raise CheckpointError(
            f"{base.source}: {name!r} has shape {shape}, expected one number or one for each row "
            f"of {weight!r}, which has shape {wide}"
        )
    if not base.dtype(name).is_floating_point:
        raise CheckpointError(
            f"{base.source}: {name!r} is a scale and stored in {base.dtype(name)}"
        )


def _check_format(
    base: TensorFile, layer: str, kind: Mapping[str, Any], scales: Mapping[str, str]
) -> None:
    name, weight = kind.get("format"), f"{layer}.weight"
    wanted = _FORMATS.get(name) if isinstance(name, str) else None
    if wanted is None or kind.get("convrot"):
        rotated = " with convrot" if wanted is not None else ""
        raise CheckpointError(
            f"{base.source}: {layer!r} is stored as {shown(name)}{rotated}, which is not read; "
            f"known are {', '.join(_FORMATS)}"
        )
    if weight not in base or base.dtype(weight) != wanted or weight not in scales:
        raise CheckpointError(
            f"{base.source}: {layer!r} is said to be stored as {name}, and has no {weight!r} of "
            "that dtype with a scale"
        )


def _formats(base: TensorFile) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(layer, its description) of the header's metadata, then of the tensors that hold one."""
    if base.source.suffix == ".safetensors" and base.source.is_file():
        text = read_header(base.source).metadata.get(_METADATA)
        layers = {} if text is None else _json(base, _METADATA, text).get("layers")
        if not isinstance(layers, dict):
            raise CheckpointError(f"{base.source}: its {_METADATA} lists no layers")
        for layer, kind in layers.items():
            yield layer, kind if isinstance(kind, dict) else {"format": kind}
    for name in base:
        layer, _, own = name.rpartition(".")
        if own == _FORMAT:
            if base.dtype(name) != torch.uint8 or base.entry(name).num_bytes > _MOST_BYTES:
                raise CheckpointError(f"{base.source}: {name!r} is no JSON in bytes")
            yield layer, _json(base, name, bytes(base.load(name).flatten().tolist()))


def _json(base: TensorFile, name: str, text: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{base.source}: {listing([name])} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{base.source}: {name} is no JSON object")
    return found
