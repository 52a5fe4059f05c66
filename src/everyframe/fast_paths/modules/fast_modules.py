"""Fused linear + GELU (one oneDNN kernel), and a cache of scalar embeddings, as module swaps.

Parameter names stay the same. The oneDNN kernel is a private torch operator, made for torch's
compiler, and may be gone in the next version; a trial checks each time whether it exists, is right
and is faster. On one processor it halved the time of GELU, on another it took half as long again as
plain torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.fast_paths.modules.cpu_modules import OneDNNLinear, has_onednn_linear, onednn_linear
from everyframe.numerics.tensor_stats import value_range
from everyframe.ops.activation import FusedActivation
from everyframe.ops.module_class import recast


class LinearGelu(nn.Linear):
    """``gelu(x W^T + b)``; `approximate` as in `F.gelu`.

    Falls back to plain torch without the kernel.

    A repair that wants plain kernels sets `is_plain`.
    """

    is_plain = False
    fuses_next = True

    def __init__(self, linear: nn.Linear, approximate: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.approximate = approximate
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        # Dry runs have no numbers, training has gradients, a repair may widen the weights, a rank
        # without tokens has nothing to ask, and torch's compiler can't compile its own operator
        # with a weight that is no constant.
        if self.is_plain or not has_onednn_linear(x, self.weight):
            return F.gelu(F.linear(x, self.weight, self.bias), approximate=self.approximate)
        return onednn_linear(x, self.weight, self.bias, "gelu", self.approximate)


def pairs(
    module: nn.Module, inside: Iterable[str]
) -> list[tuple[nn.Module, tuple[str, nn.Linear], tuple[str, nn.GELU]]]:
    """List linear layers followed by a GELU, by name, with the modules that hold both.

    Searches only the submodules named in `inside`. The order of children in the module stands for
    the order of calls, so a trial has to confirm it.
    """
    return [
        (parent, (name, linear), (after, gelu))
        for part in inside
        for parent in module.get_submodule(part).modules()
        for (name, linear), (after, gelu) in pairwise(parent.named_children())
        if isinstance(linear, nn.Linear)
        and type(linear) in (nn.Linear, OneDNNLinear)
        and type(gelu) is nn.GELU
    ]


def fuse(module: nn.Module, inside: Iterable[str]) -> None:
    """Replace each of the `pairs` by a `LinearGelu` and what stands for the GELU."""
    for parent, (name, linear), (after, gelu) in pairs(module, inside):
        setattr(parent, name, LinearGelu(linear, gelu.approximate))
        setattr(parent, after, FusedActivation())


#: Most cached results, a few kilobytes each; the oldest are dropped.
_MOST = 256


class CachedEmbedding(nn.Module):
    """Base of modules that cache another's results for numbers on a CPU; names stay.

    Inputs are numbers (B,), or what was made of each (B, D).

    On other devices reading the input would synchronise. A repair that wants plain kernels sets
    `is_plain`.
    """

    is_plain = False
    _cached: dict[Hashable, tuple[Tensor, list[Tensor]]]

    def forward(self, number: Tensor) -> Tensor:
        is_looked_at = number.device.type == "cpu" and not torch.is_grad_enabled()
        if self.is_plain or not is_looked_at:
            plain: Tensor = super().forward(number)
            return plain
        values = tuple(number.flatten().tolist())
        key = (number.dtype, number.shape, values, tuple(state_key(self)))
        found = self._cached.get(key)
        if found is not None:
            return found[0].clone()
        made: Tensor = super().forward(number)
        if value_range(made).is_finite:  # else the guard has to see how it comes about
            while len(self._cached) >= _MOST:
                del self._cached[next(iter(self._cached))]
            # With its weights, so that no others can come to lie at the same address meanwhile.
            weights = [each.detach() for each in (*self.parameters(), *self.buffers())]
            self._cached[key] = (made.clone(), weights)
        return made


def state_key(module: nn.Module) -> Iterator[Hashable]:
    """Cache key of a module's state: its weights and hooks.

    Evaluated at every call; `parameters` and `modules` would take as long as a small embedding.
    """
    for each in (*module._parameters.values(), *module._buffers.values()):
        if each is not None:
            yield each.data_ptr(), each.dtype, None if each.is_inference() else each._version
    yield from module._forward_pre_hooks
    yield from module._forward_hooks
    for part in module._modules.values():
        if part is not None:
            yield from state_key(part)


def embedders(module: nn.Module) -> Mapping[str, bool]:
    """Submodules that embed scalars, and whether the scalar differs at every step."""
    found: Any = getattr(module, "embedders", {})
    return found if isinstance(found, Mapping) else {}


def keep(module: nn.Module, parts: Iterable[str]) -> None:
    """Replace these submodules by caching ones with the same weights, hooks and names."""
    for name in parts:
        cached: Any = recast(module, name, _kind(type(module.get_submodule(name))))
        cached._cached = {}


def forget(module: nn.Module) -> None:
    """Clear the caches of all submodules."""
    for part in module.modules():
        if isinstance(part, CachedEmbedding):
            part._cached.clear()


#: Module class -> its caching subclass.
_KINDS: dict[type[nn.Module], type[nn.Module]] = {}


def _kind(base: type[nn.Module]) -> type[nn.Module]:
    if base not in _KINDS:
        _KINDS[base] = type(f"Kept{base.__name__}", (CachedEmbedding, base), {})
    return _KINDS[base]
