"""Components of ControlNet inpainting: builders and requirements.

The modules are those of diffusers and transformers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everyframe.checkpoints.folder import without_notes
from everyframe.core.errors import CheckpointError
from everyframe.families.clip_encoder import build_text_model
from everyframe.families.inpaint.config import InpaintConfig
from everyframe.precision.policy import ComponentNeeds
from everyframe.runtime.model_spec import ModuleBuilder

if TYPE_CHECKING:
    from torch import nn

#: Float32 islands: modules that steer every block, or start or end the residual stream.
UNET_ISLANDS = ("time_embedding", "conv_in", "conv_norm_out", "conv_out", "*norm*")
CONTROLNET_ISLANDS = ("time_embedding", "conv_in", "*norm*")
TEXT_ENCODER_ISLANDS = ("*layer_norm*",)

#: Layers whose results are the residual stream, or outputs of the networks.
_WIDE = re.compile(
    r"conv_out|down_blocks\.\d+\.downsamplers\.\d+|up_blocks\.\d+\.upsamplers\.\d+"
    r"|.*\.conv_shortcut|controlnet_down_blocks\.\d+|controlnet_mid_block"
)


@dataclass(frozen=True)
class InpaintBuilder(ModuleBuilder[InpaintConfig]):
    """Builds the components from their configs, without weights."""

    @property
    def component_names(self) -> tuple[str, ...]:
        nets = map(controlnet_name, range(len(self.config.controlnets)))
        return ("text_encoder", "vae", *nets, "unet")

    def build(self, component: str) -> nn.Module:
        if component.startswith("controlnet"):
            return self.controlnet(self.component_names.index(component) - 2)
        return super().build(component)

    def outputs(self, component: str) -> tuple[str, ...]:
        if component == "vae":
            # `encode` and `decode` don't call the module itself, so their last layers are named.
            has_last = self.config.vae.get("use_quant_conv", True)
            return ("decoder.conv_out", "quant_conv" if has_last else "encoder.conv_out")
        if component == "text_encoder":
            return ("",)
        # UNet and ControlNets return tuples, so their layers are named, including those that
        # replace the residual stream: it stays wide throughout.
        names = (name for name, _ in self.empty(component).named_modules())
        return tuple(name for name in names if _WIDE.fullmatch(name))

    def text_encoder(self) -> nn.Module:
        return build_text_model(without_notes(self.config.text_encoder))

    def vae(self) -> nn.Module:
        from diffusers import AutoencoderKL

        return _build(AutoencoderKL, self.config.vae)

    def unet(self) -> nn.Module:
        from diffusers import UNet2DConditionModel

        return _build(UNet2DConditionModel, self.config.unet)

    def controlnet(self, number: int) -> nn.Module:
        from diffusers import ControlNetModel

        return _build(ControlNetModel, self.config.controlnets[number])

    def needs(self) -> tuple[tuple[ComponentNeeds, str, str], ...]:
        text = self.need("text_encoder", TEXT_ENCODER_ISLANDS, prefers="float16")
        # Decoded pixels are the product: float32 unless asked otherwise.
        vae = self.need("vae", prefers="float32", force_upcast=self.config.force_upcast)
        nets = (
            self.need(net, CONTROLNET_ISLANDS, prefers="float16")
            for net in self.component_names[2:-1]
        )
        return (
            (text, "CLIP text encoder", "text"),
            (vae, "autoencoder", "decode"),
            *((net, "ControlNet", "denoise") for net in nets),
            (self.need("unet", UNET_ISLANDS, prefers="float16"), "UNet", "denoise"),
        )


def controlnet_name(number: int) -> str:
    """Component name: ``controlnet``, ``controlnet_1``, …, like diffusers' folders."""
    return f"controlnet_{number}" if number else "controlnet"


def _build(kind: Any, config: Mapping[str, Any]) -> nn.Module:
    """Build the module of a config; config keys unknown to its class must have no effect."""
    values = without_notes(config)
    unknown = sorted(set(values) - set(inspect.signature(kind.__init__).parameters))
    telling = [name for name in unknown if values[name] not in (None, False)]
    if telling:
        raise CheckpointError(
            f"a config of {kind.__name__} has {', '.join(telling)}, which the installed diffusers "
            "does not know; update diffusers"
        )
    model: nn.Module = kind(**{name: values[name] for name in values if name not in unknown})
    return model
