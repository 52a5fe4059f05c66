"""Components of Open-Sora 2.0 (T5, CLIP, denoiser, autoencoder, FLUX): builders, requirements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from everyframe.families.clip_encoder import build_text_model
from everyframe.families.opensora2.config import MMDiTConfig, OpenSora2Config
from everyframe.families.t5_tokenizer import T5_ISLANDS, T5_RANGE_ISLANDS
from everyframe.parallel.token_partition import TokenPartition
from everyframe.precision.islands import present
from everyframe.precision.policy import ComponentNeeds
from everyframe.runtime.interface import RankShare
from everyframe.runtime.model_spec import ModuleBuilder
from everyframe.runtime.rank_shares import attention_share

if TYPE_CHECKING:
    from torch import nn

#: Float32 islands: modules that steer every block or start or end the residual streams. The blocks'
#: own modulation has a quarter of all parameters, and was trained in bfloat16.
DENOISER_ISLANDS = (
    "img_in", "cond_in", "txt_in", "time_in", "vector_in", "guidance_in", "final_layer",
)  # fmt: skip


@dataclass(frozen=True)
class OpenSora2Builder(ModuleBuilder[OpenSora2Config]):
    """Builds the components from their configs."""

    @property
    def component_names(self) -> tuple[str, ...]:
        first = ("first_denoiser", "first_vae") if self.config.first_denoiser else ()
        return ("text_encoder", "clip", *first, "denoiser", "vae")

    def text_encoder(self) -> nn.Module:
        from everyframe.families.t5_encoder import build_encoder

        return build_encoder(self.config.text)

    def clip(self) -> nn.Module:
        return build_text_model(self.config.clip)

    def denoiser(self) -> nn.Module:
        from everyframe.families.opensora2.mmdit import MMDiT

        return MMDiT(self.config.denoiser)

    def vae(self) -> nn.Module:
        from everyframe.families.opensora2.vae import build

        return build(self.config.vae)

    def first_denoiser(self) -> nn.Module:
        from everyframe.families.opensora2.mmdit import MMDiT

        assert self.config.first_denoiser is not None
        return MMDiT(self.config.first_denoiser)

    def first_vae(self) -> nn.Module:
        from everyframe.families.opensora2.first_picture import build_vae

        return build_vae(self.config.first_vae)

    def outputs(self, component: str) -> tuple[str, ...]:
        if component == "first_vae":
            return ("decoder",)
        if component != "vae":
            return ("",)
        is_plain = self.config.vae.is_high_compression
        return ("decoder", "encoder") if is_plain else ("decoder", "quant_conv")

    def needs(self) -> tuple[tuple[ComponentNeeds, str, str], ...]:
        def islands(component: str, patterns: tuple[str, ...]) -> tuple[str, ...]:
            return present(patterns, self.num_elements[component])

        def denoiser(name: str) -> ComponentNeeds:
            return self.need(name, islands(name, DENOISER_ISLANDS))

        text = self.need("text_encoder", T5_ISLANDS, range_islands=T5_RANGE_ISLANDS)
        found = [
            (text, "T5 text encoder", "text"),
            # Small, and in float32 upstream too.
            (self.need("clip", prefers="float32"), "CLIP text encoder", "clip text"),
        ]
        if self.config.first_denoiser:
            vae = self.need("first_vae", prefers="float32")
            found += [
                (denoiser("first_denoiser"), "FLUX.1 denoiser", "first picture"),
                (vae, "FLUX.1 autoencoder", "decode first picture"),
            ]
        return (
            *found,
            (denoiser("denoiser"), "MMDiT denoiser", "denoise"),
            # Decoded pixels are the product: float32 unless asked, or certified, otherwise.
            (self.need_of_decoder("vae"), "video autoencoder", "decode"),
        )


def rank_share(
    config: MMDiTConfig, partition: TokenPartition, backend: str, rank: int, width: int
) -> RankShare:
    """A rank's share of one step of a sharded denoiser, with `width` bytes per number."""
    blocks = config.depth + config.depth_single_blocks
    vector_bytes = blocks * config.head_size * width
    # Text tokens included.
    return attention_share(partition, backend, rank, vector_bytes, config.in_channels * 4)
