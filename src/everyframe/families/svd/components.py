"""Components of Stable Video Diffusion (image encoder, UNet, VAE): builders and requirements.

The modules are those of diffusers and transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everyframe.checkpoints.folder import without_notes
from everyframe.families.svd.config import SVDConfig
from everyframe.precision.islands import present
from everyframe.precision.policy import ComponentNeeds
from everyframe.runtime.model_spec import ModuleBuilder

if TYPE_CHECKING:
    from torch import nn

    from everyframe.families.svd.unet import VideoUNet
    from everyframe.parallel.token_partition import TokenPartition

#: Float32 islands: modules that steer every block, or start or end the residual stream: embeddings
#: of timestep, frame rate and motion, norms, mixing weights of space and time.
UNET_ISLANDS = (
    "time_embedding", "add_embedding", "conv_in", "conv_norm_out", "conv_out", "*norm*",
    "*mix_factor",
)  # fmt: skip
IMAGE_ENCODER_ISLANDS = ("*layrnorm", "*layer_norm*", "*layernorm", "visual_projection")


@dataclass(frozen=True)
class SVDBuilder(ModuleBuilder[SVDConfig]):
    """Builds the components from their configs, without weights."""

    component_names = ("image_encoder", "vae", "unet")

    def outputs(self, component: str) -> tuple[str, ...]:
        if component == "vae":
            # `encode` and `decode` don't call the module itself, so their last layers are named.
            last = "decoder" if self.config.decodes_together else "decoder.conv_out"
            return (last, "quant_conv")
        return ("conv_out",) if component == "unet" else ("",)

    def image_encoder(self) -> nn.Module:
        import torch
        from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

        model: Any = CLIPVisionModelWithProjection(
            CLIPVisionConfig(**without_notes(self.config.image_encoder))
        )
        # A table that no checkpoint holds: not built on meta.
        embeddings = model.vision_model.embeddings
        positions = torch.arange(embeddings.num_positions, device="cpu")[None]
        embeddings.register_buffer("position_ids", positions, persistent=False)
        made: nn.Module = model
        return made

    def unet(self) -> VideoUNet:
        from everyframe.families.svd.unet import build

        return build(without_notes(self.config.unet))

    def vae(self) -> nn.Module:
        from diffusers import AutoencoderKL, AutoencoderKLTemporalDecoder

        kind = AutoencoderKLTemporalDecoder if self.config.decodes_together else AutoencoderKL
        model: nn.Module = kind(**without_notes(self.config.vae))
        return model

    def needs(self) -> tuple[tuple[ComponentNeeds, str, str], ...]:
        islands = present(IMAGE_ENCODER_ISLANDS, self.num_elements["image_encoder"])
        encoder = self.need("image_encoder", islands, prefers="float16")
        # Decoded pixels are the product: float32 unless asked, or certified, otherwise.
        vae = self.need_of_decoder("vae", force_upcast=self.config.force_upcast)
        return (
            (encoder, "CLIP image encoder", "image"),
            (vae, "video autoencoder", "decode"),
            (self.need("unet", UNET_ISLANDS, prefers="float16"), "video UNet", "denoise"),
        )


def sent_bytes(
    unet: Any, size: tuple[int, int], partition: TokenPartition, rank: int, element_bytes: int
) -> int:
    """Bytes that a rank sends in each step of a `VideoUNet` sharded by `partition`; see `sharding`.

    `size` is that of the latents. Pixels are exchanged before and after each temporal block,
    `element_bytes` per number. Norm statistics are merged in float64; the output is gathered in
    float32.
    """
    from everyframe.parallel import distributed_moments
    from everyframe.parallel.token_partition import TokenGrid, TokenPartition

    branches, frames = partition.grid.samples, partition.grid.frames
    blocks = list(unet.down_blocks)
    sizes = level_sizes(*size, len(blocks))
    levels = [*zip(blocks, sizes, strict=True), (unet.mid_block, sizes[-1])]
    levels += zip(unet.up_blocks, reversed(sizes), strict=True)
    total: int = 0
    for block, (height, width) in levels:
        level = TokenPartition(
            TokenGrid(branches, frames, height * width), partition.weights, partition.groups
        )
        for resnet in block.resnets:
            time = resnet.temporal_res_block
            total += level.num_sent(rank) * time.out_channels * element_bytes
            norms = (
                (partition.rows, frames, time.norm1),
                (level.columns, height * width, time.norm2),
            )
            for spans, length, norm in norms:
                total += distributed_moments.sent_bytes(spans, length, rank, norm.num_groups)
        for module in getattr(block, "attentions", None) or ():
            layers = len(module.temporal_transformer_blocks)
            total += level.num_sent(rank) * layers * module.proj_in.out_features * element_bytes
    answer = len(partition.rows[rank]) * size[0] * size[1] * int(unet.conv_out.out_channels)
    return total + answer * 4 * (partition.num_ranks - 1)


def level_sizes(height: int, width: int, num_levels: int) -> list[tuple[int, int]]:
    """Rows and columns of a frame at each UNet level; halves are rounded up."""
    return [(-(-height // 2**level), -(-width // 2**level)) for level in range(num_levels)]
