"""`STDiT3`, the denoiser of Open-Sora 1.2: alternating spatial and temporal attention blocks.

Accepts any number of frames and any latent size. Spatial position embeddings are scaled to the
video's size in pixels; temporal positions use RoPE. Conditioning frames (such as the image of
image to video) are modulated as if at timestep 0. Source: hpcaitech/Open-Sora v1.2.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from everyframe.families.opensora.config import STDiT3Config
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
    frames_mask,
    numbers,
    per_sample,
)
from everyframe.ops.dtypes import upcast_to_float32
from everyframe.ops.embeddings import sincos_2d
from everyframe.ops.modulation import Add, GatedAdd, Modulate, ModulationTables
from everyframe.ops.norm import LayerNorm
from everyframe.ops.rope import RotaryEmbedding, RotaryTable
from everyframe.ops.text_context import KeysValues, TextContext


class STDiT3Block(nn.Module):
    """Residual block: spatial or temporal attention, cross-attention, then an MLP."""

    def __init__(self, config: STDiT3Config, axis: Axis) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self.scale_shift_table = nn.Parameter(torch.zeros(6, size))
        self.modulation = ModulationTables()
        self.norm1, self.norm2 = LayerNorm(), LayerNorm()
        self.modulate1, self.modulate2 = Modulate(), Modulate()
        self.attn = SelfAttention(size, heads, axis, config.qk_norm)
        self.cross_attn = CrossAttention(size, heads)
        self.mlp = MLP(size, int(size * config.mlp_ratio), size)
        self.add_attn, self.add_text, self.add_mlp = GatedAdd(), Add(), GatedAdd()

    def forward(
        self,
        x_BTSC: Tensor,
        t_BF6C: Tensor,
        text: KeysValues,
        text_mask: Tensor | None,
        table: RotaryTable | None = None,
    ) -> Tensor:
        """Run the block.

        `t_BF6C` are the six modulation tables of the timestep, per frame or (F = 1) for all frames.
        `table` holds the RoPE rotations of temporal attention.
        """
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(
            self.scale_shift_table, t_BF6C
        )
        branch = self.attn(self.modulate1(self.norm1(x_BTSC), shift, scale), table)
        x_BTSC = self.add_attn(x_BTSC, branch, gate)
        x_BTSC = self.add_text(x_BTSC, self.cross_attn(x_BTSC, text, text_mask))
        branch = self.mlp(self.modulate2(self.norm2(x_BTSC), shift_mlp, scale_mlp))
        out: Tensor = self.add_mlp(x_BTSC, branch, gate_mlp)
        return out


class STDiT3(TextConditioned):
    """Open-Sora 1.2's denoiser; parameters are undefined until weights are loaded.

    `embedders` names the submodules that embed a number, and whether it changes at every step.
    """

    config: STDiT3Config
    embedders: ClassVar[Mapping[str, bool]] = {"t_embedder": True, "fps_embedder": False}

    def __init__(self, config: STDiT3Config) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        volume = config.patch_size[0] * config.patch_size[1] * config.patch_size[2]
        self.rope = RotaryEmbedding(config.head_size)
        self.x_embedder = PatchEmbed(config.in_channels, size, config.patch_size)
        self.add_positions = Add()
        self.t_embedder = ScalarEmbedder(size)
        self.fps_embedder = ScalarEmbedder(size)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(size, 6 * size))
        self.y_embedder = CaptionEmbedder(config.caption_channels, size, config.model_max_length)
        self.spatial_blocks = nn.ModuleList(
            [STDiT3Block(config, Axis.SPACE) for _ in range(config.depth)]
        )
        self.temporal_blocks = nn.ModuleList(
            [STDiT3Block(config, Axis.TIME) for _ in range(config.depth)]
        )
        self.final_layer = FinalLayer(size, volume * config.out_channels)

    def blocks_in_order(self) -> list[STDiT3Block]:
        """Blocks in execution order: spatial 0, temporal 0, spatial 1 and so on."""
        pairs = zip(self.spatial_blocks, self.temporal_blocks, strict=True)
        return cast(list[STDiT3Block], [block for pair in pairs for block in pair])

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        context: TextContext,
        *,
        fps: Tensor | float,
        height: Tensor | float,
        width: Tensor | float,
        x_mask: Tensor | None = None,
    ) -> Tensor:
        """Predict the velocity, followed by as many unused channels if the model has them.

        Args:
            x: latents (B, in_channels, T, H, W).
            t: (B,) timesteps, 0..1000, fractions allowed.
            context: of B texts, from `context`.
            fps: frames per second of the video, one number or (B,).
            height, width: pixels of the video, one number or (B,).
            x_mask: (B, T), True for frames to denoise, False for conditioning frames (T counts
                temporal patches if a patch is longer than one frame). None means True everywhere.

        Returns:
            (B, out_channels, T, H, W) in float32 or wider.
        """
        latent_size = check_latents(x, self.config.in_channels, context)
        grid = token_grid(latent_size, self.config.patch_size)
        x_mask = frames_mask(x_mask, grid[0], x)
        x_BTSC = upcast_to_float32(self.x_embedder(x))
        dtype, device = x_BTSC.dtype, x.device
        pixels = numbers(height, "height", x), numbers(width, "width", x)
        positions = self._positions(grid, list(zip(*pixels, strict=True)), dtype, device)
        x_BTSC = self.add_positions(x_BTSC, positions)

        t = per_sample(t, "t", x)
        fps_BC = self.fps_embedder(per_sample(fps, "fps", x))
        t_BC, t0_BC = self.t_embedder(t) + fps_BC, None
        t_BF6C = self.t_block(t_BC).unflatten(-1, (6, -1))[:, None]
        if x_mask is not None:
            t0_BC = self.t_embedder(torch.zeros_like(t)) + fps_BC
            t0_BF6C = self.t_block(t0_BC).unflatten(-1, (6, -1))[:, None]
            t_BF6C = torch.where(x_mask[:, :, None, None], t_BF6C, t0_BF6C)

        table = self.rope(grid[0], dtype, device)
        for i, (block, text) in enumerate(zip(self.blocks_in_order(), context.blocks, strict=True)):
            in_time = i % 2 == 1
            x_BTSC = block(x_BTSC, t_BF6C, text, context.mask, table if in_time else None)
        out = self.final_layer(x_BTSC, t_BC, t0_BC, x_mask)
        return upcast_to_float32(unpatchify(out, grid, self.config.patch_size, latent_size))

    def _positions(
        self,
        grid: tuple[int, int, int],
        sizes: list[tuple[float, float]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Position embedding (1 or B, 1, S, C).

        Upstream uses the first sample's pixel size for all samples.
        """
        num_rows, num_columns = grid[1:]
        base_size = round(math.sqrt(num_rows * num_columns))
        tables = []
        for height, width in sizes if len(set(sizes)) > 1 else sizes[:1]:
            scale = math.sqrt(height * width) / self.config.input_sq_size
            rows = [i / scale * base_size / num_rows for i in range(num_rows)]
            columns = [j / scale * base_size / num_columns for j in range(num_columns)]
            size = self.config.hidden_size
            tables.append(sincos_2d(rows, columns, size, dtype=dtype, device=device))
        return torch.stack(tables)[:, None]
