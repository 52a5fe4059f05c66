"""Embeddings of single numbers that are kept: one that comes again is not computed again.

A frame rate is the same at every step, and a second video has the timesteps of the first. What is
kept is served for the very same numbers, weights, dtypes and hooks only, so its bits are those of
the plain way. Whether a run has enough of them is asked by a trial. Where a model has such parts is
told by itself: `embedders` maps their names to whether their number is another one at every step.
Read next: `put_on`, `trials.embeddings`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.numerics.watch import range_of

#: So many results are kept, the last ones: a few kilobytes each.
_MOST = 256


class KeptEmbedding(nn.Module):
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
        if range_of(made).is_finite:  # else the guard has to see how it comes about
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
        if isinstance(part, KeptEmbedding):
            part._kept.clear()


#: A module's class -> the one that keeps.
_KINDS: dict[type[nn.Module], type[nn.Module]] = {}


def _kind(base: type[nn.Module]) -> type[nn.Module]:
    if base not in _KINDS:
        _KINDS[base] = type(f"Kept{base.__name__}", (KeptEmbedding, base), {})
    return _KINDS[base]
