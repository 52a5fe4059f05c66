"""Components of an Open-Sora model (T5, denoiser, autoencoder): builders, sizes, requirements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Settings
from everyframe.families.opensora.config import STDiT3Config, STDiTConfig
from everyframe.families.opensora.vae_config import ImageVAEConfig, VideoVAEConfig
from everyframe.precision.policy import ComponentNeeds
from everyframe.runtime.interface import Component
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
PARTS = ("text_encoder", "denoiser", "vae")
T5_ISLANDS = ("*layer_norm",)
#: T5's `wo` overflows fp16; transformers runs it in float32 for the same reason.
T5_RANGE_ISLANDS = ("*.wo",)


@dataclass(frozen=True)
class OpenSoraBuilder(ModuleBuilder):
    """Builds the three components from their configs."""

    denoiser: STDiTConfig | STDiT3Config
    vae: ImageVAEConfig | VideoVAEConfig
    text: Mapping[str, Any]

    @property
    def parts(self) -> tuple[str, ...]:
        """Component names."""
        return PARTS

    def build(self, component: str) -> nn.Module:
        """Build one component by name, without weights."""
        builders: Mapping[str, Callable[[], nn.Module]] = {
            "text_encoder": self.build_text,
            "denoiser": self.build_denoiser,
            "vae": self.build_vae,
        }
        return builders[component]()

    def outputs(self, component: str) -> tuple[str, ...]:
        """Submodules whose results go to the engine, in float32 or wider."""
        if component != "vae":
            return ("",)
        image = isinstance(self.vae, ImageVAEConfig)
        spatial = "module" if image else "spatial_vae.module"
        return (f"{spatial}.decoder", f"{spatial}.encoder", f"{spatial}.quant_conv")

    def build_denoiser(self) -> STDiT | STDiT3:
        """Build the denoiser without weights."""
        return build_model(self.denoiser)

    def build_vae(self) -> ImageVAE | VideoVAE:
        """Build the autoencoder without weights."""
        from everyframe.families.opensora.vae import ImageVAE, VideoVAE

        return ImageVAE(self.vae) if isinstance(self.vae, ImageVAEConfig) else VideoVAE(self.vae)

    def build_text(self) -> nn.Module:
        """Build the T5 encoder without weights."""
        from everyframe.families.opensora.text import build_encoder

        return build_encoder(self.text)


def components(
    sizes: OpenSoraBuilder, sources: Mapping[str, str], prefers: str
) -> tuple[Component, ...]:
    """Text encoder, denoiser and autoencoder, in the order in which they run."""
    count = sizes.num_elements

    total = {name: sum(elements.values()) for name, elements in count.items()}
    text = ComponentNeeds(
        "text_encoder", total["text_encoder"], T5_ISLANDS, T5_RANGE_ISLANDS, prefers
    )
    islands = DENOISER_ISLANDS if isinstance(sizes.denoiser, STDiTConfig) else DENOISER_ISLANDS_1_2
    denoiser = ComponentNeeds("denoiser", total["denoiser"], islands, prefers=prefers)
    # Decoded pixels are the product: float32 unless asked otherwise.
    vae = ComponentNeeds("vae", total["vae"], prefers="float32")
    parts = (
        (text, "T5 text encoder", "text"),
        (denoiser, "STDiT denoiser", "denoise"),
        (vae, "video autoencoder", "decode"),
    )
    return tuple(
        Component(need.name, title, stage, sources[need.name], count[need.name], need)
        for need, title, stage in parts
    )


def token_sizes(sizes: OpenSoraBuilder, settings: Settings) -> tuple[int, int]:
    """Latent frames and patches per frame of a video's tokens; patches cover the latents."""
    latents = sizes.vae.latent_size(settings.num_frames, settings.height, settings.width)
    patches = [-(-n // patch) for n, patch in zip(latents, sizes.denoiser.patch_size, strict=True)]
    return patches[0], patches[1] * patches[2]


def sent_bytes(
    config: STDiTConfig | STDiT3Config, deal: TokenPartition, rank: int, element_bytes: int
) -> int:
    """Bytes that a rank sends in each step of a denoiser sharded by `deal`.

    Each spatial attention exchanges tokens twice, `element_bytes` per number; the last projection
    is gathered in float32. See `sharding`.
    """
    moved = config.depth * deal.moved(rank) * config.hidden_size * element_bytes
    channels = math.prod(config.patch_size) * config.out_channels
    held = len(deal.columns[rank]) * deal.grid.frames
    return moved + held * channels * 4 * (deal.num_ranks - 1)
