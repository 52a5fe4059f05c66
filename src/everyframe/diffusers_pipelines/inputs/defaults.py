"""Default size, length and frame rate of a pipeline, read from configs and signatures.

Also the factors between pixels and latents, where the configs have them. Pure data in, numbers
out. `configs` maps component names to their configs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

from everyframe.diffusers_pipelines.inputs.signature import CallSignature
from everyframe.runtime.sampling_preset import SamplingPreset

_Value = TypeVar("_Value")

#: Frames per second of the written video, for pipelines without a frame rate parameter.
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

#: (height, width) that a pipeline's code falls back to, if neither signature nor config has it.
SIZES: Mapping[str, tuple[int, int]] = {
    "Cosmos2_5_Transfer": (704, 1280),  # of a control video of 16:9
    "Cosmos3": (720, 1280),
    "Mochi": (480, 848),
    "MiniMaxH3": (768, 1344),
    "Wan": (480, 832),
}
#: Frames, likewise, or where the code changes the number in the signature.
LENGTHS: Mapping[str, int] = {
    "Cosmos2_5_Transfer": 93,  # one of its pieces: it makes as many as its control video has
    "Cosmos3": 189,
    "LTX2": 121,
    "MiniMaxH3": 124,
    "SkyReelsV2DiffusionForcingVideoToVideo": 121,
    "Wan": 81,
}
#: Difference between requested and real steps: the request counts points, steps lie in between.
STEPS_FEWER: Mapping[str, int] = {"MiniMaxH3": 1}
#: Minimum number of steps of a dry run, where it is above 1.
FEWEST_STEPS: Mapping[str, int] = {"LTXI2VLongMultiPrompt": 2, "Mochi": 2}
#: Minimum number of steps of its own schedule: Mochi's divides by half of them, rounded down.
LEAST_SCHEDULED: Mapping[str, int] = {"Mochi": 2}

#: Pipelines whose code needs a negative prompt: they get an empty one if there is none.
EMPTY_NEGATIVE: Mapping[str, bool] = {"EasyAnimate": True}
#: Pipelines that only continue from latents which another pipeline's call left in memory.
GOES_ON: Mapping[str, str] = {"LTX2DFRTemporalRefine": "LTX2DFRPipeline"}
#: Pipelines whose video tensors are (batch, channels, frames, height, width), by diffusers' own
#: helpers; in all others frames come before channels.
CHANNELS_FIRST: Mapping[str, bool] = {"EasyAnimate": True}
#: Parameters that are lists of videos: of a bare list of frames the first one alone would be taken.
LISTS_OF_VIDEOS: Mapping[str, tuple[str, ...]] = {"LTXConditionPipeline": ("video",)}
#: Parameters whose videos have a size of their own, different from the generated video's.
OWN_SIZE: Mapping[str, tuple[str, ...]] = {"WanAnimate": ("face_video",)}


def of(table: Mapping[str, _Value], class_name: str) -> _Value | None:
    """The entry for the longest name that is a prefix of `class_name`."""
    fitting = [name for name in table if class_name.startswith(name)]
    return table[max(fitting, key=len)] if fitting else None


Configs = Mapping[str, Mapping[str, Any]]

_DENOISER_NAMES = ("transformer", "unet")


#: Classes of UNets, as configs have them, whose blocks `fast_paths.modules.deep_features` knows.
UNETS = (
    "UNet2DConditionModel", "UNet3DConditionModel", "UNetMotionModel", "I2VGenXLUNet",
    "UNetSpatioTemporalConditionModel",
)  # fmt: skip


def denoisers(names: Any) -> tuple[str, ...]:
    """The names of denoisers among the components: one, or two for two experts."""
    return tuple(name for name in names if name.startswith(_DENOISER_NAMES))


@dataclass(frozen=True)
class PipelineDefaults:
    """Defaults of a pipeline, from its call signature and its components' configs.

    `preset` are the settings of a step-distilled model, recognised by the file `preset_of`.
    """

    interface: CallSignature
    configs: Configs
    preset: SamplingPreset | None = None
    preset_of: str = ""

    @property
    def denoiser(self) -> Mapping[str, Any]:
        """Config of the first denoiser; empty if there is none."""
        names = denoisers(self.configs)
        return self.configs[names[0]] if names else {}

    @property
    def vae(self) -> Mapping[str, Any]:
        """Config of the VAE or diffusion decoder; empty if there is none."""
        return self.configs.get("vae") or self.configs.get("diffusion_decoder") or {}

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent along each side; 8 if the config does not give it."""
        for name in ("scale_factor_spatial", "spatial_compression_ratio"):
            given = self.vae.get(name)
            if is_number(given):
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
        """Frames per latent frame; None if the config does not give it."""
        for name in ("scale_factor_temporal", "temporal_compression_ratio"):
            given = self.vae.get(name)
            if is_number(given):
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
        """(height, width); None if only the pipeline's code knows it."""
        sides = [self.interface.default_of(name) for name in ("height", "width")]
        if all(isinstance(side, int) for side in sides):
            return sides[0], sides[1]
        known = of(SIZES, self.interface.class_name)
        if known is not None:
            return known
        if is_number(self.denoiser.get("target_size")):
            return _hunyuan_15(int(self.denoiser["target_size"]), self.spatial_factor)
        latent = [self.denoiser.get(name) for name in ("sample_height", "sample_width")]
        if not all(map(is_number, latent)):
            whole = self.denoiser.get("sample_size")
            latent = list(whole) if isinstance(whole, (list, tuple)) else [whole, whole]
        if len(latent) == 2 and is_number(latent[0]) and is_number(latent[1]):
            return int(latent[0]) * self.spatial_factor, int(latent[1]) * self.spatial_factor
        return None

    def default_length(self) -> int | None:
        """Number of frames; None if only the pipeline's code knows it."""
        known = of(LENGTHS, self.interface.class_name)
        if known is not None:
            return known
        frames = self.interface.default_of("num_frames")
        if isinstance(frames, int):
            return frames
        samples = self.denoiser.get("sample_frames")
        if is_number(samples):
            # Allegro counts latent frames there, CogVideoX frames.
            is_latent = self.interface.class_name.startswith("Allegro")
            return int(samples) * (self.temporal_factor or 1 if is_latent else 1)
        trained = self.denoiser.get("num_frames")  # Stable Video Diffusion's
        return int(trained) if is_number(trained) else None

    def frame_rate(self) -> tuple[float, bool]:
        """Frames per second, and whether it is known (True) or a guess."""
        own = self.interface.default_of("fps")
        if is_number(own):
            return float(own), True
        known = of(FRAME_RATES, self.interface.class_name)
        return (FRAME_RATE, False) if known is None else (known, True)

    def length_rule(self) -> tuple[int, int] | None:
        """(factor, rest): lengths must leave `rest` when divided by `factor`; None if unknown.

        The factor is the autoencoder's. The rest comes from the pipeline's default length, so
        nothing is assumed about whether its first frame stands alone.
        """
        factor, length = self.temporal_factor, self.default_length()
        if factor is None or factor < 2 or length is None:
            return None
        rest = length % factor
        return (factor, rest) if rest in (0, 1) else None


def _hunyuan_15(target: int, factor: int) -> tuple[int, int]:
    """HunyuanVideo 1.5's default size for 16:9, computed by diffusers' own code."""
    from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

    processor = HunyuanVideo15ImageProcessor(vae_scale_factor=factor)
    height, width = processor.calculate_default_height_width(9, 16, target)
    return int(height), int(width)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is a number; booleans are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
