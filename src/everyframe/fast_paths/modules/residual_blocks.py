"""Blocks that call SiLU after their norms: norms in C apply it themselves, and sums take no memory.

A block of ours names its activation and the norms before it in its class: ``norms_of_silu = {name
of the activation: names of the norms}``. The activation stays, for embeddings of the timestep, and
so do names, parameters and hooks of all modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.fast_paths.modules.cpu_modules import DIFFUSERS_MODULES
from everyframe.ops.activation import FusedActivation
from everyframe.ops.module_class import recast
from everyframe.ops.norm import WideGroupNorm

_AUTOENCODERS = "diffusers.models.autoencoders.autoencoder_kl"

#: Classes of diffusers whose `nonlinearity` gets what norms give, embeddings, and nothing else.
_BLOCKS = frozenset({
    "diffusers.models.resnet.ResnetBlock2D",
    "diffusers.models.resnet.TemporalResnetBlock",
    f"{_AUTOENCODERS}_cogvideox.CogVideoXResnetBlock3D",
    f"{_AUTOENCODERS}_hunyuan_video.HunyuanVideoResnetBlockCausal3D",
    f"{_AUTOENCODERS}_hunyuanvideo15.HunyuanVideo15ResnetBlock",
    f"{_AUTOENCODERS}_ltx.LTXVideoResnetBlock3d",
    f"{_AUTOENCODERS}_ltx2.LTX2VideoResnetBlock3d",
    f"{_AUTOENCODERS}_mochi.MochiResnetBlock3D",
    f"{_AUTOENCODERS}_wan.WanResidualBlock",
})  # fmt: skip
#: Those with a subclass of ours whose sums are in place.
_IN_PLACE = {
    "diffusers.models.resnet.ResnetBlock2D": "InPlaceResnetBlock2D",
    "diffusers.models.resnet.TemporalResnetBlock": "InPlaceTemporalResnetBlock",
}
#: `norms_of_silu` of those.
NAMES = {"nonlinearity": ("norm1", "norm2")}


class EmbeddingSiLU(FusedActivation):
    """The activation of a block whose norms have applied it: images pass, embeddings get it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return input if input.ndim > 3 else F.silu(input)


def places(module: nn.Module) -> tuple[str, ...]:
    """Names of the submodules that `fuse` changes, once their norms are in C."""
    return tuple(name for name, part in module.named_modules() if name and any(_silus(part)))


def norms_before_silu(module: nn.Module) -> frozenset[str]:
    """Names of the norms in `places` that SiLU is called after."""
    return frozenset(
        f"{name}.{norm}" if name else norm
        for name, part in module.named_modules()
        for _, norms in _silus(part)
        for norm in norms
    )


def fuse(module: nn.Module) -> None:
    """Let norms in C apply the SiLU that is called after them, and such blocks sum in place."""
    for place, part in [*module.named_modules()]:
        for name, norms in [*_silus(part)]:
            found: list[Any] = [part.get_submodule(norm) for norm in norms]
            if all(hasattr(norm, "has_silu") for norm in found):
                for norm in found:
                    add_silu(norm)
                    norm.fuses_next = True
                setattr(part, name, EmbeddingSiLU())
                _sum_in_place(module, place)


def _sum_in_place(module: nn.Module, place: str) -> None:
    """Replace a block by one that adds its input to what it has computed, where there is one."""
    part: Any = module.get_submodule(place)
    own = type(part)
    kind = _IN_PLACE.get(f"{own.__module__}.{own.__qualname__}")
    is_simple = (
        getattr(part, "upsample", None) is None
        and getattr(part, "downsample", None) is None
        and getattr(part, "output_scale_factor", 1.0) == 1.0
    )
    if place and kind is not None and is_simple:
        recast(module, place, getattr(import_module(DIFFUSERS_MODULES), kind))


def add_silu(norm: Any) -> None:
    """Let a norm apply SiLU: in its kernel if it is one in C, else after it."""
    if hasattr(norm, "has_silu"):
        norm.has_silu = True
    else:
        norm.register_forward_hook(_apply_silu)


def _apply_silu(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
    """A forward hook; CogVideoX's norms give what they cache as well."""
    if isinstance(result, tuple):
        return F.silu(result[0]), *result[1:]
    return F.silu(result)


def _silus(part: nn.Module) -> Iterator[tuple[str, Sequence[str]]]:
    """Names of each SiLU of a block, and of the norms before it."""
    own: Any = type(part)
    is_known = f"{own.__module__}.{own.__qualname__}" in _BLOCKS
    # With scale and shift from an embedding, the activation comes after those.
    is_shifted = getattr(part, "time_embedding_norm", "") == "scale_shift"
    if is_shifted or getattr(part, "scale_shift_table", None) is not None:
        return
    names: Mapping[str, Sequence[str]] = getattr(own, "norms_of_silu", NAMES if is_known else {})
    for name, norms in names.items():
        # A family of ours may have other norms there already, which apply SiLU themselves.
        is_own = any(isinstance(part.get_submodule(norm), WideGroupNorm) for norm in norms)
        if not is_own and type(part.get_submodule(name)) is nn.SiLU:
            yield name, norms
