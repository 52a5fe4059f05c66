"""Components of an Open-Sora model (T5, denoiser, autoencoder): builders, sizes, requirements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from everyframe.core.plan import Settings
from everyframe.families.opensora.config import OpenSoraConfig, STDiT3Config, STDiTConfig
from everyframe.families.opensora.vae_config import ImageVAEConfig
from everyframe.families.t5_tokenizer import T5_ISLANDS, T5_RANGE_ISLANDS
from everyframe.precision.policy import ComponentNeeds
from everyframe.runtime.model_spec import ModuleBuilder

if TYPE_CHECKING:
    from torch import nn

    from everyframe.families.opensora.stdit import STDiT
    from everyframe.families.opensora.stdit3 import STDiT3
    from everyframe.families.opensora.vae import ImageVAE, VideoVAE
    from everyframe.parallel.token_partition import TokenPartition


def build_model(config: STDiTConfig | STDiT3Config) -> STDiT | STDiT3:
    """Build the denoiser; use ``torch.device("meta")`` if weights are loaded afterwards."""
    from everyframe.families.opensora.stdit import STDiT
    from everyframe.families.opensora.stdit3 import STDiT3

    return STDiT3(config) if isinstance(config, STDiT3Config) else STDiT(config)


#: Float32 islands (research on precision): modules that steer every block or sum over all of them:
#: timestep embedding, modulation, norms, first and last layer of the residual stream.
DENOISER_ISLANDS = ("x_embedder", "t_embedder", "t_block", "*scale_shift_table", "final_layer")
#: 1.2 also adds a frame-rate embedding to the timestep embedding.
DENOISER_ISLANDS_1_2 = (*DENOISER_ISLANDS, "fps_embedder")


@dataclass(frozen=True)
class OpenSoraBuilder(ModuleBuilder[OpenSoraConfig]):
    """Builds the three components from their configs."""

    component_names = ("text_encoder", "denoiser", "vae")

    def text_encoder(self) -> nn.Module:
        from everyframe.families.t5_encoder import build_encoder

        return build_encoder(self.config.text)

    def denoiser(self) -> STDiT | STDiT3:
        return build_model(self.config.denoiser)

    def vae(self) -> ImageVAE | VideoVAE:
        from everyframe.families.opensora.vae import ImageVAE, VideoVAE

        config = self.config.vae
        return ImageVAE(config) if isinstance(config, ImageVAEConfig) else VideoVAE(config)

    def outputs(self, component: str) -> tuple[str, ...]:
        if component != "vae":
            return ("",)
        image = isinstance(self.config.vae, ImageVAEConfig)
        spatial = "module" if image else "spatial_vae.module"
        return (f"{spatial}.decoder", f"{spatial}.encoder", f"{spatial}.quant_conv")

    def needs(self) -> tuple[tuple[ComponentNeeds, str, str], ...]:
        prefers = str(self.config.defaults.get("dtype", "bfloat16"))
        is_1_0 = isinstance(self.config.denoiser, STDiTConfig)
        islands = DENOISER_ISLANDS if is_1_0 else DENOISER_ISLANDS_1_2
        text = self.need(
            "text_encoder", T5_ISLANDS, range_islands=T5_RANGE_ISLANDS, prefers=prefers
        )
        return (
            (text, "T5 text encoder", "text"),
            (self.need("denoiser", islands, prefers=prefers), "STDiT denoiser", "denoise"),
            # Decoded pixels are the product: float32 unless asked, or certified, otherwise.
            (self.need_of_decoder("vae"), "video autoencoder", "decode"),
        )


def token_sizes(config: OpenSoraConfig, settings: Settings) -> tuple[int, int]:
    """Latent frames and patches per frame of a video's tokens; patches cover the latents."""
    latents = config.vae.latent_size(settings.num_frames, settings.height, settings.width)
    patches = [-(-n // patch) for n, patch in zip(latents, config.denoiser.patch_size, strict=True)]
    return patches[0], patches[1] * patches[2]


def sent_bytes(
    config: STDiTConfig | STDiT3Config, partition: TokenPartition, rank: int, element_bytes: int
) -> int:
    """Bytes that a rank sends in each step of a denoiser sharded by `partition`.

    Each spatial attention exchanges tokens twice, `element_bytes` per number; the last projection
    is gathered in float32. See `sharding`.
    """
    moved = config.depth * partition.num_sent(rank) * config.hidden_size * element_bytes
    channels = math.prod(config.patch_size) * config.out_channels
    held = len(partition.columns[rank]) * partition.grid.frames
    return moved + held * channels * 4 * (partition.num_ranks - 1)
