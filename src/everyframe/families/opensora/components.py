"""The three parts of an Open-Sora model as components: how they are built, and what they need.

Forecasts count the tensors that are alive at the peak of each part; `tests/planning` holds them
against what is measured. Read next: `stages.py`, which runs the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Settings
from everyframe.families.family import Component
from everyframe.families.loading import build_on_meta, count_parameters
from everyframe.families.opensora.config import STDiT3Config, STDiTConfig
from everyframe.families.opensora.vae_config import ImageVAEConfig, VideoVAEConfig
from everyframe.precision.policy import ComponentNeeds

if TYPE_CHECKING:
    from torch import nn

    from everyframe.families.opensora.model import STDiT, STDiT3
    from everyframe.families.opensora.vae import ImageVAE, VideoVAE

#: What steers every block or sums over all of them stays in float32 (research on precision:
#: timestep embedding, modulation, norms, the layer that the residual stream starts and ends in).
DENOISER_ISLANDS = ("x_embedder", "t_embedder", "t_block", "*scale_shift_table", "final_layer")
#: 1.2's, whose frame rate is added to the timestep.
DENOISER_ISLANDS_1_2 = (*DENOISER_ISLANDS, "fps_embedder")
PARTS = ("text_encoder", "denoiser", "vae")
T5_ISLANDS = ("*layer_norm",)
#: T5's `wo` overflows fp16, and transformers keeps it wide for that reason.
T5_RANGE_ISLANDS = ("*.wo",)


@dataclass(frozen=True)
class Sizes:
    """The configs of the three parts."""

    denoiser: STDiTConfig | STDiT3Config
    vae: ImageVAEConfig | VideoVAEConfig
    text: Mapping[str, Any]

    @cached_property
    def num_elements(self) -> Mapping[str, Mapping[str, int]]:
        """Elements of each tensor of each component; counted once, for building takes a while."""
        return {name: count_parameters(partial(self.empty, name)) for name in PARTS}

    @cached_property
    def _empty(self) -> dict[str, nn.Module]:
        return {}

    def empty(self, component: str) -> nn.Module:
        """One part on meta, the same object at every call, for counting and for dry runs."""
        builders: Mapping[str, Callable[[], nn.Module]] = {
            "text_encoder": self.build_text,
            "denoiser": self.build_denoiser,
            "vae": self.build_vae,
        }
        if component not in self._empty:
            self._empty[component] = build_on_meta(builders[component])
        return self._empty[component]

    def outputs(self, component: str) -> tuple[str, ...]:
        """Which submodules' results leave for the engine, in float32 at least."""
        if component != "vae":
            return ("",)
        image = isinstance(self.vae, ImageVAEConfig)
        spatial = "module" if image else "spatial_vae.module"
        return (f"{spatial}.decoder", f"{spatial}.encoder", f"{spatial}.quant_conv")

    def saving(self, settings: Settings) -> Sizes:
        """These sizes, with as many frames in one call of the decoder as the plan allows."""
        vae = self.vae
        spatial = vae if isinstance(vae, ImageVAEConfig) else vae.spatial
        frames = settings.saving("decode_frames", spatial.micro_batch_size)
        if frames == spatial.micro_batch_size:
            return self
        fewer = replace(spatial, micro_batch_size=frames)
        if isinstance(vae, ImageVAEConfig):
            return replace(self, vae=fewer)
        return replace(self, vae=replace(vae, spatial=fewer))

    def build_denoiser(self) -> STDiT | STDiT3:
        """An empty denoiser."""
        from everyframe.families.opensora.model import build_model

        return build_model(self.denoiser)

    def build_vae(self) -> ImageVAE | VideoVAE:
        """An empty autoencoder."""
        from everyframe.families.opensora.vae import ImageVAE, VideoVAE

        return ImageVAE(self.vae) if isinstance(self.vae, ImageVAEConfig) else VideoVAE(self.vae)

    def build_text(self) -> nn.Module:
        """An empty T5 encoder."""
        from everyframe.families.opensora.text import build_encoder

        return build_encoder(self.text)


def components(
    sizes: Sizes, settings: Settings, sources: Mapping[str, str], prefers: str
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
        (text, "T5 text encoder", "text", partial(_text_bytes, sizes)),
        (denoiser, "STDiT denoiser", "denoise", partial(_denoiser_bytes, sizes, settings)),
        (vae, "video autoencoder", "decode", partial(_vae_bytes, sizes, settings)),
    )
    return tuple(
        Component(need.name, title, stage, sources[need.name], count[need.name], need, working)
        for need, title, stage, working in parts
    )


def _text_bytes(sizes: Sizes, element: int) -> int:
    """Scores and the widest hidden layer of one block for one padded prompt."""
    length = sizes.denoiser.model_max_length
    config = sizes.text
    scores = int(config["num_heads"]) * length * length * 4
    wide = length * (3 * int(config["d_ff"]) + 6 * int(config["d_model"]))
    return 2 * scores + wide * (element + 4)


def _denoiser_bytes(sizes: Sizes, settings: Settings, element: int) -> int:
    """One block at its widest, for both guidance branches, and the text's keys and values."""
    config = sizes.denoiser
    frames, height, width = sizes.vae.latent_size(
        settings.num_frames, settings.height, settings.width
    )
    patch_t, patch_h, patch_w = config.patch_size
    tokens = ceil(frames / patch_t) * ceil(height / patch_h) * ceil(width / patch_w)
    batch = 1 if settings.guidance_scale == 1 else 2
    stream = batch * tokens * config.hidden_size
    # Float32: the stream, its normed and modulated copies. Narrow: queries, keys and values with
    # their reordered copies, or the two halves of the MLP.
    block = stream * (4 * 8 + element * 6)
    num_blocks = config.depth * (1 if isinstance(config, STDiTConfig) else 2)
    text = num_blocks * 2 * batch * config.model_max_length * config.hidden_size * element
    # The text itself comes in float32.
    given = batch * config.model_max_length * config.caption_channels * 4
    return block + text + given


def _vae_bytes(sizes: Sizes, settings: Settings, element: int) -> int:
    """The last level of the spatial decoder for one micro-batch, and all frames that came out."""
    vae = sizes.vae
    spatial = vae.spatial if isinstance(vae, VideoVAEConfig) else vae
    channels = spatial.autoencoder.get("block_out_channels", (64,))
    pixels = settings.height * settings.width
    widest = int(max(channels[:2]))
    frames = min(settings.num_frames, spatial.micro_batch_size)
    level = frames * pixels * widest * element * 5
    finished = settings.num_frames * pixels * 3 * 4 * 2
    if not isinstance(vae, VideoVAEConfig):
        return level + finished
    piece = min(settings.num_frames, vae.micro_frame_size or settings.num_frames)
    latent_pixels = pixels // vae.spatial_factor**2
    temporal = piece * latent_pixels * vae.temporal.filters * 4 * element * 4
    return max(level, temporal) + finished
