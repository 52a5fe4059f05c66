"""`StepVideoModel`, Step-Video-T2V's denoiser: full attention over all tokens of the video.

Accepts any number of latent frames and any latent size; positions use RoPE along frames, rows and
columns. Timesteps run from 0 (noise) to 1 (data); the output is ``data - noise``.
Source: stepfun-ai/Step-Video-T2V 675e08c, stepvideo/modules/model.py. Values that upstream rounds
to bfloat16 (RoPE angles, timestep, sums of masks) are exact here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from everyframe.core.errors import InputError
from everyframe.families.stepvideo.config import StepVideoModelConfig
from everyframe.families.stepvideo.layers import (
    AdaLayerNormSingle,
    CaptionProjection,
    PatchEmbed,
    StepVideoBlock,
)
from everyframe.ops.attention import unmask_empty_rows
from everyframe.ops.dtypes import upcast_to_float32
from everyframe.ops.modulation import Modulate, ModulationTables
from everyframe.ops.norm import LayerNorm
from everyframe.ops.patches import patch_grid, unpatchify
from everyframe.ops.rope import RotaryAxes
from everyframe.ops.text_context import TextContext, context_of


class StepVideoModel(nn.Module):
    """Step-Video's denoiser; parameters are undefined until weights are loaded.

    `embedders` names the submodules that embed a number, and whether it changes at every step.
    """

    embedders: ClassVar[Mapping[str, bool]] = {"adaln_single.emb": True}

    def __init__(self, config: StepVideoModelConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.rope = RotaryAxes(config.split)
        self.pos_embed = PatchEmbed(config.in_channels, size, config.patch_size)
        self.adaln_single = AdaLayerNormSingle(size)
        self.caption_norm = LayerNorm(config.norm_eps)
        self.caption_projection = CaptionProjection(config.caption_channels[0], size)
        if len(config.caption_channels) == 2:
            self.clip_projection = nn.Linear(config.caption_channels[1], size)
        self.transformer_blocks = nn.ModuleList(
            [StepVideoBlock(config) for _ in range(config.num_layers)]
        )
        self.norm_out = LayerNorm(config.norm_eps)
        self.scale_shift_table = nn.Parameter(torch.zeros(2, size))
        self.modulation, self.modulate_out = ModulationTables(), Modulate()
        self.proj_out = nn.Linear(size, config.patch_size**2 * config.made_channels)

    def blocks_in_order(self) -> list[StepVideoBlock]:
        return cast(list[StepVideoBlock], list(self.transformer_blocks))

    def context(self, llm_BLC: Tensor, clip_BMC: Tensor | None, mask_BN: Tensor) -> TextContext:
        """Text context of the blocks, once per prompt.

        Args:
            llm_BLC: Step-LLM's states (B, L, caption_channels[0]).
            clip_BMC: CLIP's states (B, M, caption_channels[1]); None for a model without CLIP.
            mask_BN: (B, M + L), 1 for a token, CLIP's first. Only the sum of a row counts:
                attention reads that many of its first tokens, as in upstream.
        """
        parts = self._project_texts(llm_BLC, clip_BMC, mask_BN)
        # Counted exactly, on the host: upstream's bfloat16 sum rounds above 256.
        lengths = mask_BN.to("cpu").bool().sum(dim=1)
        # A batch of empty texts keeps one column, as attention needs a key.
        longest = max(int(lengths.max()), 1)
        text = torch.cat(parts, dim=1)[:, :longest]
        blocks = [block.attn2.keys_values(text) for block in self.blocks_in_order()]
        mask = torch.arange(longest, device="cpu") < lengths[:, None]
        if bool(mask.all()):
            return context_of(blocks, None, None)
        device = text.device
        opened = unmask_empty_rows(mask)
        return context_of(blocks, opened.to(device), (lengths == 0).to(device))

    def _project_texts(
        self, llm_BLC: Tensor, clip_BMC: Tensor | None, mask_BN: Tensor
    ) -> tuple[Tensor, ...]:
        """Projected texts, CLIP's first."""
        given = (llm_BLC,) if clip_BMC is None else (llm_BLC, clip_BMC)
        channels = self.config.caption_channels
        shapes = tuple(tuple(each.shape) for each in given)
        fit = len(given) == len(channels) and all(
            len(shape) == 3 and shape[0] == len(llm_BLC) and shape[2] == width
            for shape, width in zip(shapes, channels, strict=True)
        )
        if not fit:
            wanted = " and ".join(f"(batch, tokens, {width})" for width in channels)
            raise InputError(f"texts must be {wanted}, got {' and '.join(map(str, shapes))}")
        expected = (len(llm_BLC), sum(shape[1] for shape in shapes))
        if tuple(mask_BN.shape) != expected:
            raise InputError(
                f"the texts' mask must be {expected}, CLIP's tokens first, got "
                f"{tuple(mask_BN.shape)}"
            )
        llm = self.caption_projection(self.caption_norm(llm_BLC))
        return (llm,) if clip_BMC is None else (self.clip_projection(clip_BMC), llm)

    def forward(self, x: Tensor, t: Tensor, context: TextContext) -> Tensor:
        """Predict the velocity at `t`.

        Args:
            x: latents (B, in_channels, T, H, W), H and W multiples of the patch.
            t: (B,) timesteps, 0 (noise) to 1 (data).
            context: of B texts, from `context`.

        Returns:
            (B, out_channels, T, H, W) in float32 or wider.
        """
        config = self.config
        grid = patch_grid(x, t, context, config.in_channels, config.patch_size)
        x_BNC = upcast_to_float32(self.pos_embed(x))
        t_BKC, t_BC = self.adaln_single(t.to(x_BNC.dtype))
        table = self.rope(grid, x_BNC.dtype, x.device)
        for block, text in zip(self.blocks_in_order(), context.blocks, strict=True):
            x_BNC = block(x_BNC, t_BKC, text, context.mask, table)
        shift, scale = self.modulation(self.scale_shift_table, t_BC[:, None])
        out = self.proj_out(self.modulate_out(self.norm_out(x_BNC), shift, scale))
        return unpatchify(out, grid, config.patch_size, "ph pw c")
