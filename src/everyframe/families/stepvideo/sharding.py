"""Sequence parallelism for Step-Video's denoiser, applied from outside.

One rank takes the same path. Each rank holds some tokens of the guidance branches from the first
layer to the last, in uneven shares, with RoPE for their positions in the whole video.
Cross-attention, modulation and feed-forward run without communication. Only self-attention
communicates: Ulysses, by heads (`everyframe.parallel.ulysses`), or ring attention
(`everyframe.parallel.ring_attention`). The output is gathered after the last projection, when it
has only a few channels.

Tensors are sent in the dtype in which attention multiplies them. Nothing is padded.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from everyframe.families.stepvideo.layers import CrossAttention, SelfAttention
from everyframe.families.stepvideo.model import StepVideoModel
from everyframe.ops.modulation import GatedAdd, Modulate
from everyframe.parallel.communicator import ParallelContext
from everyframe.parallel.sharded_modules import (
    CrossAttentionPerSample,
    ShardedAttentionCore,
)
from everyframe.parallel.token_partition import TokenGrid
from everyframe.runtime.model_sharding import FullAttentionSharding

#: Parameterless modules: number of leading stream inputs, before the per-sample tables.
_STREAMS: dict[type[nn.Module], int] = {Modulate: 1, GatedAdd: 2}


class Sharding(FullAttentionSharding):
    """The patch of a sharded denoiser."""

    def __init__(self, model: StepVideoModel, parallel: ParallelContext) -> None:
        super().__init__(model, parallel, model.config.num_attention_heads)
        self._patch_size = model.config.patch_size
        self._handles += [
            model.pos_embed.proj.register_forward_pre_hook(self._take_patches),
            model.rope.register_forward_hook(self._take_rotations),
            model.proj_out.register_forward_hook(self._gather),
        ]
        for part in list(model.modules()):
            self._swap_streams(part, _STREAMS)
            if isinstance(part, SelfAttention):
                self._swap(part, "core", ShardedAttentionCore(part.core, self._attention))
            if isinstance(part, CrossAttention):
                self._swap(
                    part, "core", CrossAttentionPerSample(part.core, self._segments, lambda: 1)
                )

    def _grid_of(self, x_BCTHW: Tensor) -> TokenGrid:
        """Token grid: all tokens of a sample form one row."""
        batch, _, frames, height, width = x_BCTHW.shape
        return TokenGrid(
            batch, 1, frames * (height // self._patch_size) * (width // self._patch_size)
        )

    def _take_patches(self, layer: nn.Module, args: tuple[Any, ...]) -> Tensor:
        patches_bNE: Tensor = args[0]
        return self.switch.take(patches_bNE[:, None])[:, 0]
