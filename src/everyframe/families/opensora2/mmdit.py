"""`MMDiT`, the denoiser of Open-Sora 2.0 and of FLUX.1: joint attention over text and image.

Accepts any number of latent frames and any latent size that the patch divides. Timesteps run from 1
(noise) to 0 (data); the output is ``noise - data``. No token is masked: the weights were trained
with visible text padding.
Source: hpcaitech/Open-Sora 7ad6a96, opensora/models/mmdit/model.py. Values that upstream rounds to
bfloat16 (timesteps, latents) are exact here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from einops import rearrange
from torch import Tensor, nn

from everyframe.core.errors import InputError
from everyframe.families.opensora2.config import MMDiTConfig
from everyframe.families.opensora2.layers import (
    DoubleBlock,
    JoinStreams,
    JointRope,
    LastLayer,
    MLPEmbedder,
    SingleBlock,
)
from everyframe.ops.dtypes import upcast_to_float32
from everyframe.ops.embeddings import TimestepEmbedding
from everyframe.ops.patches import patch_grid, unpatchify
from everyframe.ops.text_context import JointTextContext

#: Timesteps and guidance are embedded by a sinusoid of this many times the number.
_TIMES = 1000
_FREQUENCIES = 256


class MMDiT(nn.Module):
    """The denoiser; parameters are undefined until weights are loaded.

    `embedders` names the submodules that embed a number, and whether it changes at every step.
    """

    embedders: ClassVar[Mapping[str, bool]] = {"time_in": True}

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.rope = JointRope(config)
        self.sinusoid = TimestepEmbedding(_FREQUENCIES)
        self.img_in = nn.Linear(config.in_channels, size)
        self.time_in = MLPEmbedder(_FREQUENCIES, size)
        self.vector_in = MLPEmbedder(config.vec_in_dim, size)
        if config.guidance_embed:
            self.guidance_in = MLPEmbedder(_FREQUENCIES, size)
        if config.cond_embed:
            self.cond_in = nn.Linear(config.in_channels + config.patch_size**2, size)
        self.txt_in = nn.Linear(config.context_in_dim, size)
        self.text_tokens = nn.Identity()
        self.double_blocks = nn.ModuleList([DoubleBlock(config) for _ in range(config.depth)])
        self.join = JoinStreams()
        self.single_blocks = nn.ModuleList(
            [SingleBlock(config) for _ in range(config.depth_single_blocks)]
        )
        self.final_layer = LastLayer(config)

    def context(
        self, text_BLC: Tensor, vector_BC: Tensor, guidance_B: Tensor | None = None
    ) -> JointTextContext:
        """Text context of the blocks, once per prompt.

        Args:
            text_BLC: T5's states (B, L, context_in_dim), padding included.
            vector_BC: CLIP's pooled state (B, vec_in_dim).
            guidance_B: the guidance scale, for a model with `guidance_embed`.
        """
        config = self.config
        if text_BLC.ndim != 3 or text_BLC.shape[2] != config.context_in_dim:
            raise InputError(
                f"text must be (batch, tokens, {config.context_in_dim}), got "
                f"{tuple(text_BLC.shape)}"
            )
        if tuple(vector_BC.shape) != (len(text_BLC), config.vec_in_dim):
            raise InputError(
                f"the pooled text must be {(len(text_BLC), config.vec_in_dim)}, got "
                f"{tuple(vector_BC.shape)}"
            )
        if config.guidance_embed != (guidance_B is not None):
            raise InputError(
                "this denoiser takes the guidance scale as an input"
                if config.guidance_embed
                else "this denoiser doesn't take the guidance scale as an input"
            )
        vector = upcast_to_float32(self.vector_in(vector_BC))
        if guidance_B is not None:
            vector = vector + self.guidance_in(self._sinusoid(guidance_B, vector.dtype))
        return JointTextContext(upcast_to_float32(self.txt_in(text_BLC)), vector)

    def forward(
        self, x: Tensor, t: Tensor, context: JointTextContext, cond: Tensor | None = None
    ) -> Tensor:
        """Predict the velocity at `t`.

        Args:
            x: latents (B, C, T, H, W), H and W multiples of the patch.
            t: (B,) timesteps, 1 (noise) to 0 (data).
            context: of B texts, from `context`.
            cond: mask and latents of given frames (B, 1 + C, T, H, W), for a model with
                `cond_embed`; None for none, which is the same as zeros.

        Returns:
            (B, C, T, H, W) in float32 or wider.
        """
        config = self.config
        grid = patch_grid(x, t, context, config.latent_channels, config.patch_size)
        img_BNC = upcast_to_float32(self.img_in(self._patches(x)))
        if config.cond_embed:
            if cond is None:
                cond = x.new_zeros((len(x), 1 + x.shape[1], *x.shape[2:]))
            img_BNC = img_BNC + self.cond_in(self._patches(cond))
        text_BLC = self.text_tokens(context.text)
        vector_BC = self.time_in(self._sinusoid(t, img_BNC.dtype)) + context.vector
        num_text = context.text.shape[1]
        table = self.rope(num_text, grid, img_BNC.dtype, x.device)
        for block in self.double_blocks:
            text_BLC, img_BNC = block(text_BLC, img_BNC, vector_BC, table)
        y_BNC = self.join(text_BLC, img_BNC, 1)
        del text_BLC, img_BNC
        for block in self.single_blocks:
            y_BNC = block(y_BNC, vector_BC, table)
        # Text tokens included: they are few, and ranks gather one sequence.
        out = self.final_layer(y_BNC, vector_BC)[:, num_text:]
        return unpatchify(out, grid, config.patch_size, "c ph pw")

    def _sinusoid(self, number_B: Tensor, dtype: torch.dtype) -> Tensor:
        return cast(Tensor, self.sinusoid(_TIMES * number_B.to(dtype)))

    def _patches(self, x_BCTHW: Tensor) -> Tensor:
        p = self.config.patch_size
        pattern = "b c t (h ph) (w pw) -> b (t h w) (c ph pw)"
        return rearrange(x_BCTHW, pattern, ph=p, pw=p)
