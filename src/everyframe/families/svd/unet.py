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

from everyframe.families.svd.layers import WHOLE, FrameLayout, swap_layers
from everyframe.ops.attention import attention, merge_heads, split_heads
from everyframe.ops.dtypes import float32_or_wider
from everyframe.ops.norm import widen_norms


@dataclass(frozen=True)
class AttentionContext:
    """Context of one transformer: image, frame embeddings and mixing weight.

    Attributes:
        spatial, temporal: output of cross-attention, (B, C) per layer.
        frames: (T, C), added before temporal attention.
        mix: share of the spatial output.
    """

    spatial: tuple[Tensor, ...]
    temporal: tuple[Tensor, ...]
    frames: Tensor
    mix: Tensor


@dataclass(frozen=True)
class Context:
    """Everything that depends on neither latents nor step, by module name.

    Attributes:
        attentions: context of each transformer.
        rests: shares of the temporal convolutions.
        told: (B, C), added to the time embedding.
    """

    attentions: dict[str, AttentionContext]
    rests: dict[str, Tensor]
    told: Tensor

    def rows(self, rows: slice) -> Context:
        """Context of some of the branches."""
        attentions = {
            name: AttentionContext(
                tuple(each[rows] for each in one.spatial),
                tuple(each[rows] for each in one.temporal),
                one.frames,
                one.mix,
            )
            for name, one in self.attentions.items()
        }
        return Context(attentions, self.rests, self.told[rows])


def build(config: Mapping[str, Any]) -> VideoUNet:
    """Build the UNet of these sizes; without weights if the default device is meta."""
    made = VideoUNet(**config)
    widen_norms(made)
    swap_layers(made)
    return made


class VideoUNet(UNetSpatioTemporalConditionModel):  # type: ignore[misc]
    """`UNetSpatioTemporalConditionModel` for one image token, split into `context` and steps."""

    def context(self, picture_BD: Tensor, told_BN: Tensor, num_frames: int) -> Context:
        """Precompute what every step needs of the image embedding and the added conditions."""
        embedded = self.add_time_proj(told_BN.flatten()).reshape(len(told_BN), -1)
        embedded = embedded.to(told_BN.dtype)
        attentions, rests = {}, {}
        for name, module in self.named_modules():
            kind = type(module).__name__
            if kind == "TransformerSpatioTemporalModel":
                attentions[name] = _attention_context(module, picture_BD, num_frames)
            elif kind == "SpatioTemporalResBlock":
                rests[name] = 1 - _mix(module.time_mixer, picture_BD)
        return Context(attentions, rests, self.add_embedding(embedded))

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
        walk = _Walk(context, F.silu(time_BC + context.told), size, layout)
        x = sample_brCHW.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        x = self.conv_in(x)
        skips = [x]
        for number, block in enumerate(self.down_blocks):
            skips += walk.layers(f"down_blocks.{number}", block, x)
            for sampler in block.downsamplers or ():
                skips.append(sampler(skips[-1]))
            x = skips[-1]
        x = walk.middle("mid_block", self.mid_block, x)
        for number, block in enumerate(self.up_blocks):
            x = walk.layers(f"up_blocks.{number}", block, x, skips)[-1]
            for sampler in block.upsamplers or ():
                # The size of what it is joined to: halves of odd sizes were rounded up.
                x = sampler(x, tuple(skips[-1].shape[-2:]))
        v: Tensor = self.conv_out(_silu(self.conv_norm_out(x)))
        return torch.unflatten(v, 0, size)


