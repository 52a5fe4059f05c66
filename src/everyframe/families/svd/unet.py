"""The video UNet with diffusers' layers, without the redundant work.

Layers, parameter names and results are those of `UNetSpatioTemporalConditionModel`. Differences:

- With one image token, cross-attention is a softmax over one key, which is 1: its output is the
  value projection, the same for every pixel and step. Frame embeddings and the mixing weights of
  space and time do not depend on latents either. All of this is `context`, computed once a run.
- Memory layout is frame by frame, row by row, channels last, from the first layer to the last, so
  convolutions, norms and attention need no copies in between.
- The time embedding, the same for all frames, is projected once, not once a frame.
- Norms read and return their input's dtype, with weights and statistics in float32
  (`everyframe.ops.norm`).

Epsilons of norms are diffusers', too: 1e-6 in the residual blocks of down levels with attention and
of all up levels, where Stability's own code has 1e-5. Nothing else differs from that code: with its
epsilons the results agree to rounding.

Sums are computed in place wherever no other code holds the tensor. `FrameLayout` describes which
frames and pixels this rank holds, so several ranks can share a video (`sharding.py`).

Suffixes: B guidance branches, T frames, S pixels, C channels; lower case where it may be a local
share: b, r frames and s pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import UNetSpatioTemporalConditionModel
from torch import Tensor, nn

from everyframe.families.svd.blocks import (
    DownLevel,
    LevelContext,
    MiddleLevel,
    Step,
    UpLevel,
)
from everyframe.families.svd.layers import WHOLE, FrameLayout
from everyframe.ops.norm import GroupNormSiLU, widen_norms


@dataclass(frozen=True)
class Context:
    """Everything that depends on neither latents nor step.

    Attributes:
        levels: context of each level, in execution order.
        conditions: (B, C), added to the time embedding.
    """

    levels: tuple[LevelContext, ...]
    conditions: Tensor

    def rows(self, rows: slice) -> Context:
        """Context of some of the branches."""
        return Context(tuple(level.rows(rows) for level in self.levels), self.conditions[rows])


def build(config: Mapping[str, Any]) -> VideoUNet:
    """Build the UNet of these sizes; without weights if the default device is meta."""
    return VideoUNet(**config)


class VideoUNet(UNetSpatioTemporalConditionModel):  # type: ignore[misc]
    """`UNetSpatioTemporalConditionModel` for one image token, split into `context` and steps.

    Images lie in memory channels last (`is_channels_last`), which trials of fast paths follow.
    """

    is_channels_last = True

    down_blocks: Any
    mid_block: Any
    up_blocks: Any
    conv_norm_out: Any

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        widen_norms(self)
        self.down_blocks = nn.ModuleList(map(DownLevel, self.down_blocks))
        self.mid_block = MiddleLevel(self.mid_block)
        self.up_blocks = nn.ModuleList(map(UpLevel, self.up_blocks))
        self.conv_norm_out = GroupNormSiLU.of(self.conv_norm_out)

    def context(self, picture_BD: Tensor, time_ids_BN: Tensor, num_frames: int) -> Context:
        """Precompute what every step needs of the image embedding and the added time ids."""
        embedded = self.add_time_proj(time_ids_BN.flatten()).reshape(len(time_ids_BN), -1)
        embedded = embedded.to(time_ids_BN.dtype)
        levels = (*self.down_blocks, self.mid_block, *self.up_blocks)
        contexts = tuple(level.context(picture_BD, num_frames) for level in levels)
        return Context(contexts, self.add_embedding(embedded))

    def forward(
        self,
        sample_brCHW: Tensor,
        timestep: Tensor,
        context: Context,
        layout: FrameLayout = WHOLE,
    ) -> Tensor:
        """v (B, T, C, H, W) for scaled latents and the image's, (B, T, 2 C, H, W), and t (B,).

        If `layout` holds only some frames, input and output are (b, r, ...).
        """
        time_BC = self.time_embedding(self.time_proj(timestep).to(sample_brCHW.dtype))
        size = (sample_brCHW.shape[0], sample_brCHW.shape[1])
        step = Step(F.silu(time_BC + context.conditions), size, layout)
        levels = iter(context.levels)
        x = sample_brCHW.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        skips = [self.conv_in(x)]
        for block in self.down_blocks:
            skips += block(skips[-1], step, next(levels))
        x = self.mid_block(skips[-1], step, next(levels))
        for block in self.up_blocks:
            own = tuple(skips.pop() for _ in block.resnets)
            after = tuple((skips or own)[-1].shape[-2:])
            x = block(x, step, next(levels), own, after)
        v: Tensor = self.conv_out(self.conv_norm_out(x))
        return torch.unflatten(v, 0, size)
