"""A linear layer and the GELU after it as one kernel of oneDNN, of the same parameter names.

torch has this kernel for what its compiler makes, as a private operator; so it may be gone in the
next version, and whether it is here, right and faster is asked by a trial each time. On one
processor it halved the time of GELU, on another it took half as long again as the plain way.
Read next: `put_on`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.numerics.tensor_stats import value_range

#: What the kernel computes in at all.
_DTYPES = (torch.float32, torch.bfloat16)


class LinearGelu(nn.Linear):
    """``gelu(x W^T + b)``; `approximate` is `F.gelu`'s. Without a kernel for it, the plain way.

    A repair that wants plain kernels sets `is_plain`.
    """

    is_plain = False

    def __init__(self, linear: nn.Linear, approximate: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.approximate = approximate
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        # Dry runs have no numbers, training has gradients, a repair may widen the weights, and a
        # rank without tokens has nothing to ask.
        kept = x.dtype in _DTYPES and x.dtype == self.weight.dtype and 0 not in x.shape
        if self.is_plain or x.device.type != "cpu" or not kept or torch.is_grad_enabled():
            return F.gelu(F.linear(x, self.weight, self.bias), approximate=self.approximate)
        operators: Any = torch.ops.mkldnn
        fused: Tensor = operators._linear_pointwise(
            x, self.weight, self.bias, "gelu", [], self.approximate
        )
        return fused


def pairs(
    module: nn.Module, inside: Iterable[str]
) -> list[tuple[nn.Module, tuple[str, nn.Linear], tuple[str, nn.GELU]]]:
    """Linear layers with a GELU behind them, by name, and the modules that hold both.

    Only inside of the parts with these dotted names. That one is called after the other is taken
    from their order in the module, so a trial has to show it.
    """
    return [
        (parent, (name, linear), (after, gelu))
        for part in inside
        for parent in module.get_submodule(part).modules()
        for (name, linear), (after, gelu) in pairwise(parent.named_children())
        if type(linear) is nn.Linear and type(gelu) is nn.GELU
    ]


def fuse(module: nn.Module, inside: Iterable[str]) -> None:
    """Swap each of the `pairs` for a `LinearGelu` and for nothing."""
    for parent, (name, linear), (after, gelu) in pairs(module, inside):
        setattr(parent, name, LinearGelu(linear, gelu.approximate))
        setattr(parent, after, nn.Identity())


#: So many results are kept, the last ones: a few kilobytes each.
_MOST = 256


class CachedEmbedding(nn.Module):
    """Put before a module's own class, it keeps what that gives for numbers (B,) on a CPU.

    Elsewhere they would have to be waited for. A repair that wants the plain way sets `is_plain`.
    """

    is_plain = False
    _kept: dict[Hashable, tuple[Tensor, list[Tensor]]]

    def forward(self, number_B: Tensor) -> Tensor:
        is_looked_at = number_B.device.type == "cpu" and not torch.is_grad_enabled()
        if self.is_plain or not is_looked_at:
            plain: Tensor = super().forward(number_B)
            return plain
        key = (number_B.dtype, tuple(number_B.tolist()), tuple(_made_of(self)))
        found = self._kept.get(key)
        if found is not None:
            return found[0].clone()
        made: Tensor = super().forward(number_B)
        if value_range(made).is_finite:  # else the guard has to see how it comes about
            while len(self._kept) >= _MOST:
                del self._kept[next(iter(self._kept))]
            # With its weights, so that no others can come to lie at the same address meanwhile.
            weights = [each.detach() for each in (*self.parameters(), *self.buffers())]
            self._kept[key] = (made.clone(), weights)
        return made


def _made_of(module: nn.Module) -> Iterator[Hashable]:
    """What else its result depends on: which weights, and what was put on from outside.

    Asked at every call; `parameters` and `modules` would take as long as a small embedding.
    """
    for each in (*module._parameters.values(), *module._buffers.values()):
        if each is not None:
            yield each.data_ptr(), each.dtype, None if each.is_inference() else each._version
    yield from module._forward_pre_hooks
    yield from module._forward_hooks
    for part in module._modules.values():
        if part is not None:
            yield from _made_of(part)


def embedders(module: nn.Module) -> Mapping[str, bool]:
    """The parts that embed numbers, and whether theirs is another one at every step."""
    found: Any = getattr(module, "embedders", {})
    return found if isinstance(found, Mapping) else {}


def keep(module: nn.Module, parts: Iterable[str]) -> None:
    """Have the parts with these dotted names keep what they give; all of their names stay."""
    for name in parts:
        part = module.get_submodule(name)
        part.__class__ = _kind(type(part))
        vars(part)["_kept"] = {}


def forget(module: nn.Module) -> None:
    """Let go of all that its parts keep."""
    for part in module.modules():
        if isinstance(part, CachedEmbedding):
            part._kept.clear()


#: A module's class -> the one that keeps.
_KINDS: dict[type[nn.Module], type[nn.Module]] = {}


def _kind(base: type[nn.Module]) -> type[nn.Module]:
    if base not in _KINDS:
        _KINDS[base] = type(f"Kept{base.__name__}", (CachedEmbedding, base), {})
    return _KINDS[base]
