"""Configs of an inpainting checkpoint's components, as data. No torch here.

Read from the JSON files of diffusers' folders, or from `released` for a released model that is not
downloaded yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everyframe.checkpoints.config_errors import check_classes, check_positive
from everyframe.checkpoints.folder import read_package_data
from everyframe.core.errors import CheckpointError
from everyframe.runtime.request_checks import AutoencoderSizes

#: UNet input channels: latents only, or latents, mask and masked source.
PLAIN_CHANNELS, INPAINTING_CHANNELS = 4, 9

#: Supported diffusers schedulers. All need only `set_timesteps` and `step`. Excluded are those that
#: need extra packages (LMS, DPM++ SDE) or another kind of model.
SCHEDULERS = (
    "PNDMScheduler", "DDIMScheduler", "DDPMScheduler", "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler", "HeunDiscreteScheduler", "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler", "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler", "DEISMultistepScheduler", "UniPCMultistepScheduler",
    "LCMScheduler",
)  # fmt: skip

_CLASSES = {
    "unet": ("UNet2DConditionModel",), "vae": ("AutoencoderKL",), "scheduler": SCHEDULERS,
}  # fmt: skip

#: Sizes in which ControlNet and UNet must agree: the ControlNet adds to the UNet's residuals.
_SHARED = {
    "block_out_channels": [320, 640, 1280, 1280],
    "layers_per_block": 2,
    "cross_attention_dim": 1280,
    "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
}


def released(unet_channels: int) -> Mapping[str, Mapping[str, Any]]:
    """Configs of Stable Diffusion 1.5 and its inpainting model, for use before download."""
    configs: Mapping[str, Mapping[str, Any]] = read_package_data("families/inpaint/released.yaml")
    return {**configs, "unet": {**configs["unet"], "in_channels": unet_channels}}


@dataclass(frozen=True)
class InpaintConfig(AutoencoderSizes):
    """Configs of the components, as their libraries take them; one entry per ControlNet.

    `pipeline` is the class that the checkpoint's index names.
    """

    unet: Mapping[str, Any]
    vae: Mapping[str, Any]
    text_encoder: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    controlnets: tuple[Mapping[str, Any], ...]
    pipeline: str = ""
    has_safety_checker: bool = False

    @classmethod
    def from_json(
        cls,
        source: str,
        configs: Mapping[str, Mapping[str, Any]],
        controlnets: tuple[tuple[str, Mapping[str, Any] | None], ...],
        pipeline: str = "",
        has_safety_checker: bool = False,
    ) -> InpaintConfig:
        """Build from the base model's configs by folder, and each ControlNet's name and config.

        A ControlNet's config may be None: it is not downloaded, and assumed to fit the UNet.

        Raises:
            CheckpointError: an unsupported class or size; names `source` or the ControlNet.
        """
        check_classes(source, configs, _CLASSES, ", ")
        kind = configs["text_encoder"].get("model_type", "clip_text_model")
        if kind not in ("clip_text_model", "clip"):
            raise CheckpointError(
                f"{source}: the text encoder is a {kind!r} model, expected CLIP's"
            )
        check_positive(configs["vae"], ("scaling_factor",), f"{source}: vae")
        made = cls(
            unet=configs["unet"],
            vae=configs["vae"],
            text_encoder=configs["text_encoder"],
            scheduler=configs["scheduler"],
            controlnets=tuple(
                _like(configs["unet"]) if config is None else config for _, config in controlnets
            ),
            pipeline=pipeline,
            has_safety_checker=has_safety_checker,
        )
        made._check_unet(source)
        for (name, _), config in zip(controlnets, made.controlnets, strict=True):
            made._check_controlnet(name, config)
        return made

    @property
    def takes_mask(self) -> bool:
        """Whether mask and masked source are UNet inputs; else known latents are pasted back."""
        return int(self.unet.get("in_channels", 4)) == INPAINTING_CHANNELS

    @property
    def num_tokens(self) -> int:
        """Tokens of a prompt, including begin and end tokens."""
        return int(self.text_encoder.get("max_position_embeddings", 77))

    @property
    def pools_control(self) -> bool:
        """Whether the ControlNet outputs one value per channel, which requires guess mode."""
        return any(bool(net.get("global_pool_conditions")) for net in self.controlnets[:1])

    def _check_unet(self, source: str) -> None:
        channels = int(self.unet.get("in_channels", 4))
        if channels not in (PLAIN_CHANNELS, INPAINTING_CHANNELS) or self.latent_channels != 4:
            raise CheckpointError(
                f"{source}: the denoiser takes {channels} channels and the autoencoder gives "
                f"{self.latent_channels}; a denoiser of {PLAIN_CHANNELS} or of "
                f"{INPAINTING_CHANNELS} and an autoencoder of 4 can be run"
            )
        width = int(self.text_encoder.get("hidden_size", 512))
        wanted = self.unet.get("cross_attention_dim", 1280)
        if wanted != width:
            raise CheckpointError(
                f"{source}: the text encoder gives {width} channels and the denoiser takes {wanted}"
            )

    def _check_controlnet(self, name: str, config: Mapping[str, Any]) -> None:
        found = config.get("_class_name", "ControlNetModel")
        if found != "ControlNetModel":
            raise CheckpointError(f"{name} is of class {found!r}, expected ControlNetModel")
        if config.get("addition_embed_type") is not None:
            raise CheckpointError(f"{name} is a ControlNet of Stable Diffusion XL, which can't run")
        if int(config.get("conditioning_channels", 3)) != 3:
            raise CheckpointError(
                f"{name} sees pictures of {config['conditioning_channels']} channels, expected 3"
            )
        for size, default in _SHARED.items():
            own, wanted = config.get(size, default), self.unet.get(size, default)
            if own != wanted:
                raise CheckpointError(
                    f"{name} was not made for this model: its {size} is {own}, the denoiser's "
                    f"{wanted}"
                )


def _like(unet: Mapping[str, Any]) -> Mapping[str, Any]:
    """Config of a ControlNet derived from this UNet."""
    kept = (
        *_SHARED, "attention_head_dim", "num_attention_heads", "use_linear_projection",
        "norm_num_groups", "act_fn", "only_cross_attention",
    )  # fmt: skip
    return {
        "_class_name": "ControlNetModel",
        "in_channels": PLAIN_CHANNELS,
        **{name: unet[name] for name in kept if name in unet},
    }