class _Walk:
    """State of one forward pass; `size` is the number of local branches and of frames of each.

    Between layers x is frame by frame, (b r, C, H, W).
    """

    def __init__(
        self, context: Context, time_BC: Tensor, size: tuple[int, int], layout: FrameLayout
    ) -> None:
        self._context, self._time_BC = context, time_BC
        self._size, self._layout = size, layout

    def layers(
        self, name: str, block: Any, x: Tensor, skips: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Result of each layer of a block; with `skips`, each layer pops the last of them."""
        results = []
        for number, resnet in enumerate(block.resnets):
            if skips is not None:
                x = torch.cat([x, skips.pop()], dim=1)
            x = self._resnet(f"{name}.resnets.{number}", resnet, x)
            if getattr(block, "attentions", None):
                attention = block.attentions[number]
                x = self._attention(f"{name}.attentions.{number}", attention, x)
            results.append(x)
        return results

    def middle(self, name: str, block: Any, x: Tensor) -> Tensor:
        """Run the innermost block: convolutions with attention between them."""
        x = self._resnet(f"{name}.resnets.0", block.resnets[0], x)
        for number, module in enumerate(block.attentions):
            x = self._attention(f"{name}.attentions.{number}", module, x)
            x = self._resnet(f"{name}.resnets.{number + 1}", block.resnets[number + 1], x)
        return x

    def _resnet(self, name: str, block: Any, x: Tensor) -> Tensor:
        """Residual convolutions over space, then over time."""
        space, time = block.spatial_res_block, block.temporal_res_block
        h = space.conv1(_silu(space.norm1(x)))
        h += self._of_frames(space.time_emb_proj(self._time_BC)).flatten(0, 1)[:, :, None, None]
        h = space.conv2(_silu(space.norm2(h)))
        # A sum of its own: what came in is looked at again on the way up.
        x = (x if space.conv_shortcut is None else space.conv_shortcut(x)) + h
        y = torch.unflatten(x, 0, self._size).transpose(1, 2)  # (b, C, r, H, W), the same memory
        h = _silu(time.norm1(y, self._layout.frame_statistics))
        h = self._over_time(h, time.conv1)
        h = time.conv1(h)
        h += self._of_pixels(time.time_emb_proj(self._time_BC))
        h = _silu(time.norm2(h, self._layout.pixel_statistics))
        h = self._over_space(time.conv2(h), y)
        # mix * x + (1 - mix) * (x + h), where x is the spatial answer.
        y.addcmul_(h.to(y.dtype), self._context.rests[name].to(y.dtype))
        return x

    def _of_frames(self, table_BC: Tensor) -> Tensor:
        """The branch's row for each local frame, (b, r, C)."""
        return self._layout.of_frames(table_BC).expand(*self._size, -1)

    def _of_pixels(self, table_BC: Tensor) -> Tensor:
        """The branch's row for each local pixel, (b, C, 1, 1, s or 1)."""
        return self._layout.of_pixels(table_BC).permute(0, 3, 1, 2)[:, :, :, None]

    def _over_time(self, x_bCrHW: Tensor, reader: nn.Module) -> Tensor:
        """All frames of the local pixels, (b, C, T, H, W) or (b, C, T, 1, s)."""
        height, width = x_bCrHW.shape[-2:]
        tokens = x_bCrHW.permute(0, 2, 3, 4, 1).flatten(2, 3)
        tokens = self._layout.over_time(tokens, reader)
        num = tokens.shape[2]
        size = (height, width) if num == height * width else (1, num)
        return torch.unflatten(tokens, 2, size).permute(0, 4, 1, 2, 3)

    def _over_space(self, x_bCThw: Tensor, like_bCrHW: Tensor) -> Tensor:
        """Inverse of `_over_time`."""
        tokens = x_bCThw.permute(0, 2, 3, 4, 1).flatten(2, 3)
        tokens = self._layout.over_space(tokens)
        return torch.unflatten(tokens, 2, like_bCrHW.shape[-2:]).permute(0, 4, 1, 2, 3)

    def _attention(self, name: str, module: Any, x: Tensor) -> Tensor:
        """Spatial, then temporal attention, layer by layer."""
        known, layout = self._context.attentions[name], self._layout
        tokens = module.norm(x).permute(0, 2, 3, 1).flatten(1, 2)
        tokens = torch.unflatten(module.proj_in(tokens), 0, self._size)
        pairs = zip(module.transformer_blocks, module.temporal_transformer_blocks, strict=True)
        for layer, (space, time) in enumerate(pairs):
            picture_brC = layout.of_frames(known.spatial[layer])
            tokens = layout.over_time(_spatial_layer(space, tokens, picture_brC[:, :, None]))
            moved = tokens + known.frames[:, None].to(tokens.dtype)
            moved = _temporal_layer(time, moved, layout.of_pixels(known.temporal[layer]))
            tokens = layout.over_space(moved.lerp_(tokens, known.mix.to(tokens.dtype)))
        answer: Tensor = module.proj_out(tokens).flatten(0, 1)
        return x + torch.unflatten(answer, 1, x.shape[-2:]).permute(0, 3, 1, 2)


def _spatial_layer(block: Any, tokens_brSC: Tensor, picture_br1C: Tensor) -> Tensor:
    """Self-attention within each frame, image conditioning, feed-forward."""
    normed = block.norm1(tokens_brSC).flatten(0, 1)
    tokens_brSC += _self_attention(block.attn1, normed).reshape(tokens_brSC.shape)
    tokens_brSC += picture_br1C
    tokens_brSC += block.ff(block.norm3(tokens_brSC))
    return tokens_brSC


def _temporal_layer(block: Any, tokens_bTsC: Tensor, picture_b1sC: Tensor) -> Tensor:
    """Feed-forward, self-attention of each pixel over time, image conditioning, feed-forward."""
    widened = block.ff_in(block.norm_in(tokens_bTsC))
    tokens_bTsC = tokens_bTsC.add_(widened) if block.is_res else widened
    # Pixel by pixel, once for queries, keys and values.
    normed_bsTC = block.norm1(tokens_bTsC).transpose(1, 2).contiguous()
    attended = _self_attention(block.attn1, normed_bsTC.flatten(0, 1))
    tokens_bTsC += attended.reshape(normed_bsTC.shape).transpose(1, 2)
    tokens_bTsC += picture_b1sC
    answer: Tensor = block.ff(block.norm3(tokens_bTsC))
    return tokens_bTsC.add_(answer) if block.is_res else answer


def _self_attention(block: Any, rows_NLC: Tensor) -> Tensor:
    """Self-attention within each row of tokens."""
    q, k, v = (
        split_heads(project(rows_NLC), block.heads)
        for project in (block.to_q, block.to_k, block.to_v)
    )
    answer: Tensor = block.to_out[0](merge_heads(attention(q, k, v, scale=block.scale)))
    return answer


def _silu(fresh: Tensor) -> Tensor:
    return F.silu(fresh, inplace=True)


def _attention_context(module: Any, picture_BD: Tensor, num_frames: int) -> AttentionContext:
    numbers = torch.arange(num_frames, device=picture_BD.device)
    frames = module.time_pos_embed(module.time_proj(numbers).to(picture_BD.dtype))
    spatial, temporal = (
        tuple(_of_picture(block.attn2, picture_BD) for block in blocks)
        for blocks in (module.transformer_blocks, module.temporal_transformer_blocks)
    )
    return AttentionContext(spatial, temporal, frames, _mix(module.time_mixer, picture_BD))


def _of_picture(attention: Any, picture_BD: Tensor) -> Tensor:
    """Output of cross-attention to a single token, the same for every query."""
    answer: Tensor = attention.to_out[0](attention.to_v(picture_BD))
    return answer


def _mix(mixer: Any, like: Tensor) -> Tensor:
    """Share of the spatial output, computed by the mixer itself from inputs 1 and 0."""
    dtype = float32_or_wider(like.dtype)
    one = torch.ones(1, 1, 1, device=like.device, dtype=dtype)
    still = torch.zeros(1, 1, device=like.device)
    share: Tensor = mixer(one, torch.zeros_like(one), image_only_indicator=still)
    return share.reshape(())
