"""Weights of quantizers: tensors of classes of their own, in which few operations work."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def is_plain(tensor: Tensor) -> bool:
    """Whether it has numbers of its own dtype, and is no tensor of a quantizer's class."""
    return type(tensor) in (nn.Parameter, Tensor)


def plain_tensors(tensor: Tensor, name: str) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of what a weight holds: itself, or its codes and scales as plain tensors."""
    if is_plain(tensor):
        yield name, tensor
    elif hasattr(tensor, "__tensor_flatten__"):  # torchao's
        for inner in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, inner), f"{name}.{inner}")
    else:
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.as_subclass(Tensor)
        yield name, plain
