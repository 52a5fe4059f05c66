"""What size, length and frame rate a pipeline makes if nobody says: read from configs and classes.

Also how pixels become latents, as far as the configs say it. Pure data in, numbers out; `configs`
are those of the components by name. Read next: `settings.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

from everyframe.diffusers_pipelines.signature import CallSignature

_Value = TypeVar("_Value")

#: Frames a second of the video that is written, where the pipeline takes no frame rate itself.
FRAME_RATES: Mapping[str, float] = {
    "Allegro": 15,
    "AnimateDiff": 8,
    "AnyFlow": 16,
    "ChronoEdit": 16,
    "CogVideoX": 8,
    "ConsisID": 8,
    "Cosmos": 16,
    "Cosmos2": 16,
    "Cosmos3": 24,
    "EasyAnimate": 8,
    "Helios": 24,
    "HunyuanVideo": 24,
    "HunyuanVideo15": 24,
    "I2VGenXL": 16,
    "Kandinsky5": 24,
    "Kandinsky6": 24,
    "LTX": 24,
    "Latte": 8,
    "LucyEdit": 24,
    "MiniMaxH3": 24,
    "Mochi": 30,
    "MotifVideo": 24,
    "PIA": 8,
    "SanaImageToVideo": 16,
    "SanaVideo": 16,
    "SkyReelsV2": 24,
    "TextToVideoSD": 8,
    "VideoToVideoSD": 8,
    "Wan": 16,
    "WanAnimate": 30,
}
FRAME_RATE = 24.0

#: (height, width) that a pipeline's code falls back to, where neither signature nor config say it.
SIZES: Mapping[str, tuple[int, int]] = {
    "Mochi": (480, 848),
    "MiniMaxH3": (768, 1344),
    "Wan": (480, 832),
}
#: Frames, likewise, or where the code makes another number of what the signature says.
LENGTHS: Mapping[str, int] = {
    "LTX2": 121,
    "MiniMaxH3": 124,
    "SkyReelsV2DiffusionForcingVideoToVideo": 121,
    "Wan": 81,
}
#: Steps that are fewer than what is asked for: a number of points, between which it steps.
STEPS_FEWER: Mapping[str, int] = {"MiniMaxH3": 1}
#: The fewest steps that its schedule can be made of, where one is too few.
FEWEST_STEPS: Mapping[str, int] = {"Mochi": 2}

#: Whose code can't do without a negative prompt: an empty one is given where there is none.
EMPTY_NEGATIVE: Mapping[str, bool] = {"EasyAnimate": True}
#: What goes on from latents that another pipeline's call left in memory, and from nothing else.
GOES_ON: Mapping[str, str] = {"LTX2DFRTemporalRefine": "LTX2DFRPipeline"}
#: Whose videos are tensors (batch, channels, frames, height, width), by diffusers' own helpers; of
#: others frames come before channels.
CHANNELS_FIRST: Mapping[str, bool] = {"EasyAnimate": True}
#: Parameters whose videos have a size of their own, which is not that of the video that is made.
OWN_SIZE: Mapping[str, tuple[str, ...]] = {"WanAnimate": ("face_video",)}


def of(table: Mapping[str, _Value], class_name: str) -> _Value | None:
    """The entry of the longest name that `class_name` begins with."""
    fitting = [name for name in table if class_name.startswith(name)]
    return table[max(fitting, key=len)] if fitting else None


Configs = Mapping[str, Mapping[str, Any]]

_DENOISER_NAMES = ("transformer", "unet")


def denoisers(names: Any) -> tuple[str, ...]:
    """Those of the components that denoise: one, or two for two experts."""
    return tuple(name for name in names if name.startswith(_DENOISER_NAMES))


@dataclass(frozen=True)
class PipelineDefaults:
    """A pipeline's sizes: its interface and its components' configs."""

    interface: CallSignature
    configs: Configs

    @property
    def denoiser(self) -> Mapping[str, Any]:
        """The config of the first denoiser; empty if there is none."""
        names = denoisers(self.configs)
        return self.configs[names[0]] if names else {}

    @property
    def vae(self) -> Mapping[str, Any]:
        """The config of what decodes pictures."""
        return self.configs.get("vae") or self.configs.get("diffusion_decoder") or {}

    @property
    def spatial_factor(self) -> int:
        """Pixels of one latent along each side, 8 where the config does not say."""
        for name in ("scale_factor_spatial", "spatial_compression_ratio"):
            given = self.vae.get(name)
            if _number(given):
                return int(given)
        halvings = self._halvings
        if halvings is not None:
            return int(self.vae.get("patch_size", 4)) << halvings
        channels = self.vae.get("block_out_channels")
        if isinstance(channels, (list, tuple)):
            return int(2 ** (len(channels) - 1))
        return 8

    @property
    def temporal_factor(self) -> int | None:
        """Frames of one latent frame where the config says it outright."""
        for name in ("scale_factor_temporal", "temporal_compression_ratio"):
            given = self.vae.get(name)
            if _number(given):
                return int(given)
        halvings = self._halvings
        if halvings is not None:
            return int(self.vae.get("patch_size_t", 1)) << halvings
        expansions = self.vae.get("temporal_expansions")
        return math.prod(expansions) if isinstance(expansions, (list, tuple)) else None

    @property
    def _halvings(self) -> int | None:
        """How often LTX's autoencoders halve all three sides; None for others."""
        levels = self.vae.get("spatio_temporal_scaling")
        return sum(levels) if isinstance(levels, (list, tuple)) else None

    def default_size(self) -> tuple[int, int] | None:
        """(height, width); None where only the pipeline itself knows."""
        sides = [self.interface.default_of(name) for name in ("height", "width")]
        if all(isinstance(side, int) for side in sides):
            return sides[0], sides[1]
        known = of(SIZES, self.interface.class_name)
        if known is not None:
            return known
        if _number(self.denoiser.get("target_size")):
            return _hunyuan_15(int(self.denoiser["target_size"]), self.spatial_factor)
        latent = [self.denoiser.get(name) for name in ("sample_height", "sample_width")]
        if not all(map(_number, latent)):
            whole = self.denoiser.get("sample_size")
            latent = list(whole) if isinstance(whole, (list, tuple)) else [whole, whole]
        if len(latent) == 2 and _number(latent[0]) and _number(latent[1]):
            return int(latent[0]) * self.spatial_factor, int(latent[1]) * self.spatial_factor
        return None

    def default_length(self) -> int | None:
        """Frames; None where only the pipeline itself knows."""
        known = of(LENGTHS, self.interface.class_name)
        if known is not None:
            return known
        frames = self.interface.default_of("num_frames")
        if isinstance(frames, int):
            return frames
        samples = self.denoiser.get("sample_frames")
        if _number(samples):
            # Allegro counts latent frames there, CogVideoX frames.
            is_latent = self.interface.class_name.startswith("Allegro")
            return int(samples) * (self.temporal_factor or 1 if is_latent else 1)
        return None

    def frame_rate(self) -> tuple[float, bool]:
        """Frames a second, and whether that is known or a guess."""
        own = self.interface.default_of("fps")
        if _number(own):
            return float(own), True
        known = of(FRAME_RATES, self.interface.class_name)
        return (FRAME_RATE, False) if known is None else (known, True)

    def length_rule(self) -> tuple[int, int] | None:
        """(factor, rest): lengths must leave `rest` when divided by `factor`; None if unknown.

        The factor is the autoencoder's; the rest is that of the pipeline's own default, so that
        nothing is assumed of whether its first frame stands alone.
        """
        factor, length = self.temporal_factor, self.default_length()
        if factor is None or factor < 2 or length is None:
            return None
        rest = length % factor
        return (factor, rest) if rest in (0, 1) else None


def _hunyuan_15(target: int, factor: int) -> tuple[int, int]:
    """HunyuanVideo 1.5's own choice for 16:9, by diffusers' code for it."""
    from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

    processor = HunyuanVideo15ImageProcessor(vae_scale_factor=factor)
    height, width = processor.calculate_default_height_width(9, 16, target)
    return int(height), int(width)


def _number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
