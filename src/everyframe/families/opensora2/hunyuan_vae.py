"""HunyuanVideo's autoencoder: diffusers' module, with frame-causal attention that builds no mask.

A token of the middle block attends to its own frame and earlier ones. Upstream and diffusers build
a mask of all tokens by all tokens, 2.3 GB for a tile of 33 latent frames. Here each frame attends
to the frames up to its own, which is the same softmax over the same keys.
Source: hpcaitech/Open-Sora 7ad6a96, opensora/models/hunyuan_vae, which has diffusers' names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everyframe.families.opensora2.vae_config import HunyuanVAEConfig
from everyframe.ops.attention import AttentionCore


class FrameCausalAttention(nn.Module):
    """Self-attention with one head, over the tokens of a frame and of all frames before it."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.to_q = nn.Linear(channels, channels)
        self.to_k = nn.Linear(channels, channels)
        self.to_v = nn.Linear(channels, channels)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])
        self.core = AttentionCore()

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        tokens = self.group_norm(x_BCTHW.flatten(2)).mT
        q, k, v = (layer(tokens)[:, None] for layer in (self.to_q, self.to_k, self.to_v))
        size = x_BCTHW.shape[3] * x_BCTHW.shape[4]
        seen = [
            self.core(q[:, :, end - size : end], k[:, :, :end], v[:, :, :end])
            for end in range(size, tokens.shape[1] + 1, size)
        ]
        out = self.to_out[0](torch.cat(seen, dim=2)[:, 0])
        return x_BCTHW + torch.unflatten(out.mT, 2, x_BCTHW.shape[2:])


class MiddleBlock(nn.Module):
    """Residual block, attention, residual block."""

    def __init__(self, resnets: nn.ModuleList, channels: int, groups: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([FrameCausalAttention(channels, groups)])
        self.resnets = resnets

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.resnets
        out: Tensor = last(self.attentions[0](first(x)))
        return out


def build_vae(config: HunyuanVAEConfig) -> nn.Module:
    """The untrained autoencoder, on torch's current default device."""
    from diffusers import AutoencoderKLHunyuanVideo

    widths, groups = config.block_out_channels, config.norm_num_groups
    down, up = "HunyuanVideoDownBlock3D", "HunyuanVideoUpBlock3D"
    model: Any = AutoencoderKLHunyuanVideo(
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        latent_channels=config.latent_channels,
        block_out_channels=widths,
        layers_per_block=config.layers_per_block,
        norm_num_groups=groups,
        down_block_types=(down,) * len(widths),
        up_block_types=(up,) * len(widths),
        mid_block_add_attention=False,  # ours takes its place
    )
    for coder in (model.encoder, model.decoder):
        coder.mid_block = MiddleBlock(coder.mid_block.resnets, widths[-1], groups)
    made: nn.Module = model
    return made
