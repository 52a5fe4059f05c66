"""Configs of an Open-Sora checkpoint, read from its config.json files. No torch here.

`OpenSoraConfig` holds those of all components. `STDiTConfig` is the denoiser of Open-Sora 1.0,
`STDiT3Config` that of 1.2. The defaults are the released models. Configs of the autoencoders are in
`vae_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from everyframe.checkpoints.config_errors import MAX_TOKENS, config_values
from everyframe.core.errors import CheckpointError
from everyframe.families.opensora.vae_config import ImageVAEConfig, VideoVAEConfig

TRAINING_KEYS = frozenset({
    "architectures", "model_type", "_name_or_path", "torch_dtype", "dtype", "transformers_version",
    "auto_map", "type", "from_pretrained",
    "enable_flash_attn", "enable_flashattn", "enable_layernorm_kernel",
    "enable_sequence_parallelism",
    "class_dropout_prob", "drop_path", "freeze", "freeze_y_embedder", "only_train_temporal",
    "no_temporal_pos_emb",  # 1.0's class takes it and never reads it
})  # fmt: skip
"""Keys of upstream's config.json that say how it was trained or executed, not what it computes."""

MUST_BE_OFF = ("qk_norm_legacy", "skip_y_embedder")
"""Upstream's switches to another function, off in every released checkpoint of 1.0 and 1.2."""


_Config = TypeVar("_Config", bound="DenoiserConfig")


@dataclass(frozen=True)
class DenoiserConfig:
    """Fields that the configs of both denoisers share."""

    in_channels: int = 4
    patch_size: tuple[int, int, int] = (1, 2, 2)
    hidden_size: int = 1152
    depth: int = 28
    num_heads: int = 16
    mlp_ratio: float = 4.0
    caption_channels: int = 4096
    model_max_length: int = 120
    pred_sigma: bool = True

    def __post_init__(self) -> None:
        _check_sizes(self)

    @property
    def out_channels(self) -> int:
        """Output channels; twice the input's if `pred_sigma`.

        They are noise and variance interpolation in 1.0; in 1.2 velocity and unused ones.
        """
        return self.in_channels * (2 if self.pred_sigma else 1)

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @classmethod
    def from_json(cls: type[_Config], data: Mapping[str, Any]) -> _Config:
        """Parse config.json; raises `CheckpointError` that names the faulty key."""
        for name in MUST_BE_OFF:
            if data.get(name):
                raise CheckpointError(
                    f"the denoiser's config.json sets {name} to {data[name]!r}; supported: false"
                )
        ignored = TRAINING_KEYS.union(MUST_BE_OFF)
        return cls(**config_values(cls, data, ignored, "the denoiser's config.json"))


@dataclass(frozen=True)
class STDiTConfig(DenoiserConfig):
    """Config of `STDiT`, Open-Sora 1.0.

    Attributes:
        input_size: latent (frames, rows, columns) in training; other sizes run as well.
        space_scale: divisor of spatial positions: 0.5 at 256 pixels, 1.0 at 512 pixels; 1.0 if a
            config omits it, as in upstream's class.
        time_scale: divisor of temporal positions.
    """

    input_size: tuple[int, int, int] = (16, 32, 32)
    space_scale: float = 1.0
    time_scale: float = 1.0


@dataclass(frozen=True)
class STDiT3Config(DenoiserConfig):
    """Config of `STDiT3`, Open-Sora 1.2; `depth` counts pairs of a spatial and a temporal block.

    `input_sq_size` is the side in pixels of a square video whose positions are not scaled.
    """

    input_sq_size: int = 512
    model_max_length: int = 300
    qk_norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_size % 2:
            raise CheckpointError(
                f"hidden_size {self.hidden_size} over num_heads {self.num_heads} must be even, as "
                f"channels are rotated in pairs; it is {self.head_size}"
            )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> STDiT3Config:
        # Upstream writes input_size here too, as three nulls: this model has no size of its own.
        return super().from_json({k: v for k, v in data.items() if k != "input_size"})


def _check_sizes(config: DenoiserConfig) -> None:
    """Check that every field has its type, is above zero, and that the sizes fit each other."""
    for each in fields(config):
        value, default = getattr(config, each.name), each.default
        if isinstance(default, tuple):
            right = isinstance(value, tuple) and len(value) == 3 and all(map(_is_count, value))
            wanted = "three whole numbers above 0"
        elif isinstance(default, bool):
            right, wanted = isinstance(value, bool), "true or false"
        elif isinstance(default, float):
            right = _is_count(value) or (isinstance(value, float) and 0 < value < float("inf"))
            wanted = "a number above 0"
        else:
            right, wanted = _is_count(value), "a whole number above 0"
        if not right:
            raise CheckpointError(f"{each.name} must be {wanted}, got {value!r}")
    if config.model_max_length > MAX_TOKENS:
        raise CheckpointError(
            f"model_max_length is {config.model_max_length}; at most {MAX_TOKENS} are supported"
        )
    if config.hidden_size % 4:
        raise CheckpointError(
            f"hidden_size must be a multiple of 4 (sine and cosine of rows and columns), "
            f"got {config.hidden_size}"
        )
    if config.hidden_size % config.num_heads:
        raise CheckpointError(
            f"num_heads must divide hidden_size, got {config.num_heads} and {config.hidden_size}"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_UPSTREAM_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "1.0": {"num_frames": 16, "fps": 8.0, "num_inference_steps": 100, "guidance_scale": 7.0},
    "1.2": {
        "num_frames": 51, "fps": 24.0, "num_inference_steps": 30, "guidance_scale": 7.0,
        "resolution": "240p", "aesthetic": 6.5,
    },
}  # fmt: skip
_RELEASED_ONLY = ("resolution", "aesthetic", "use_timestep_transform")


@dataclass(frozen=True)
class OpenSoraConfig:
    """Configs of all components of a checkpoint.

    Attributes:
        version: "1.0" or "1.2".
        text: config of T5.
        defaults: from the checkpoint's own `everyframe.json`, if it has one.
        has_scores: whether training captions contained aesthetic and motion scores.
        square: side in pixels that 1.0 was trained at.
    """

    version: str
    denoiser: STDiTConfig | STDiT3Config
    vae: ImageVAEConfig | VideoVAEConfig
    text: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_scores: bool = False
    square: int | None = None

    @property
    def size_step(self) -> int:
        """Height and width must be a multiple of this many pixels.

        1.2 pads its latents to the patch and crops them again; 1.0 cannot.
        """
        patch = self.denoiser.patch_size[1] if self.version == "1.0" else 1
        return self.vae.spatial_factor * patch

    def default(self, name: str) -> Any:
        """Default of the checkpoint, else upstream's default for the version."""
        # A checkpoint with its own defaults is not upstream's: upstream's sizes and captions don't
        # apply.
        if self.defaults and name in _RELEASED_ONLY:
            return self.defaults.get(name)
        return self.defaults.get(name, _UPSTREAM_DEFAULTS[self.version].get(name))
