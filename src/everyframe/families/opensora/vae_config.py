"""Configs of Open-Sora's autoencoders, and frame to latent-frame arithmetic. No torch here.

`ImageVAEConfig` (Open-Sora 1.0) is diffusers' `AutoencoderKL` frame by frame: one latent frame per
frame. `VideoVAEConfig` (Open-Sora 1.2) adds a temporal stage that turns 17 frames into 5 latent
frames. The sizes that a *denoiser* was trained for are in `config`.

A video is coded in independent *pieces*. Their boundaries depend on the number of frames and these
sizes only, never on the number of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from everyframe.checkpoints.folder import without_notes
from everyframe.core.errors import CheckpointError, InputError, did_you_mean
from everyframe.runtime.request_checks import FrameChunk, LatentSizes

SDXL_VAE_SIZES: Mapping[str, Any] = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 4, "norm_num_groups": 32,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "act_fn": "silu",
    "sample_size": 1024,
}  # fmt: skip
"""`AutoencoderKL` sizes that Stable Diffusion's and SDXL's autoencoders share.

Open-Sora 1.2's config.json names only the hub repository that they were taken from.
"""

SCALING_FACTOR = 0.18215
"""What both upstream versions multiply spatial latents by, whatever their autoencoder's own
config.json says (SDXL's says 0.13025, and 1.2 was nevertheless trained with this one)."""


@dataclass(frozen=True)
class TemporalVAEConfig:
    """Config of the temporal stage; defaults are the released ones (upstream `VAE_Temporal_SD`).

    Attributes:
        in_out_channels: channels of the spatial latents.
        embed_dim: channels of the finished latents.
        temporal_downsample: entry i: whether time is halved between levels i and i + 1.
    """

    in_out_channels: int = 4
    latent_embed_dim: int = 4
    embed_dim: int = 4
    filters: int = 128
    num_res_blocks: int = 4
    channel_multipliers: tuple[int, ...] = (1, 2, 2, 4)
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    num_groups: int = 32

    def __post_init__(self) -> None:
        levels, steps = len(self.channel_multipliers), len(self.temporal_downsample)
        if steps != levels - 1:
            raise CheckpointError(
                f"temporal_downsample has {steps} entries and channel_multipliers {levels}; "
                "there must be one fewer of the first"
            )
        for multiplier in self.channel_multipliers:
            if (self.filters * multiplier) % self.num_groups:
                raise CheckpointError(
                    f"num_groups {self.num_groups} does not divide filters {self.filters} times "
                    f"the channel multiplier {multiplier}"
                )

    @property
    def downsample_factor(self) -> int:
        """Frames per latent frame."""
        return int(2 ** sum(self.temporal_downsample))

    def front_padding(self, num_frames: int) -> int:
        """Zero frames prepended to a clip to make its length divisible."""
        return -num_frames % self.downsample_factor

    def latent_frames(self, num_frames: int) -> int:
        """Latent frames of one clip coded in one piece."""
        return (num_frames + self.front_padding(num_frames)) // self.downsample_factor

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TemporalVAEConfig:
        """Parse a checkpoint's JSON; raises `CheckpointError` for an unknown key or kind."""
        known = {f.name for f in fields(cls)} | {"type", "from_pretrained", "activation_fn"}
        _check_keys(data, known, "temporal")
        _check_value(data, "type", "VAE_Temporal_SD")
        _check_value(data, "activation_fn", "swish")
        sizes = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        for name in ("channel_multipliers", "temporal_downsample"):
            if name in sizes:
                sizes[name] = tuple(sizes[name])
        return cls(**sizes)


@dataclass(frozen=True)
class ImageVAEConfig(LatentSizes):
    """Config of an autoencoder that codes frames independently (`VideoAutoencoderKL`).

    Attributes:
        autoencoder: keyword arguments of diffusers' `AutoencoderKL`.
        scaling_factor: factor of the latents.
        micro_batch_size: frames per call and per piece, fixed so that results do not depend on
            which ranks compute them.
    """

    autoencoder: Mapping[str, Any] = field(default_factory=lambda: dict(SDXL_VAE_SIZES))
    scaling_factor: float = SCALING_FACTOR
    micro_batch_size: int = 4

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise CheckpointError(
                f"micro_batch_size must be 1 or more, got {self.micro_batch_size}"
            )

    @property
    def spatial_factor(self) -> int:  # type: ignore[override]
        # AutoencoderKL's own default is one level.
        return int(2 ** (len(self.autoencoder.get("block_out_channels", (64,))) - 1))

    @property
    def latent_channels(self) -> int:
        return int(self.autoencoder.get("latent_channels", 4))

    def latent_frames(self, num_frames: int) -> int:
        return num_frames

    def pieces(self, num_frames: int) -> tuple[FrameChunk, ...]:
        return tuple(
            FrameChunk(start, stop, start, stop)
            for start, stop in _runs(num_frames, self.micro_batch_size)
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ImageVAEConfig:
        """Parse diffusers' config.json of an `AutoencoderKL`.

        Its `scaling_factor` is ignored: upstream always multiplies by 0.18215.
        """
        _check_value(data, "_class_name", "AutoencoderKL")
        return cls(autoencoder=without_notes(data))


@dataclass(frozen=True)
class VideoVAEConfig(LatentSizes):
    """Config of a spatial and a temporal stage; upstream's `VideoAutoencoderPipeline`.

    Attributes:
        spatial: config of the spatial stage.
        temporal: config of the temporal stage.
        micro_frame_size: frames per piece (None: the whole video is one piece).
        shift, scale: per channel; finished latents are ``(z - shift) / scale``.
    """

    spatial: ImageVAEConfig = field(default_factory=ImageVAEConfig)
    temporal: TemporalVAEConfig = field(default_factory=TemporalVAEConfig)
    micro_frame_size: int | None = 17
    shift: tuple[float, ...] = (-0.10, 0.34, 0.27, 0.98)
    scale: tuple[float, ...] = (3.85, 2.32, 2.33, 3.06)

    def __post_init__(self) -> None:
        channels = self.temporal.embed_dim
        for name, values in (("shift", self.shift), ("scale", self.scale)):
            if len(values) != channels:
                raise CheckpointError(
                    f"{name} has {len(values)} numbers, but the latents have {channels} channels"
                )
        if self.spatial.latent_channels != self.temporal.in_out_channels:
            raise CheckpointError(
                f"the spatial autoencoder gives {self.spatial.latent_channels} channels, but the "
                f"temporal one takes {self.temporal.in_out_channels}"
            )
        if self.micro_frame_size is not None and self.micro_frame_size < 1:
            raise CheckpointError(
                f"micro_frame_size must be 1 or more, got {self.micro_frame_size}"
            )

    @property
    def spatial_factor(self) -> int:  # type: ignore[override]
        return self.spatial.spatial_factor

    @property
    def latent_channels(self) -> int:
        return self.temporal.embed_dim

    def pieces(self, num_frames: int) -> tuple[FrameChunk, ...]:
        """Pieces that a video of `num_frames` is coded in; the last may be shorter.

        17 frames give 5 latent frames, 34 give 10, 51 give 15, 18 give 6, 1 gives 1.
        The argument is in frames because latent frames are ambiguous: a last piece of 6 to 8 frames
        has 2 latent frames in each case.
        """
        pieces, latent = [], 0
        for start, stop in _runs(num_frames, self.micro_frame_size or num_frames):
            end = latent + self.temporal.latent_frames(stop - start)
            pieces.append(FrameChunk(start, stop, latent, end))
            latent = end
        return tuple(pieces)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> VideoVAEConfig:
        """Parse upstream's config.json; raises `CheckpointError` for an unknown key or kind.

        Upstream names its spatial autoencoder by hub id only. A checkpoint of ours may add its
        sizes as ``vae_2d.config`` (keyword arguments of `AutoencoderKL`) and its own
        ``vae_2d.scaling_factor``.
        """
        _check_keys(data, _PIPELINE_KEYS, "")
        _check_value(data, "model_type", "VideoAutoencoderPipeline")
        stage = data.get("vae_2d", {})
        _check_keys(stage, _SPATIAL_KEYS, "vae_2d")
        _check_value(stage, "type", "VideoAutoencoderKL")
        spatial = ImageVAEConfig(
            autoencoder=dict(stage.get("config", SDXL_VAE_SIZES)),
            scaling_factor=stage.get("scaling_factor", SCALING_FACTOR),
            # Upstream's null means one call for all frames; here pieces bound it.
            micro_batch_size=stage.get("micro_batch_size") or 4,
        )
        temporal = TemporalVAEConfig.from_json(data.get("vae_temporal", {}))
        # One number is for all channels, as 0.0 and 1.0 in upstream's class.
        given: dict[str, Any] = {
            name: tuple(data[name])
            if isinstance(data[name], (list, tuple))
            else (data[name],) * temporal.embed_dim
            for name in ("shift", "scale")
            if name in data
        }
        if "micro_frame_size" in data:
            given["micro_frame_size"] = data["micro_frame_size"]
        return cls(spatial=spatial, temporal=temporal, **given)


_PIPELINE_KEYS = {
    "model_type", "vae_2d", "vae_temporal", "shift", "scale", "micro_frame_size",
    "architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "auto_map",
    "from_pretrained", "freeze_vae_2d", "cal_loss",  # these three matter to upstream's training
}  # fmt: skip
_SPATIAL_KEYS = {
    "type", "from_pretrained", "subfolder", "micro_batch_size", "local_files_only", "cache_dir",
    "config", "scaling_factor",
}  # fmt: skip


def _check_keys(data: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in data:
        if name not in known:
            place = f" in {where}" if where else ""
            raise CheckpointError(
                f"the autoencoder's config.json has an unknown key{place}: {name!r}"
                f"{did_you_mean(name, known)}"
            )


def _check_value(data: Mapping[str, Any], name: str, expected: str) -> None:
    value = data.get(name, expected)
    if value != expected:
        raise CheckpointError(f"the autoencoder's {name} is {value!r}; supported: {expected!r}")


def _runs(length: int, size: int) -> Iterator[tuple[int, int]]:
    if length < 1:
        raise InputError(f"a video needs 1 frame or more, got {length}")
    for start in range(0, length, size):
        yield start, min(start + size, length)
