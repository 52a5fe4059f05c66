"""Configs of a Stable Video Diffusion checkpoint's components, as data. No torch here.

Read from the JSON files of a diffusers folder, or from `released` for a released model that is not
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
from everyframe.runtime.sampling_preset import SamplingPreset

#: Autoencoder classes of these pipelines: Stability's, which decodes frames together, and the image
#: autoencoder (the "image decoder" variants).
TEMPORAL_VAE = "AutoencoderKLTemporalDecoder"
IMAGE_VAE = "AutoencoderKL"

_CLASSES = {
    "unet": ("UNetSpatioTemporalConditionModel",),
    "vae": (TEMPORAL_VAE, IMAGE_VAE),
    "scheduler": ("EulerDiscreteScheduler",),
}

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

#: Required scheduler config. `sigma_min` and `sigma_max` are read; `timestep_spacing` determines
#: the scale of the initial noise.
_SCHEDULER = {
    "prediction_type": "v_prediction", "timestep_type": "continuous", "use_karras_sigmas": True,
    "final_sigmas_type": "zero",
}  # fmt: skip
_SCHEDULER_DEFAULTS: Mapping[str, Any] = {
    "prediction_type": "epsilon", "timestep_type": "discrete", "use_karras_sigmas": False,
    "final_sigmas_type": "zero", "timestep_spacing": "linspace",
}  # fmt: skip


def released() -> Mapping[str, Mapping[str, Any]]:
    """Configs of the released models, for plans made before download."""
    configs: Mapping[str, Mapping[str, Any]] = read_package_data("families/svd/released.yaml")
    return configs


@dataclass(frozen=True)
class SVDConfig(AutoencoderSizes):
    """Configs of the components, as their libraries take them, and scheduler and image numbers.

    `starts_scaled` is whether initial noise is scaled by ``sqrt(sigma^2 + 1)`` instead of sigma;
    `preset` are the settings of a step-distilled UNet.
    """

    unet: Mapping[str, Any]
    vae: Mapping[str, Any]
    image_encoder: Mapping[str, Any]
    sigma_min: float
    sigma_max: float
    starts_scaled: bool
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    preset: SamplingPreset | None = None

    @classmethod
    def from_json(cls, source: str, configs: Mapping[str, Mapping[str, Any]]) -> SVDConfig:
        """Build from the configs, by the folder of each.

        Raises:
            CheckpointError: a class, a scheduler or sizes that are not supported; names `source`.
        """
        check_classes(source, configs, _CLASSES, " or ")
        scheduler = {**_SCHEDULER_DEFAULTS, **configs["scheduler"]}
        _check_scheduler(source, scheduler)
        extractor = configs["feature_extractor"]
        for name in ("image_mean", "image_std"):
            if len(extractor.get(name) or _CLIP_MEAN) != len(_CLIP_MEAN):
                raise CheckpointError(f"{source}: its {name} must be of three colours")
        check_positive(extractor, ("image_mean", "image_std"), f"{source}: feature_extractor")
        check_positive(configs["vae"], ("scaling_factor",), f"{source}: vae")
        made = cls(
            unet=configs["unet"],
            vae=configs["vae"],
            image_encoder=_vision(configs["image_encoder"]),
            sigma_min=float(scheduler["sigma_min"]),
            sigma_max=float(scheduler["sigma_max"]),
            starts_scaled=scheduler["timestep_spacing"] == "leading",
            image_mean=tuple(extractor.get("image_mean") or _CLIP_MEAN),
            image_std=tuple(extractor.get("image_std") or _CLIP_STD),
        )
        made._check_fit(source)
        return made

    @property
    def decodes_together(self) -> bool:
        """Whether the decoder sees neighbouring frames."""
        return bool(self.vae["_class_name"] == TEMPORAL_VAE)

    @property
    def num_frames(self) -> int:
        return int(self.unet.get("num_frames", 25))

    @property
    def image_side(self) -> int:
        return int(self.image_encoder.get("image_size", 224))

    def _check_fit(self, source: str) -> None:
        channels = int(self.unet.get("in_channels", 8))
        if channels != 2 * self.latent_channels:
            raise CheckpointError(
                f"{source}: the denoiser takes {channels} channels and the autoencoder gives "
                f"{self.latent_channels}; it must be twice as many"
            )
        width = int(self.image_encoder.get("projection_dim", 512))
        wanted = self.unet.get("cross_attention_dim", 1024)
        wanted = [wanted] if isinstance(wanted, int) else list(wanted)
        if any(width != each for each in wanted):
            raise CheckpointError(
                f"{source}: the image encoder gives {width} channels and the denoiser takes "
                f"{', '.join(map(str, dict.fromkeys(wanted)))}"
            )


def _vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Vision half of a CLIP config that contains both halves."""
    nested = config.get("vision_config")
    return nested if isinstance(nested, Mapping) else config


def _check_scheduler(source: str, scheduler: Mapping[str, Any]) -> None:
    for name, wanted in _SCHEDULER.items():
        if scheduler[name] != wanted:
            raise CheckpointError(
                f"{source}: its scheduler has {name} {scheduler[name]!r}; only {wanted!r}, which "
                "Stable Video Diffusion was released with, can be sampled here"
            )
    for name in ("sigma_min", "sigma_max"):
        if scheduler.get(name) is None:
            raise CheckpointError(f"{source}: its scheduler has no {name}")
    check_positive(scheduler, ("sigma_min", "sigma_max"), f"{source}: scheduler")
