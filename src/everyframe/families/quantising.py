"""Weights in eight bits, made of a checkpoint's tensors one at a time as they are read.

Never is more of a model there in its wide dtype than one tensor. Where weights stay in their files
they are rounded anew each time that they come. Read next: `loading.py`, which asks for it;
`everyframe.precision.quantised`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from everyframe.checkpoints.tensors import TensorFile
from everyframe.core.plan import Precision
from everyframe.families import offload
from everyframe.families.ahead import Fetched
from everyframe.precision.quantised import (
    SCALE,
    QuantisedLinear,
    layers,
    quantise,
    swap,
    without_numbers,
)
from everyframe.precision.raising import as_raised


def fill(
    module: nn.Module,
    precision: Precision,
    weights: TensorFile,
    sources: Mapping[str, str],
    devices: tuple[torch.device, torch.device],
    left: Collection[str],
) -> None:
    """Swap the layers that keep their weights in eight bits for such as have them.

    `sources` are the file's names by the module's. `devices` are where rows are rounded and where
    the result lies; parameters in `left` stay in the file, and on meta in the module.
    """
    found = layers(module, precision)
    works, lies = devices
    # In the order of the file.
    for target, source in sources.items():
        name = target.removesuffix(".weight")
        if name not in found:
            continue
        layer = without_numbers(found[name], precision.weights)
        if target not in left:
            values, scale = quantise(weights.load(source), precision.weights, works)
            layer = QuantisedLinear(
                precision.weights, values.to(lies), scale.to(lies), found[name].bias
            )
        swap(module, name, layer)


def from_files(
    weights: TensorFile, sources: Mapping[str, str], device: torch.device, kind: str
) -> Fetched:
    """As `offload.from_files`, for a module that keeps some weights in eight bits."""
    if not kind:
        return offload.from_files(weights, sources, device)
    scales: dict[str, Tensor] = {}

    def bring(name: str, waiting: nn.Parameter) -> Tensor:
        layer, _, own = name.rpartition(".")
        if own == SCALE and layer in scales:  # it came with the values
            return as_raised(scales.pop(layer), waiting)
        if own != SCALE and waiting.is_floating_point():
            return as_raised(weights.load(sources[name], device), waiting)
        source = weights.load(sources[f"{layer}.weight"])
        values, scale = quantise(source, kind, device)
        if own == SCALE:
            return as_raised(scale, waiting)
        scales[layer] = scale
        return values

    return Fetched(bring, device)
