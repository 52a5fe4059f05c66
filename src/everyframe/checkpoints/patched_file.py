"""A checkpoint whose tensors are patched as they are read, before any cast or quantization.

`TensorFile.load` returns patched tensors, so every reader gets them: strict loading, offload from
files, sharded weights, 8-bit weights. `everyframe.adapters` builds the patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from everyframe.checkpoints.key_map import KeyMap
from everyframe.checkpoints.tensor_file import PackedRows, TensorFile
from everyframe.core.errors import CheckpointError

TensorPatch = Callable[[Tensor], Tensor]
"""Returns the patched tensor of a float32 tensor on the CPU, in float32; leaves its argument."""

Patches = Mapping[str, TensorPatch]
"""Patches of one component by the names of its parameters."""


class PatchedTensorFile(TensorFile):
    """The tensors of `base`, of which those in `patches` (by name in the file) are patched.

    A patch is computed in float32 on the CPU at each `load`, whatever the device, so that its bits
    depend on nothing else. It takes memory for two float32 copies of that tensor, and for one more
    of a LoHa or LoKr and of each LoRA after the first.
    """

    def __init__(self, base: TensorFile, patches: Patches) -> None:
        super().__init__(base.source, {name: base.entry(name) for name in base})
        self._base, self._patches = base, patches

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorFile.dtype`."""
        return self._base.dtype(name)

    def quantized(self, name: str, kind: str) -> tuple[Tensor, Tensor] | None:
        """See `TensorFile.quantized`; a patched weight is quantized again."""
        return None if name in self._patches else self._base.quantized(name, kind)

    def packed_bytes(self, name: str) -> int | None:
        """See `TensorFile.packed_bytes`; a patched weight is no longer what is stored."""
        return None if name in self._patches else self._base.packed_bytes(name)

    def packed(self, name: str) -> PackedRows:
        """See `TensorFile.packed`."""
        return self._base.packed(name)

    def load(
        self,
        name: str,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `TensorFile.load`; without `dtype` a patched tensor is float32, not rounded again."""
        patch = self._patches.get(name)
        if patch is None:
            return self._base.load(name, device, dtype)
        with torch.no_grad():
            merged = patch(self._base.load(name, dtype=torch.float32))
        return merged.to(device=device, dtype=dtype)


def with_patches(checkpoint: TensorFile, keys: KeyMap, patches: Patches) -> TensorFile:
    """The checkpoint with `patches` by names in the module; itself if there are none.

    Raises:
        CheckpointError: a patched parameter has no tensor in the file.
    """
    if not patches:
        return checkpoint
    groups = {name: group for group in keys.tied for name in group}
    by_source: dict[str, TensorPatch] = {}
    found: set[str] = set()
    for source in checkpoint:
        target = keys.target(source) or ""
        for name in groups.get(target, (target,)):
            if name in patches:
                by_source[source] = patches[name]
                found.add(name)
    lacking = sorted(set(patches) - found)
    if lacking:
        raise CheckpointError(
            f"{checkpoint.source} has no tensor for {lacking[0]!r}, which a LoRA changes"
        )
    return PatchedTensorFile(checkpoint, by_source)
