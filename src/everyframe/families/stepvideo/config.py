"""Configs of a Step-Video checkpoint, read from its config.json files. No torch here.

`StepVideoConfig` holds those of all components. The defaults are the released models as far as
known: the hub's configs have not been checked, and they take precedence where present. The
autoencoder's config is in `vae_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from everyframe.checkpoints.config_errors import config_values
from everyframe.core.errors import CheckpointError
from everyframe.families.stepvideo.vae_config import StepVAEConfig

#: Keys about how upstream trained or ran the denoiser, not about what it computes.
_DENOISER_IGNORES = frozenset({
    "_class_name", "_diffusers_version", "_name_or_path", "architectures", "torch_dtype", "dtype",
    "dropout", "attention_type",
})  # fmt: skip
#: Switches that change the function, with their value in every released checkpoint.
_DENOISER_MUST_BE = {
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "use_additional_conditions": False,
}


@dataclass(frozen=True)
class StepVideoModelConfig:
    """Config of `StepVideoModel`; the defaults are the released 30B model.

    Attributes:
        caption_channels: channels of Step-LLM and of CLIP, or of Step-LLM alone.
        rope_ch_split: channels of a head for frame, row and column. Upstream fixes it at 64, 32, 32
            of 128; other head sizes are split in the same proportion.
    """

    num_attention_heads: int = 48
    attention_head_dim: int = 128
    in_channels: int = 64
    out_channels: int | None = 64
    num_layers: int = 48
    patch_size: int = 1
    norm_eps: float = 1e-6
    caption_channels: tuple[int, ...] = (6144, 1024)
    rope_ch_split: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("num_attention_heads", "attention_head_dim", "in_channels", "num_layers",
                     "patch_size", "made_channels"):  # fmt: skip
            _check_count(name, getattr(self, name))
        _check_positive("norm_eps", self.norm_eps)
        if len(self.caption_channels) not in (1, 2):
            raise CheckpointError(
                "caption_channels must be one number (Step-LLM) or two (Step-LLM and CLIP), got "
                f"{list(self.caption_channels)}"
            )
        for count in self.caption_channels:
            _check_count("caption_channels", count)
        if self.hidden_size % 2:
            raise CheckpointError(f"heads times their width must be even, got {self.hidden_size}")
        split = self.split
        if len(split) != 3 or any(width < 2 or width % 2 for width in split) or (
            sum(split) != self.attention_head_dim
        ):  # fmt: skip
            raise CheckpointError(
                f"a head's {self.attention_head_dim} channels must be split into three even "
                f"numbers for frame, row and column, got {list(split)}"
            )

    @property
    def hidden_size(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def made_channels(self) -> int:
        return self.in_channels if self.out_channels is None else self.out_channels

    @property
    def split(self) -> tuple[int, ...]:
        if self.rope_ch_split is not None:
            return self.rope_ch_split
        quarter = self.attention_head_dim // 4
        return (self.attention_head_dim - 2 * quarter, quarter, quarter)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepVideoModelConfig:
        """Parse config.json; raises `CheckpointError` that names the faulty key."""
        data = dict(data)
        for name, expected in _DENOISER_MUST_BE.items():
            if data.pop(name, expected) != expected:
                raise CheckpointError(
                    f"the denoiser's config.json sets {name} otherwise than to {expected!r}, as "
                    "every released Step-Video has it; nothing else is supported"
                )
        if isinstance(data.get("caption_channels"), int):
            data["caption_channels"] = (data["caption_channels"],)
        where = "the denoiser's config.json"
        return cls(**config_values(cls, data, _DENOISER_IGNORES, where))


@dataclass(frozen=True)
class StepLLMConfig:
    """Config of Step-LLM; the defaults are the released 20B model.

    `num_attention_groups` is the number of key and value heads; `ffn_hidden_size` is rounded up to
    a multiple of 256, as upstream does.
    """

    hidden_size: int = 6144
    num_attention_heads: int = 48
    num_attention_groups: int = 8
    num_layers: int = 48
    ffn_hidden_size: int = 16896
    padded_vocab_size: int = 65536
    layernorm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "layernorm_epsilon":
                _check_count(field.name, getattr(self, field.name))
        _check_positive("layernorm_epsilon", self.layernorm_epsilon)
        for whole, part in (("hidden_size", "num_attention_heads"),
                            ("num_attention_heads", "num_attention_groups")):  # fmt: skip
            if getattr(self, whole) % getattr(self, part):
                raise CheckpointError(
                    f"Step-LLM's {part} must divide {whole}, got {getattr(self, part)} and "
                    f"{getattr(self, whole)}"
                )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        return -(-self.ffn_hidden_size // 256) * 256

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepLLMConfig:
        """Parse config.json; raises `CheckpointError` that names the faulty key.

        Upstream writes all training arguments into this file. Other keys are ignored, but every
        size must be present.
        """
        for field in fields(cls):
            if field.name not in data:
                raise CheckpointError(f"Step-LLM's config.json lacks {field.name!r}")
        return cls(**{field.name: data[field.name] for field in fields(cls)})


#: Hunyuan CLIP's sizes as far as known, for plans made before download.
HUNYUAN_CLIP: Mapping[str, Any] = {
    "model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "vocab_size": 47020, "max_position_embeddings": 512,
    "type_vocab_size": 2,
}  # fmt: skip


@dataclass(frozen=True)
class StepVideoConfig:
    """Configs of all components; `llm_bias` is Step-LLM's bias (`llm.Bias`)."""

    denoiser: StepVideoModelConfig
    llm: StepLLMConfig
    clip: Mapping[str, Any]
    vae: StepVAEConfig
    is_turbo: bool = False
    llm_bias: str = "sqrt"

    @property
    def size_step(self) -> int:
        """Height and width must be a multiple of this many pixels."""
        return self.vae.spatial_factor * self.denoiser.patch_size


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{name} must be a whole number above 0, got {value!r}")


def _check_positive(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):  # type: ignore[operator]
        raise CheckpointError(f"{name} must be a number above 0, got {value!r}")
