"""Blocks of the video UNet as modules that can be called, compiled and replaced one by one.

Each takes over the submodules of diffusers' block of the same place, with their names. Between
blocks x is frame by frame, (b r, C, H, W), channels last; suffixes are those of `unet`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.resnet import AlphaBlender
from torch import Tensor, nn

from everyframe.families.svd.layers import (
    FrameLayout,
    GatedFeedForward,
    copy_children,
    over_frames,
)
from everyframe.ops.dtypes import float32_or_wider
from everyframe.ops.module_class import recast
from everyframe.ops.norm import GroupNormSiLU
from everyframe.ops.self_attention import SelfAttention, TemporalAttention


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
class LevelContext:
    """Context of one level: of its transformers, and shares of its temporal convolutions."""

    attentions: tuple[AttentionContext, ...]
    rests: tuple[Tensor, ...]

    def rows(self, rows: slice) -> LevelContext:
        """Context of some of the branches."""
        attentions = tuple(
            AttentionContext(
                tuple(each[rows] for each in one.spatial),
                tuple(each[rows] for each in one.temporal),
                one.frames,
                one.mix,
            )
            for one in self.attentions
        )
        return LevelContext(attentions, self.rests)


@dataclass(frozen=True)
class Step:
    """What all blocks of one forward pass share.

    Attributes:
        time: (B, C), embedding of time and conditions, after its activation.
        size: local branches and frames of each.
        layout: which frames and pixels this rank holds.
    """

    time: Tensor
    size: tuple[int, int]
    layout: FrameLayout


class SpatialShare(AlphaBlender):  # type: ignore[misc]
    """A mixer of a spatial and a temporal branch, of which only the share of the first is asked."""

    def forward(self, like: Tensor) -> Tensor:
        is_image = torch.zeros(1, 1, device=like.device)
        share: Tensor = self.get_alpha(is_image, ndims=3).to(float32_or_wider(like.dtype))
        return (1 - share if self.switch_spatial_to_temporal_mix else share).reshape(())


class ResidualBlock(nn.Module):
    """Residual convolutions over space, then over time."""

    spatial_res_block: Any
    temporal_res_block: Any
    time_mixer: Any

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        copy_children(theirs, self)
        for part in (self.spatial_res_block, self.temporal_res_block):
            for name in ("norm1", "norm2"):
                setattr(part, name, GroupNormSiLU.of(getattr(part, name)))
        recast(self, "time_mixer", SpatialShare)
        time = self.temporal_res_block
        time.conv1, time.conv2 = over_frames(time.conv1), over_frames(time.conv2)

    def forward(self, x: Tensor, step: Step, rest: Tensor) -> Tensor:
        """`rest` is the share of the temporal output."""
        space, time = self.spatial_res_block, self.temporal_res_block
        layout = step.layout
        h = space.conv1(space.norm1(x))
        temb_brC = layout.of_frames(space.time_emb_proj(step.time)).expand(*step.size, -1)
        h += temb_brC.flatten(0, 1)[:, :, None, None]
        h = space.conv2(space.norm2(h))
        # Not in place: the input is a skip connection of the up blocks.
        x = (x if space.conv_shortcut is None else space.conv_shortcut(x)) + h
        y = torch.unflatten(x, 0, step.size).transpose(1, 2)  # (b, C, r, H, W), the same memory
        h = time.norm1(y, layout.frame_statistics)
        h = time.conv1(_over_time(h, time.conv1, layout))
        temb_b11sC = layout.of_pixels(time.time_emb_proj(step.time))
        h += temb_b11sC.permute(0, 3, 1, 2)[:, :, :, None]
        h = time.norm2(h, layout.pixel_statistics)
        h = _over_space(time.conv2(h), y, layout)
        # mix * x + (1 - mix) * (x + h), where x is the spatial answer.
        y.addcmul_(h.to(y.dtype), rest.to(y.dtype))
        return x


def _over_time(x_bCrHW: Tensor, reader: nn.Module, layout: FrameLayout) -> Tensor:
    """All frames of the local pixels, (b, C, T, H, W) or (b, C, T, 1, s)."""
    height, width = x_bCrHW.shape[-2:]
    tokens = x_bCrHW.permute(0, 2, 3, 4, 1).flatten(2, 3)
    tokens = layout.over_time(tokens, reader)
    num = tokens.shape[2]
    size = (height, width) if num == height * width else (1, num)
    return torch.unflatten(tokens, 2, size).permute(0, 4, 1, 2, 3)


def _over_space(x_bCThw: Tensor, like_bCrHW: Tensor, layout: FrameLayout) -> Tensor:
    """Inverse of `_over_time`."""
    tokens = x_bCThw.permute(0, 2, 3, 4, 1).flatten(2, 3)
    tokens = layout.over_space(tokens)
    return torch.unflatten(tokens, 2, like_bCrHW.shape[-2:]).permute(0, 4, 1, 2, 3)


class SpatialLayer(nn.Module):
    """Self-attention within each frame, image conditioning, feed-forward; changes its tokens."""

    norm1: Any
    norm3: Any
    attn1: Any
    ff: Any

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        copy_children(theirs, self)
        self.attn1 = SelfAttention(self.attn1)
        self.ff = GatedFeedForward(self.ff)

    def forward(self, tokens_brSC: Tensor, picture_br1C: Tensor) -> Tensor:
        normed: Tensor = self.norm1(tokens_brSC)
        tokens_brSC += self.attn1(normed.flatten(0, 1)).reshape(tokens_brSC.shape)
        tokens_brSC += picture_br1C
        tokens_brSC += self.ff(self.norm3(tokens_brSC))
        return tokens_brSC


class TemporalLayer(nn.Module):
    """Feed-forward, self-attention of each pixel over time, image conditioning, feed-forward.

    Changes its tokens.
    """

    norm_in: Any
    norm1: Any
    norm3: Any
    attn1: Any
    ff_in: Any
    ff: Any

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.is_res = theirs.is_res
        copy_children(theirs, self)
        self.attn1 = TemporalAttention(self.attn1)
        self.ff_in, self.ff = GatedFeedForward(self.ff_in), GatedFeedForward(self.ff)

    def forward(self, tokens_bTsC: Tensor, picture_b1sC: Tensor) -> Tensor:
        widened: Tensor = self.ff_in(self.norm_in(tokens_bTsC))
        tokens_bTsC = tokens_bTsC.add_(widened) if self.is_res else widened
        tokens_bTsC += self.attn1(self.norm1(tokens_bTsC))
        tokens_bTsC += picture_b1sC
        answer: Tensor = self.ff(self.norm3(tokens_bTsC))
        return tokens_bTsC.add_(answer) if self.is_res else answer


class FrameTransformer(nn.Module):
    """Spatial, then temporal attention, layer by layer."""

    norm: Any
    proj_in: Any
    proj_out: Any
    time_mixer: Any
    time_proj: Any
    time_pos_embed: Any
    transformer_blocks: Any
    temporal_transformer_blocks: Any

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        copy_children(theirs, self)
        recast(self, "time_mixer", SpatialShare)
        self.transformer_blocks = nn.ModuleList(map(SpatialLayer, theirs.transformer_blocks))
        layers = map(TemporalLayer, theirs.temporal_transformer_blocks)
        self.temporal_transformer_blocks = nn.ModuleList(layers)

    def forward(self, x: Tensor, step: Step, context: AttentionContext) -> Tensor:
        layout = step.layout
        normed: Tensor = self.norm(x)
        tokens: Tensor = self.proj_in(normed.permute(0, 2, 3, 1).flatten(1, 2))
        tokens = torch.unflatten(tokens, 0, step.size)
        pairs = zip(self.transformer_blocks, self.temporal_transformer_blocks, strict=True)
        for layer, (space, time) in enumerate(pairs):
            picture_brC = layout.of_frames(context.spatial[layer])
            tokens = layout.over_time(space(tokens, picture_brC[:, :, None]))
            moved = tokens + context.frames[:, None].to(tokens.dtype)
            moved = time(moved, layout.of_pixels(context.temporal[layer]))
            # A repair may have widened the temporal layer alone.
            mixed = moved.lerp_(tokens.to(moved.dtype), context.mix.to(moved.dtype))
            tokens = layout.over_space(mixed)
        answer: Tensor = self.proj_out(tokens).flatten(0, 1)
        return x + torch.unflatten(answer, 1, x.shape[-2:]).permute(0, 3, 1, 2)

    def context(self, picture_BD: Tensor, num_frames: int) -> AttentionContext:
        """What no step changes: cross-attention to the image, embeddings of the frames' numbers."""
        numbers = torch.arange(num_frames, device=picture_BD.device)
        frames = self.time_pos_embed(self.time_proj(numbers).to(picture_BD.dtype))
        spatial, temporal = (
            tuple(_of_picture(block.attn2, picture_BD) for block in blocks)
            for blocks in (self.transformer_blocks, self.temporal_transformer_blocks)
        )
        return AttentionContext(spatial, temporal, frames, self.time_mixer(picture_BD))


