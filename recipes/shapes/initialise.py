"""Initial values of a denoiser's parameters, for training from scratch.

As in PixArt and DiT, linear layers have Xavier initialisation. Layers that would disturb the
residual stream at first (cross-attention, frame rate, last layer) begin at zero.
"""

from __future__ import annotations

import torch
from torch import nn

from everyframe.families.opensora.layers import (
    CaptionEmbedder,
    CrossAttention,
    FinalLayer,
    ScalarEmbedder,
)
from everyframe.families.opensora.stdit import STDiT
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.ops.embeddings import PatchProjection
from everyframe.ops.norm import RMSNorm

SMALL = 0.02
"""Standard deviation of the layers that embed numbers and texts (DiT's value)."""


@torch.no_grad()
def initialise(model: STDiT | STDiT3, generator: torch.Generator | None = None) -> None:
    """Draw all parameters of a denoiser from `generator`, or from PyTorch's own."""
    for module in model.modules():
        if isinstance(module, nn.Linear | PatchProjection):
            # As one product, also where the weight has the shape of a convolution's.
            nn.init.xavier_uniform_(module.weight.view(len(module.weight), -1), generator=generator)
            nn.init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
    for module in model.modules():
        if isinstance(module, CaptionEmbedder):
            _normal(module.y_proj.fc1, generator)
            _normal(module.y_proj.fc2, generator)
            _spread(module.y_embedding, generator)
        elif isinstance(module, ScalarEmbedder):
            for layer in module.mlp:
                _normal(layer, generator)
        elif isinstance(module, CrossAttention):
            nn.init.zeros_(module.proj.weight)
        elif isinstance(module, FinalLayer):
            nn.init.zeros_(module.linear.weight)
    for name, parameter in model.named_parameters():
        if name.endswith("scale_shift_table"):
            _spread(parameter, generator)
        elif name == "t_block.1.weight":
            nn.init.normal_(parameter, std=SMALL, generator=generator)
    if isinstance(model, STDiT3):
        nn.init.zeros_(model.get_parameter("fps_embedder.mlp.2.weight"))


def _normal(layer: nn.Module, generator: torch.Generator | None) -> None:
    if isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=SMALL, generator=generator)


def _spread(parameter: torch.Tensor, generator: torch.Generator | None) -> None:
    """Standard normal over the square root of the channels."""
    nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
