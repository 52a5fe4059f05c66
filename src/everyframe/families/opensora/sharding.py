"""Sequence parallelism for Open-Sora's denoiser, applied from outside.

One rank takes the same path. Each rank holds some places of every latent frame (columns), so
temporal attention, cross-attention and feed-forward run without communication. Spatial attention
needs whole frames (rows): one exchange before it, one after. The output is gathered after the last
projection, when it has only a few channels. A rank may hold places of several samples; with one
rank per guidance branch this becomes CFG parallelism.

Tensors are sent in the dtype that the next matrix product casts them to. Nothing is padded and no
sum is split, so in exact arithmetic the result equals that of one device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from everyframe.families.opensora.layers import Axis, CrossAttention, SelfAttention, token_grid
from everyframe.families.opensora.stdit import STDiT
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.ops.modulation import GatedAdd, Modulate, SelectByFrame
from everyframe.parallel.communicator import ParallelContext
from everyframe.parallel.sharded_modules import CrossAttentionPerSample
from everyframe.parallel.token_partition import TokenGrid
from everyframe.precision.upcast import narrowest
from everyframe.runtime.model_sharding import ShardedDenoiser

#: Parameterless modules: number of leading stream inputs, before the per-sample tables.
_STREAMS: dict[type[nn.Module], int] = {Modulate: 1, GatedAdd: 2, SelectByFrame: 2}


class Sharding(ShardedDenoiser):
    """The patch of a sharded denoiser."""

    stream_dim = 2

    def __init__(self, model: STDiT | STDiT3, parallel: ParallelContext) -> None:
        super().__init__(model, parallel)
        self._patch_size = model.config.patch_size
        self._handles += [
            model.x_embedder.proj.register_forward_pre_hook(self._take_patches),
            model.add_positions.register_forward_pre_hook(self._take_positions),
            model.final_layer.register_forward_hook(self._gather),
        ]
        for part in list(model.modules()):
            if isinstance(part, SelfAttention) and part.axis is Axis.SPACE:
                self._handles.append(part.register_forward_pre_hook(self._to_rows))
                self._handles.append(part.register_forward_hook(self._to_columns))
            self._swap_streams(part, _STREAMS)
            if isinstance(part, CrossAttention):
                core = CrossAttentionPerSample(part.core, self._segments, self._frames)
                self._swap(part, "core", core)

    def _grid_of(self, x_BCTHW: Tensor) -> TokenGrid:
        batch, _, *size = x_BCTHW.shape
        frames, rows, columns = token_grid((size[0], size[1], size[2]), self._patch_size)
        return TokenGrid(batch, frames, rows * columns)

    def _frames(self) -> int:
        return self.switch.partition.grid.frames

    def _take_patches(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        return self.switch.take(args[0])

    def _take_positions(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        x, positions = args
        samples = self.switch.samples
        shape = (samples.stop - samples.start, 1, *positions.shape[-2:])
        return x, self.switch.take(positions.expand(shape))

    def _to_rows(self, attention: SelfAttention, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = args
        # Its compute dtype, whatever its weights are stored in.
        dtype = narrowest(attention.qkv) or x.dtype
        if dtype.itemsize < x.dtype.itemsize:
            x = x.to(dtype)  # as its first product would do; half the bytes to send
        return (self.switch.to_rows(x), *others)

    def _to_columns(self, attention: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return self.switch.to_columns(out)

    def _gather(self, layer: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return self.switch.gather(out)
