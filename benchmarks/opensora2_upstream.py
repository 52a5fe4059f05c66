"""Upstream's own program for Open-Sora 2.0 as work and bytes: what its table should show.

No measurement. Work of the denoiser and of the autoencoder is that of diffusers' modules, which
compute the same; parameters and bytes are bfloat16, as upstream runs. How it divides them among
cards is read from hpcaitech/Open-Sora 7ad6a96: at 256px each linear layer by columns, then rows
(one all-reduce behind the rows); at 768px tokens in a ring. In both, convolutions of the
autoencoder are divided by channels. Every step computes three branches. Rates are those of a
profile but one: operations a second, the constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo, FluxTransformer2DModel

from everyframe.core.facts import DeviceFacts, Throughput
from everyframe.core.plan import Precision
from everyframe.dry_run.executor import DryRunModule, dry_run_modules
from everyframe.dry_run.result import DryRunResult
from everyframe.families.opensora2.config import MMDiTConfig
from everyframe.families.opensora2.vae_config import HunyuanVAEConfig
from everyframe.runtime.components.meta_init import build_on_meta

TEXT, BRANCHES, STEPS, FRAMES = 512, 3, 50, 33
#: Picture tokens of a latent frame at 16:9, and the autoencoder's tiles.
FRAME_TOKENS, TILES = {"256px": 252, "768px": 2304}, {"256px": 2, "768px": 18}
#: Bytes of weights in bfloat16: denoiser, T5, autoencoder, CLIP's text half. All stay on the card.
DENOISER_BYTES, OTHER_BYTES = 2 * 11_891_390_528, 2 * (4_762_310_656 + 246_478_803 + 123_060_480)
#: How often a block reads or writes a tensor as wide as its tokens, beside products: what tensor
#: parallelism divides (queries and keys normed and rotated, joined streams, the feed-forward's
#: inner numbers), and what every rank does whole (norms, modulation, gates, residuals).
DOUBLE_PASSES, SINGLE_PASSES = (4 + 4 + 6 + 8, 12 + 10), (4 + 4 + 8 + 10, 6 + 5)
#: Bytes a number that merging two results of a ring moves, in float32: two scaled, one sum.
MERGE_BYTES = (2 + 4) + (4 + 4) + (4 + 4 + 4)


@dataclass(frozen=True)
class UpstreamWork:
    """Dry runs of a denoiser step of all branches, by size, and of one tile of the decoder."""

    steps: dict[str, DryRunResult]
    tile: DryRunResult

    def seconds(self, size: str, cards: int, rate: float, profile: Throughput) -> float:
        """Seconds of a video, by `rate` operations a second."""
        link = profile.link or 0.0
        step = self._step(size, cards, profile, link)
        compute = self.steps[size].work.operations / rate / cards
        # Row by row in a loop, on every card: one kernel a token.
        mask = FRAMES * 32 * 32 * profile.launch
        tile = (
            self.tile.work.operations / rate + self.tile.work.moved_bytes / profile.memory
        ) / cards
        return STEPS * (compute + step) + TILES[size] * (tile + mask)

    def _step(self, size: str, cards: int, profile: Throughput, link: float) -> float:
        """Seconds of a step beside its products."""
        config = MMDiTConfig()
        tokens = BRANCHES * (TEXT + FRAMES * FRAME_TOKENS[size])
        wide = 2 * tokens * config.hidden_size
        blocks = (config.depth, config.depth_single_blocks)
        divided, whole = (
            wide * (blocks[0] * double + blocks[1] * single)
            for double, single in zip(DOUBLE_PASSES, SINGLE_PASSES, strict=True)
        )
        if size == "768px":
            merges = sum(blocks) * (cards - 1) * (wide // 2 / cards) * MERGE_BYTES
            return ((divided + whole) / cards + merges) / profile.memory
        reduced = (2 * blocks[0] + blocks[1]) * wide * 2 * (cards - 1) / cards
        return (divided / cards + whole) / profile.memory + reduced / link

    def peak(self, size: str, cards: int) -> float:
        """Bytes of the fullest card: two denoisers while it loads, then all that is not freed."""
        denoiser = DENOISER_BYTES / (cards if size == "256px" else 1)
        working = max(self.steps[size].working_bytes, self.tile.working_bytes) / cards
        return max(2.0 * DENOISER_BYTES, denoiser + OTHER_BYTES + working)


def upstream_work(card: DeviceFacts) -> UpstreamWork:
    """Dry-run both modules as that card would run them."""
    return UpstreamWork({size: _step(card, size) for size in FRAME_TOKENS}, _tile(card))


def _step(card: DeviceFacts, size: str) -> DryRunResult:
    config, tokens = MMDiTConfig(), FRAMES * FRAME_TOKENS[size]
    cond = config.in_channels + config.patch_size**2
    model = build_on_meta(
        lambda: FluxTransformer2DModel(
            in_channels=config.in_channels + cond,
            out_channels=config.in_channels,
            num_layers=config.depth,
            num_single_layers=config.depth_single_blocks,
            attention_head_dim=config.head_size,
            num_attention_heads=config.num_heads,
            joint_attention_dim=config.context_in_dim,
            pooled_projection_dim=config.vec_in_dim,
            guidance_embeds=False,
            axes_dims_rope=config.axes_dim,
        )
    )

    def call(device: str) -> object:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(BRANCHES, *shape, device=device, dtype=torch.bfloat16)

        return model(
            hidden_states=zeros(tokens, config.in_channels + cond),
            encoder_hidden_states=zeros(TEXT, config.context_in_dim),
            pooled_projections=zeros(config.vec_in_dim),
            timestep=zeros(),
            img_ids=torch.zeros(tokens, 3, device=device),
            txt_ids=torch.zeros(TEXT, 3, device=device),
            return_dict=False,
        )

    return _dry_run(model, call, card)


def _tile(card: DeviceFacts) -> DryRunResult:
    """Decoding of the first tile: 33 latent frames of 32 x 32, or of 24 x 32."""
    config = HunyuanVAEConfig()
    model: Any = build_on_meta(AutoencoderKLHunyuanVideo)

    def call(device: str) -> object:
        side = config.sample_size // config.spatial_factor
        shape = (1, config.latent_channels, FRAMES, side, side)
        latents = torch.zeros(shape, device=device, dtype=torch.bfloat16)
        return model.decoder(model.post_quant_conv(latents))

    return _dry_run(model, call, card)


def _dry_run(model: Any, call: Any, card: DeviceFacts) -> DryRunResult:
    parts = {"model": DryRunModule(model, Precision("bfloat16", "bfloat16"))}
    return dry_run_modules(parts, call, card).found["model"]
