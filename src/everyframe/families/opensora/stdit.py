"""`STDiT`, the denoiser of Open-Sora 1.0: blocks of spatial, temporal and cross-attention.

Accepts any number of frames and any latent size: position embeddings are computed from the
config's scales, so upstream's ``pos_embed`` and ``pos_embed_temporal`` are not parameters here.
Source: hpcaitech/Open-Sora v1.0.0 and PixArt-alpha (arXiv 2310.00426).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from everyframe.families.opensora.config import STDiTConfig
from everyframe.families.opensora.layers import (
    MLP,
    Axis,
    CaptionEmbedder,
    CrossAttention,
    FinalLayer,
    PatchEmbed,
    ScalarEmbedder,
    SelfAttention,
    TextConditioned,
    token_grid,
    unpatchify,
)
from everyframe.families.opensora.model_inputs import (
    check_latents,
    per_sample,
)
from everyframe.ops.dtypes import upcast_to_float32
from everyframe.ops.embeddings import sincos_1d, sincos_2d
from everyframe.ops.modulation import Add, GatedAdd, Modulate, ModulationTables
from everyframe.ops.norm import LayerNorm
from everyframe.ops.text_context import KeysValues, TextContext


class STDiTBlock(nn.Module):
    """Residual block: spatial, temporal and cross-attention, then an MLP."""

    def __init__(self, config: STDiTConfig) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self.scale_shift_table = nn.Parameter(torch.zeros(6, size))
        self.modulation = ModulationTables()
        self.norm1, self.norm2 = LayerNorm(), LayerNorm()
        self.modulate1, self.modulate2 = Modulate(), Modulate()
        self.attn = SelfAttention(size, heads, Axis.SPACE, qk_norm=False)
        self.attn_temp = SelfAttention(size, heads, Axis.TIME, qk_norm=False)
        self.cross_attn = CrossAttention(size, heads)
        self.mlp = MLP(size, int(size * config.mlp_ratio), size)
        self.add_space, self.add_time, self.add_mlp = GatedAdd(), GatedAdd(), GatedAdd()
        self.add_text = Add()

    def forward(
        self,
        x_BTSC: Tensor,
        t_B16C: Tensor,
        text: KeysValues,
        text_mask: Tensor | None,
        time_positions_TC: Tensor | None = None,
    ) -> Tensor:
        """Run the block; `t_B16C` are the six modulation tables of the timestep."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(
            self.scale_shift_table, t_B16C
        )
        branch = self.attn(self.modulate1(self.norm1(x_BTSC), shift, scale))
        x_BTSC = self.add_space(x_BTSC, branch, gate)
        # As upstream's weights were trained: the input of temporal attention is neither normalised
        # nor modulated, and its gate is that of spatial attention.
        branch = x_BTSC if time_positions_TC is None else x_BTSC + time_positions_TC[:, None]
        x_BTSC = self.add_time(x_BTSC, self.attn_temp(branch), gate)
        x_BTSC = self.add_text(x_BTSC, self.cross_attn(x_BTSC, text, text_mask))
        branch = self.mlp(self.modulate2(self.norm2(x_BTSC), shift_mlp, scale_mlp))
        out: Tensor = self.add_mlp(x_BTSC, branch, gate_mlp)
        return out


class STDiT(TextConditioned):
    """Open-Sora 1.0's denoiser; parameters are undefined until weights are loaded.

    `embedders` names the submodules that embed a number, and whether it changes at every step.
    """

    config: STDiTConfig
    embedders: ClassVar[Mapping[str, bool]] = {"t_embedder": True}

    def __init__(self, config: STDiTConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        volume = config.patch_size[0] * config.patch_size[1] * config.patch_size[2]
        self.x_embedder = PatchEmbed(config.in_channels, size, config.patch_size)
        self.add_positions = Add()
        self.t_embedder = ScalarEmbedder(size)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(size, 6 * size))
        self.y_embedder = CaptionEmbedder(config.caption_channels, size, config.model_max_length)
        self.blocks = nn.ModuleList([STDiTBlock(config) for _ in range(config.depth)])
        self.final_layer = FinalLayer(size, volume * config.out_channels)

    def blocks_in_order(self) -> list[STDiTBlock]:
        return cast(list[STDiTBlock], list(self.blocks))

    def forward(self, x: Tensor, t: Tensor, context: TextContext) -> Tensor:
        """Predict noise and, in the second half of the channels, the variance interpolation.

        Args:
            x: latents (B, in_channels, T, H, W).
            t: (B,) timesteps, 0..1000.
            context: of B texts, from `context`.

        Returns:
            (B, out_channels, T, H, W) in float32 or wider.
        """
        latent_size = check_latents(x, self.config.in_channels, context)
        grid = token_grid(latent_size, self.config.patch_size)
        x_BTSC = upcast_to_float32(self.x_embedder(x))
        dtype, device = x_BTSC.dtype, x.device
        x_BTSC = self.add_positions(x_BTSC, self._space_positions(grid, dtype, device))

        t_BC = self.t_embedder(per_sample(t, "t", x))
        t_B16C = self.t_block(t_BC).unflatten(-1, (6, -1))[:, None]
        # As trained: temporal positions reach the first block only.
        times = [frame / self.config.time_scale for frame in range(grid[0])]
        time_positions = sincos_1d(times, self.config.hidden_size, dtype=dtype, device=device)
        for i, (block, text) in enumerate(zip(self.blocks_in_order(), context.blocks, strict=True)):
            positions = time_positions if i == 0 else None
            x_BTSC = block(x_BTSC, t_B16C, text, context.mask, positions)
        out = self.final_layer(x_BTSC, t_BC)
        return upcast_to_float32(unpatchify(out, grid, self.config.patch_size, latent_size))

    def _space_positions(
        self, grid: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        scale = self.config.space_scale
        rows, columns = ([i / scale for i in range(n)] for n in grid[1:])
        return sincos_2d(rows, columns, self.config.hidden_size, dtype=dtype, device=device)
