"""Blocks that call SiLU after their norms: norms in C apply it themselves.

A block of ours names its activation and the norms before it in its class: ``norms_of_silu = {name
of the activation: names of the norms}``. The activation stays, for embeddings of the timestep, and
so do names, parameters and hooks of all modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

_AUTOENCODERS = "diffusers.models.autoencoders.autoencoder_kl"

#: Classes of diffusers whose `nonlinearity` gets what norms give, embeddings, and nothing else.
_BLOCKS = frozenset({
    "diffusers.models.resnet.ResnetBlock2D",
    "diffusers.models.resnet.TemporalResnetBlock",
    f"{_AUTOENCODERS}_cogvideox.CogVideoXResnetBlock3D",
    f"{_AUTOENCODERS}_hunyuan_video.HunyuanVideoResnetBlockCausal3D",
    f"{_AUTOENCODERS}_mochi.MochiResnetBlock3D",
    f"{_AUTOENCODERS}_wan.WanResidualBlock",
})  # fmt: skip
#: `norms_of_silu` of those.
NAMES = {"nonlinearity": ("norm1", "norm2")}


class EmbeddingSiLU(nn.SiLU):
    """The activation of a block whose norms have applied it: images pass, embeddings get it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return input if input.ndim > 3 else F.silu(input)


def places(module: nn.Module) -> tuple[str, ...]:
    """Names of the submodules that `fuse` changes, once their norms are in C."""
    return tuple(name for name, part in module.named_modules() if name and any(_silus(part)))


def fuse(module: nn.Module) -> None:
    """Let norms in C apply the SiLU that is called after them."""
    for part in module.modules():
        for name, norms in [*_silus(part)]:
            found: list[Any] = [part.get_submodule(norm) for norm in norms]
            if all(hasattr(norm, "has_silu") for norm in found):
                for norm in found:
                    norm.has_silu = True
                setattr(part, name, EmbeddingSiLU())


def _silus(part: nn.Module) -> Iterator[tuple[str, Sequence[str]]]:
    """Names of each SiLU of a block, and of the norms before it."""
    own: Any = type(part)
    is_known = f"{own.__module__}.{own.__qualname__}" in _BLOCKS
    # With scale and shift from an embedding, the activation comes after those.
    if getattr(part, "time_embedding_norm", "") == "scale_shift":
        return
    names: Mapping[str, Sequence[str]] = getattr(own, "norms_of_silu", NAMES if is_known else {})
    for name, norms in names.items():
        if type(part.get_submodule(name)) is nn.SiLU:
            yield name, norms
