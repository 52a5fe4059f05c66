"""Components of Step-Video (text encoders, denoiser, autoencoder): builders and requirements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from everyframe.families.stepvideo.config import StepVideoConfig, StepVideoModelConfig
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from everyframe.precision.policy import ComponentNeeds
from everyframe.runtime.interface import RankShare
from everyframe.runtime.model_spec import ModuleBuilder
from everyframe.runtime.rank_shares import attention_share

if TYPE_CHECKING:
    from torch import nn

#: Float32 islands: modules that steer every block or sum over all of them: timestep embedding,
#: modulation, norms, first and last layer of the residual stream.
DENOISER_ISLANDS = (
    "pos_embed", "adaln_single", "*scale_shift_table", "*.norm1", "*.norm2", "proj_out",
)  # fmt: skip
LLM_ISLANDS = ("*attention_norm", "*ffn_norm")


@dataclass(frozen=True)
class StepVideoBuilder(ModuleBuilder[StepVideoConfig]):
    """Builds the components from their configs."""

    component_names = ("step_llm", "clip", "denoiser", "vae")

    def step_llm(self) -> nn.Module:
        from everyframe.families.stepvideo.llm import Bias, StepLLM

        return StepLLM(self.config.llm, Bias(self.config.llm_bias))

    def clip(self) -> nn.Module:
        from everyframe.families.stepvideo.text import build_clip

        return build_clip(self.config.clip)

    def denoiser(self) -> nn.Module:
        from everyframe.families.stepvideo.model import StepVideoModel

        return StepVideoModel(self.config.denoiser)

    def vae(self) -> nn.Module:
        from everyframe.families.stepvideo.vae import StepVAE

        return StepVAE(self.config.vae)

    def outputs(self, component: str) -> tuple[str, ...]:
        return ("decoder",) if component == "vae" else ("",)

    def needs(self) -> tuple[tuple[ComponentNeeds, str, str], ...]:
        return (
            (self.need("step_llm", LLM_ISLANDS), "Step-LLM text encoder", "text"),
            # Small, and in float32 upstream too.
            (self.need("clip", prefers="float32"), "CLIP text encoder", "clip text"),
            (self.need("denoiser", DENOISER_ISLANDS), "Step-Video denoiser", "denoise"),
            # Decoded pixels are the product: float32 unless asked, or certified, otherwise.
            (self.need_of_decoder("vae"), "video autoencoder", "decode"),
        )


def token_grid(config: StepVideoConfig, latents: tuple[int, ...], branches: int) -> TokenGrid:
    """Branches, heads and tokens of a video's attention; `latents` are (C, T, h, w)."""
    _, frames, height, width = latents
    patch = config.denoiser.patch_size
    tokens = frames * (height // patch) * (width // patch)
    return TokenGrid(branches, config.denoiser.num_attention_heads, tokens)


def rank_share(
    config: StepVideoModelConfig, partition: TokenPartition, backend: str, rank: int, width: int
) -> RankShare:
    """A rank's share of one step of a sharded denoiser, with `width` bytes per number."""
    vector_bytes = config.num_layers * config.attention_head_dim * width
    channels = config.patch_size**2 * config.made_channels
    return attention_share(partition, backend, rank, vector_bytes, channels * 4)
