"""Components of Step-Video (text encoders, denoiser, autoencoder): builders and requirements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everyframe.families.stepvideo.config import StepLLMConfig, StepVideoConfig
from everyframe.families.stepvideo.vae_config import StepVAEConfig
from everyframe.parallel.head_partition import HeadPartition, sent_vectors
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from everyframe.precision.policy import ComponentNeeds
from everyframe.runtime.interface import Component, RankShare
from everyframe.runtime.model_spec import ModuleBuilder

if TYPE_CHECKING:
    from torch import nn

#: Float32 islands: modules that steer every block or sum over all of them: timestep embedding,
#: modulation, norms, first and last layer of the residual stream.
DENOISER_ISLANDS = (
    "pos_embed", "adaln_single", "*scale_shift_table", "*.norm1", "*.norm2", "proj_out",
)  # fmt: skip
LLM_ISLANDS = ("*attention_norm", "*ffn_norm")

#: Hunyuan CLIP's sizes as far as known, for plans made before download.
HUNYUAN_CLIP: Mapping[str, Any] = {
    "model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "vocab_size": 47020, "max_position_embeddings": 512,
    "type_vocab_size": 2,
}  # fmt: skip

#: Name, title, stage; in execution order.
PARTS = (
    ("step_llm", "Step-LLM text encoder", "text"),
    ("clip", "CLIP text encoder", "clip text"),
    ("denoiser", "Step-Video denoiser", "denoise"),
    ("vae", "video autoencoder", "decode"),
)


@dataclass(frozen=True)
class StepVideoBuilder(ModuleBuilder):
    """Builds the components from their configs; `llm_bias` is Step-LLM's bias (`llm.Bias`)."""

    denoiser: StepVideoConfig
    llm: StepLLMConfig
    clip: Mapping[str, Any]
    vae: StepVAEConfig
    llm_bias: str = "sqrt"

    @property
    def parts(self) -> tuple[str, ...]:
        """Component names."""
        return tuple(name for name, *_ in PARTS)

    def build(self, component: str) -> nn.Module:
        """Build one component by name, without weights."""
        made: nn.Module = self.builder(component)()
        return made

    def builder(self, component: str) -> Callable[[], Any]:
        """Function that builds one component without weights."""
        from everyframe.families.stepvideo.llm import Bias, StepLLM
        from everyframe.families.stepvideo.model import StepVideoModel
        from everyframe.families.stepvideo.text import build_clip
        from everyframe.families.stepvideo.vae import StepVAE

        builders: Mapping[str, Callable[[], Any]] = {
            "step_llm": lambda: StepLLM(self.llm, Bias(self.llm_bias)),
            "clip": lambda: build_clip(self.clip),
            "denoiser": lambda: StepVideoModel(self.denoiser),
            "vae": lambda: StepVAE(self.vae),
        }
        return builders[component]

    def outputs(self, component: str) -> tuple[str, ...]:
        """Submodules whose results go to the engine, in float32 or wider."""
        return ("decoder",) if component == "vae" else ("",)


def token_grid(sizes: StepVideoBuilder, latents: tuple[int, ...], branches: int) -> TokenGrid:
    """Branches, heads and tokens of a video's attention; `latents` are (C, T, h, w)."""
    _, frames, height, width = latents
    patch = sizes.denoiser.patch_size
    tokens = frames * (height // patch) * (width // patch)
    return TokenGrid(branches, sizes.denoiser.num_attention_heads, tokens)


def rank_share(
    config: StepVideoConfig, deal: TokenPartition, way: str, rank: int, width: int
) -> RankShare:
    """A rank's share of one step of a sharded denoiser, with `width` bytes per number.

    See `sharding`: each block exchanges one-head vectors, and the last projection is gathered in
    float32.
    """
    tokens = len(deal.columns[rank])
    held = tokens / (deal.grid.samples * deal.grid.places)
    heads = HeadPartition(deal)
    looks = held if way == "ring" else heads.share(rank)
    vectors = sent_vectors(deal, rank) if way == "ring" else heads.moved(rank)
    channels = config.patch_size**2 * config.made_channels
    sent = vectors * config.num_layers * config.attention_head_dim * width
    sent += tokens * channels * 4 * (deal.num_ranks - 1)
    idle = "" if tokens else "there are fewer tokens than devices; it decodes only"
    if looks and not tokens:
        idle = "there are fewer tokens than devices: it works in attention and decoding alone"
    return RankShare(held, looks, sent, idle)


def components(sizes: StepVideoBuilder, sources: Mapping[str, str]) -> tuple[Component, ...]:
    """Both text encoders, denoiser and autoencoder, in the order in which they run."""
    count = sizes.num_elements
    total = {name: sum(elements.values()) for name, elements in count.items()}
    needs = {
        "step_llm": ComponentNeeds("step_llm", total["step_llm"], LLM_ISLANDS),
        # Small, and in float32 upstream too.
        "clip": ComponentNeeds("clip", total["clip"], prefers="float32"),
        "denoiser": ComponentNeeds("denoiser", total["denoiser"], DENOISER_ISLANDS),
        # Decoded pixels are the product: float32 unless asked otherwise.
        "vae": ComponentNeeds("vae", total["vae"], prefers="float32"),
    }
    return tuple(
        Component(name, title, stage, sources[name], count[name], needs[name])
        for name, title, stage in PARTS
    )
