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
from everyframe.ops.rope import AxesTable
from everyframe.parallel.communicator import Communicator
from everyframe.parallel.redistribute import Redistribute
from everyframe.parallel.sharded_modules import (
    CrossAttentionPerSample,
    SequenceParallelAttention,
    ShardedAttentionCore,
    attending,
    beside,
)
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from everyframe.runtime.model_sharding import ShardedDenoiser

#: Parameterless modules: number of leading stream inputs, before the per-sample tables.
_STREAMS: dict[type[nn.Module], int] = {Modulate: 1, GatedAdd: 2}


def apply(
    model: StepVideoModel, team: Communicator, groups: int = 1, way: str = "ulysses"
) -> Sharding:
    """Shard `model` over the ranks of `team`.

    All ranks must call it in the same order with the same input. With `groups` above 1 the batch is
    first split into that many groups, each with its own ranks. `way` is the attention backend, one
    of `everyframe.parallel.head_partition.ATTENDING`.
    """
    return Sharding(model, team, groups, way)


class Sharding(ShardedDenoiser):
    """Handle of a sharded denoiser; `remove` undoes `apply`."""

    stream_dim = 1

    def __init__(self, model: StepVideoModel, team: Communicator, groups: int, way: str) -> None:
        super().__init__(model, team, groups)
        self._way = way
        self._num_heads = model.config.num_attention_heads
        self._patch_size = model.config.patch_size
        self._attending: dict[Redistribute, SequenceParallelAttention] = {}
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

    def _attention(self) -> SequenceParallelAttention:
        """Attention of the current grid."""
        switch = self.switch
        if switch not in self._attending:
            rows = switch.deal
            grid = TokenGrid(rows.grid.samples, self._num_heads, rows.grid.places)
            deal = TokenPartition(grid, rows.weights, rows.groups)
            self._attending[switch] = attending(self._way, deal, switch.team)
        return self._attending[switch]

    def _take_patches(self, layer: nn.Module, args: tuple[Any, ...]) -> Tensor:
        patches_bNE: Tensor = args[0]
        return self.switch.take(patches_bNE[:, None])[:, 0]

    def _take_rotations(
        self, rope: nn.Module, args: tuple[Any, ...], table: AxesTable
    ) -> AxesTable:
        """RoPE of this rank's tokens: of several samples in sequence, or one table for all."""
        parts = [each.places for each in self._segments()]
        cos, sin = (beside([x[part] for part in parts], 0) for x in (table.cos, table.sin))
        return table._replace(cos=cos, sin=sin)

    def _gather(self, layer: nn.Module, args: tuple[Any, ...], out_bnE: Tensor) -> Tensor:
        return self.switch.gather(out_bnE[:, None])[:, 0]
