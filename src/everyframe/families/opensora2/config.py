"""Sizes of Open-Sora 2.0's components, from its tensors' shapes or from config.json. No torch here.

Upstream stores its checkpoints without configs, so sizes come from shapes. `MMDiTConfig` is the
denoiser, of the video model and of FLUX.1; configs of the autoencoders are in `vae_config`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from everyframe.checkpoints.config_errors import MAX_LAYERS, config_values
from everyframe.core.errors import CheckpointError
from everyframe.families.opensora2.vae_config import VAEConfig

#: Keys of upstream's configs that say where weights are or how they run, not what is computed.
IGNORED_KEYS = frozenset({"type", "from_pretrained", "strict_load", "grad_ckpt_settings"})

_CLASS_SWITCHES = {"cond_embed": False, "fused_qkv": True, "use_liger_rope": False}

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class MMDiTConfig:
    """Sizes of `MMDiT`; the defaults are the released video model.

    Attributes:
        in_channels: features of a token, in and out: latent channels times the patch's area.
        axes_dim: rotary channels for frame, row and column; their sum is the head size.
        guidance_embed: whether the guidance scale is an input (FLUX.1-dev).
        cond_embed: whether latents of given frames and their mask are an input.
        fused_qkv: whether queries, keys and values share one linear layer.
        use_liger_rope: whether RoPE rotates halves of a head, else neighbouring pairs.
        is_diffusers: whether layers are stored as in diffusers' FLUX.1: separate values and
            feed-forward in single blocks, and the last layer's scale before its shift.
    """

    in_channels: int = 64
    vec_in_dim: int = 768
    context_in_dim: int = 4096
    hidden_size: int = 3072
    mlp_ratio: float = 4.0
    num_heads: int = 24
    depth: int = 19
    depth_single_blocks: int = 38
    axes_dim: tuple[int, ...] = (16, 56, 56)
    theta: float = 10000
    qkv_bias: bool = True
    guidance_embed: bool = False
    cond_embed: bool = True
    fused_qkv: bool = False
    use_liger_rope: bool = True
    patch_size: int = 2
    is_diffusers: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(each.name, getattr(self, each.name), each.type)
        if self.hidden_size % self.num_heads or sum(self.axes_dim) != self.head_size:
            raise CheckpointError(
                f"a head of the denoiser has {self.hidden_size}/{self.num_heads} channels, but its "
                f"rotary axes are {self.axes_dim}"
            )
        if len(self.axes_dim) != 3 or any(width % 2 for width in self.axes_dim):
            raise CheckpointError(f"axes_dim must be three even numbers, got {self.axes_dim}")
        if self.in_channels % self.patch_size**2:
            raise CheckpointError(
                f"in_channels must be latent channels times {self.patch_size**2} (the patch), "
                f"got {self.in_channels}"
            )

    @property
    def head_size(self) -> int:
        """Channels of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def mlp_size(self) -> int:
        """Width inside the feed-forward."""
        # A ratio read from shapes may be one rounding below the quotient.
        return int(self.hidden_size * self.mlp_ratio + 1e-6)

    @property
    def latent_channels(self) -> int:
        """Channels of the latents."""
        return self.in_channels // self.patch_size**2

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MMDiTConfig:
        """Parse upstream's fields; raises `CheckpointError` that names the faulty key.

        A missing switch has the default of upstream's class, which differs from the released model.
        """
        data = {**_CLASS_SWITCHES, **data}
        return cls(**config_values(cls, data, IGNORED_KEYS, "the denoiser's config.json"))

    @classmethod
    def from_shapes(cls, shapes: Shapes, latent_channels: int | None = None) -> MMDiTConfig:
        """Sizes from the tensors' shapes.

        Shapes determine neither the rotary axes nor their layout. A head's channels are divided
        among frame, row and column as in the released models (16, 56 and 56 of 128). RoPE rotates
        halves if q, k and v are separate, as in upstream's video models, but not in diffusers'
        layout. Without `cond_in` the patch follows from the autoencoder's `latent_channels`;
        otherwise it is 2.
        """
        hidden, in_channels = _shape(shapes, "img_in.weight", 2)
        fused = "double_blocks.0.img_attn.qkv.weight" in shapes
        is_diffusers = "single_blocks.0.mlp_in.weight" in shapes
        (head,) = _shape(shapes, "double_blocks.0.img_attn.norm.query_norm.scale", 1)
        area = 4 if latent_channels is None else max(in_channels // latent_channels, 1)
        if "cond_in.weight" in shapes:
            area = shapes["cond_in.weight"][1] - in_channels
        side = head * 7 // 16 // 2 * 2
        bias = f"double_blocks.0.img_attn.{'qkv' if fused else 'q_proj'}.bias"
        return cls(
            in_channels=in_channels,
            vec_in_dim=_shape(shapes, "vector_in.in_layer.weight", 2)[1],
            context_in_dim=_shape(shapes, "txt_in.weight", 2)[1],
            hidden_size=hidden,
            mlp_ratio=_shape(shapes, "double_blocks.0.img_mlp.0.weight", 2)[0] / hidden,
            num_heads=hidden // head,
            depth=_count(shapes, "double_blocks"),
            depth_single_blocks=_count(shapes, "single_blocks"),
            axes_dim=(head - 2 * side, side, side),
            qkv_bias=bias in shapes,
            guidance_embed="guidance_in.in_layer.weight" in shapes,
            cond_embed="cond_in.weight" in shapes,
            fused_qkv=fused,
            use_liger_rope=not (fused or is_diffusers),
            is_diffusers=is_diffusers,
            patch_size=math.isqrt(max(area, 0)),
        )


@dataclass(frozen=True)
class OpenSora2Config:
    """Configs of all components of a checkpoint.

    Attributes:
        text, clip: configs of T5 and of CLIP's text model.
        first_denoiser, first_vae: FLUX and its autoencoder; None without a first picture of FLUX's.
    """

    denoiser: MMDiTConfig
    vae: VAEConfig
    text: Mapping[str, Any]
    clip: Mapping[str, Any]
    first_denoiser: MMDiTConfig | None = None
    first_vae: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_step(self) -> int:
        """Height and width must be a multiple of this many pixels."""
        return self.vae.spatial_factor * self.denoiser.patch_size

    @property
    def is_high_compression(self) -> bool:
        """Whether it is the variant with the video DC-AE."""
        return self.vae.is_high_compression


def _check(name: str, value: object, kind: object) -> None:
    if kind == "bool":
        right, wanted = isinstance(value, bool), "true or false"
    elif kind == "float":
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        wanted = "a number above 0"
    else:
        numbers = value if isinstance(value, tuple) else (value,)
        right = all(type(number) is int and number > 0 for number in numbers)
        wanted = "whole numbers above 0"
    if not right:
        raise CheckpointError(f"{name} of the denoiser must be {wanted}, got {value!r}")
    if isinstance(value, int) and name.startswith("depth") and value > MAX_LAYERS:
        raise CheckpointError(f"{name} is {value}; at most {MAX_LAYERS} are supported")


def _shape(shapes: Shapes, name: str, dims: int) -> tuple[int, ...]:
    if name not in shapes:
        raise CheckpointError(f"no Open-Sora 2.0 denoiser: there is no tensor {name!r}")
    if len(shapes[name]) != dims:
        raise CheckpointError(f"tensor {name!r} has shape {shapes[name]}, expected {dims} sizes")
    return shapes[name]


def _count(shapes: Shapes, blocks: str) -> int:
    """Number of blocks: one more than the highest number in the names."""
    numbers = (name.split(".")[1] for name in shapes if name.startswith(f"{blocks}."))
    return max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1
