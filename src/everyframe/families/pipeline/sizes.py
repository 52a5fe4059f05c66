"""What size, length and frame rate a pipeline makes if nobody says: read from configs and classes.

Also how pixels become latents, as far as the configs say it. Pure data in, numbers out; `configs`
are those of the components by name. Read next: `settle.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from everyframe.families.pipeline import released
from everyframe.families.pipeline.interface import Interface

Configs = Mapping[str, Mapping[str, Any]]

_DENOISER_NAMES = ("transformer", "unet")


def denoisers(names: Any) -> tuple[str, ...]:
    """Those of the components that denoise: one, or two for two experts."""
    return tuple(name for name in names if name.startswith(_DENOISER_NAMES))


@dataclass(frozen=True)
class Sizes:
    """A pipeline's sizes: its interface and its components' configs."""

    interface: Interface
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
        known = released.of(released.SIZES, self.interface.class_name)
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
        known = released.of(released.LENGTHS, self.interface.class_name)
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
        known = released.of(released.FRAME_RATES, self.interface.class_name)
        return (released.FRAME_RATE, False) if known is None else (known, True)

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