def _of_picture(attention: Any, picture_BD: Tensor) -> Tensor:
    """Output of cross-attention to a single token, the same for every query."""
    answer: Tensor = attention.to_out[0](attention.to_v(picture_BD))
    return answer


class Level(nn.Module):
    """Blocks of one resolution: a residual block and, at most levels, a transformer after it.

    `resnets` and `attentions` alternate; in the middle a residual block comes first. Between them,
    on the way up, each residual block takes one result of the way down beside its own input.
    """

    resnets: Any
    attentions: Any

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        copy_children(theirs, self)
        self.resnets = nn.ModuleList(map(ResidualBlock, theirs.resnets))
        self.has_attention = bool(getattr(theirs, "attentions", None))
        if self.has_attention:
            self.attentions = nn.ModuleList(map(FrameTransformer, theirs.attentions))

    def context(self, picture_BD: Tensor, num_frames: int) -> LevelContext:
        """What no step changes; see `LevelContext`."""
        attentions = self.attentions if self.has_attention else ()
        return LevelContext(
            tuple(each.context(picture_BD, num_frames) for each in attentions),
            tuple(1 - each.time_mixer(picture_BD) for each in self.resnets),
        )

    def run(
        self, x: Tensor, step: Step, context: LevelContext, skips: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        """Result of each layer; `skips` are those of the way down, the last one first."""
        results = []
        for number, resnet in enumerate(self.resnets):
            if skips:
                x = torch.cat([x, skips[number]], dim=1)
            x = resnet(x, step, context.rests[number])
            if self.has_attention:
                x = self.attentions[number](x, step, context.attentions[number])
            results.append(x)
        return tuple(results)


class DownLevel(Level):
    """Layers of the way down, and the downsampling after them."""

    def forward(self, x: Tensor, step: Step, context: LevelContext) -> tuple[Tensor, ...]:
        """Result of each layer and of the downsampling, which the way up takes again."""
        results = self.run(x, step, context)
        for sampler in getattr(self, "downsamplers", None) or ():
            results = (*results, sampler(results[-1]))
        return results


class MiddleLevel(Level):
    """Residual blocks with attention between them."""

    def forward(self, x: Tensor, step: Step, context: LevelContext) -> Tensor:
        x = self.resnets[0](x, step, context.rests[0])
        pairs = zip(self.attentions, context.attentions, strict=True)
        for number, (attention, own) in enumerate(pairs, start=1):
            x = attention(x, step, own)
            x = self.resnets[number](x, step, context.rests[number])
        return x


class UpLevel(Level):
    """Layers of the way up, and the upsampling after them."""

    def forward(
        self,
        x: Tensor,
        step: Step,
        context: LevelContext,
        skips: tuple[Tensor, ...],
        size: tuple[int, int],
    ) -> Tensor:
        """`skips`: one for each layer, the last of the way down first; `size`: of the next level.

        The size has to be given, as halves of odd sizes were rounded up.
        """
        x = self.run(x, step, context, skips)[-1]
        for sampler in getattr(self, "upsamplers", None) or ():
            x = sampler(x, size)
        return x
