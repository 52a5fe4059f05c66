"""The parts of ControlNet inpainting: how they are built, and what they need.

The modules are diffusers' and transformers' own. Forecasts count the tensors that are alive at the
peak of each part. Read next: `stages.py`, which runs the parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from everyframe.core.errors import CheckpointError
from everyframe.core.plan import Settings
from everyframe.families.family import Component
from everyframe.families.inpaint.config import InpaintConfig
from everyframe.families.inpaint.settle import geometry_of
from everyframe.families.loading import count_parameters
from everyframe.precision.policy import ComponentNeeds

if TYPE_CHECKING:
    from torch import nn

#: What steers every block, or starts and ends the residual stream, stays in float32.
UNET_ISLANDS = ("time_embedding", "conv_in", "conv_norm_out", "conv_out", "*norm*")
CONTROLNET_ISLANDS = ("time_embedding", "conv_in", "*norm*")
TEXT_ENCODER_ISLANDS = ("*layer_norm*",)


@dataclass(frozen=True)
class Builders:
    """Makes the empty modules from their configs."""

    config: InpaintConfig

    @cached_property
    def num_elements(self) -> Mapping[str, Mapping[str, int]]:
        """Elements of each tensor of each component; counted once, for building takes a while."""
        builders: dict[str, Callable[[], nn.Module]] = {
            "text_encoder": self.text_encoder,
            "vae": self.vae,
        }
        for number in range(len(self.config.controlnets)):
            builders[controlnet_name(number)] = partial(self.controlnet, number)
        builders["unet"] = self.unet
        return {name: count_parameters(build) for name, build in builders.items()}

    def text_encoder(self) -> nn.Module:
        """An empty `CLIPTextModel`."""
        import torch
        from transformers import CLIPTextConfig, CLIPTextModel

        model: Any = CLIPTextModel(CLIPTextConfig(**_without_notes(self.config.text_encoder)))
        # A table that no checkpoint holds; made for real, as the rest is made on meta.
        embeddings = getattr(model, "text_model", model).embeddings
        positions = torch.arange(self.config.num_tokens, device="cpu")[None]
        embeddings.register_buffer("position_ids", positions, persistent=False)
        made: nn.Module = model
        return made

    def vae(self) -> nn.Module:
        """An empty `AutoencoderKL`."""
        from diffusers import AutoencoderKL

        return _made(AutoencoderKL, self.config.vae)

    def unet(self) -> nn.Module:
        """An empty `UNet2DConditionModel`."""
        from diffusers import UNet2DConditionModel

        return _made(UNet2DConditionModel, self.config.unet)

    def controlnet(self, number: int) -> nn.Module:
        """An empty `ControlNetModel`, the one of that number."""
        from diffusers import ControlNetModel

        return _made(ControlNetModel, self.config.controlnets[number])


def controlnet_name(number: int) -> str:
    """The component's name: ``controlnet``, ``controlnet_1``, …, as diffusers calls its folders."""
    return f"controlnet_{number}" if number else "controlnet"


def _without_notes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes alone: names with an underscore say who saved the file."""
    return {name: value for name, value in config.items() if not name.startswith("_")}


def _made(kind: Any, config: Mapping[str, Any]) -> nn.Module:
    """The module of that config; what its class does not know must say nothing."""
    values = _without_notes(config)
    unknown = sorted(set(values) - set(inspect.signature(kind.__init__).parameters))
    telling = [name for name in unknown if values[name] not in (None, False)]
    if telling:
        raise CheckpointError(
            f"a config of {kind.__name__} has {', '.join(telling)}, which the installed diffusers "
            "does not know; update diffusers"
        )
    model: nn.Module = kind(**{name: values[name] for name in values if name not in unknown})
    return model


def components(
    builders: Builders, settings: Settings, places: Mapping[str, str]
) -> tuple[Component, ...]:
    """Text encoder, autoencoder, ControlNets, denoiser; `places` says where each lies."""
    config, count = builders.config, builders.num_elements
    total = {name: sum(elements.values()) for name, elements in count.items()}
    nets = [controlnet_name(number) for number in range(len(config.controlnets))]
    text = ComponentNeeds(
        "text_encoder", total["text_encoder"], TEXT_ENCODER_ISLANDS, prefers="float16"
    )
    # Decoded pixels are the product: float32 unless asked otherwise.
    vae = ComponentNeeds("vae", total["vae"], prefers="float32", force_upcast=config.force_upcast)
    parts: list[tuple[ComponentNeeds, str, str, Any]] = [
        (text, "CLIP text encoder", "text", partial(_text_bytes, config)),
        (vae, "autoencoder", "decode", partial(_vae_bytes, config, settings)),
    ]
    for net in nets:
        need = ComponentNeeds(net, total[net], CONTROLNET_ISLANDS, prefers="float16")
        parts.append((need, "ControlNet", "denoise", partial(_blocks_bytes, config, settings)))
    unet = ComponentNeeds("unet", total["unet"], UNET_ISLANDS, prefers="float16")
    parts.append((unet, "UNet", "denoise", partial(_unet_bytes, config, settings)))
    return tuple(
        Component(
            need.name, title, stage, places[need.name], count[need.name], need, working
        )
        for need, title, stage, working in parts
    )  # fmt: skip


def _text_bytes(config: InpaintConfig, element: int) -> int:
    """The widest hidden layer of one block, for one prompt."""
    sizes = config.text_encoder
    wide = 2 * int(sizes.get("intermediate_size", 2048)) + 6 * int(sizes.get("hidden_size", 512))
    return config.num_tokens * wide * (element + 4)


def _batch(settings: Settings) -> int:
    return (1 if settings.guidance_scale <= 1 else 2) * _together(settings)


def _together(settings: Settings) -> int:
    return min(int(settings.option("frames_at_once")), settings.num_frames)


def _latent_pixels(config: InpaintConfig, settings: Settings) -> int:
    height, width = geometry_of(config, settings).padded
    return (height // config.spatial_factor) * (width // config.spatial_factor)


def _blocks_bytes(config: InpaintConfig, settings: Settings, element: int) -> int:
    """One block at full resolution, for both guidance branches, and what skips wait with."""
    channels = [int(c) for c in config.unet.get("block_out_channels", (320, 640, 1280, 1280))]
    given = config.unet.get("layers_per_block", 2)
    layers = int(max(given) if isinstance(given, (list, tuple)) else given)
    tokens = _batch(settings) * _latent_pixels(config, settings)
    skips: int = sum((tokens >> 2 * i) * width * (layers + 1) for i, width in enumerate(channels))
    # Float32: the stream, its normed copies, the skip that is joined to it. Narrow: the gated
    # hidden layer of the feed-forward, eight times as wide, and its product.
    block = tokens * channels[0] * (4 * 6 + element * 14)
    return skips * 4 + block


def _unet_bytes(config: InpaintConfig, settings: Settings, element: int) -> int:
    """The UNet's own work, and what the ControlNets add, as wide as its skips."""
    own = _blocks_bytes(config, settings, element)
    return own + own // 3


def _vae_bytes(config: InpaintConfig, settings: Settings, element: int) -> int:
    """The last level of the decoder, and the frames that came out of it."""
    channels = [int(c) for c in config.vae.get("block_out_channels", (64,))]
    height, width = geometry_of(config, settings).padded
    pixels = _together(settings) * height * width
    return pixels * max(channels[:2]) * element * 4 + pixels * 3 * 4 * 4
