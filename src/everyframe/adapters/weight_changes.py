"""Compute a LoRA's change of one weight: ``W + strength * scale * delta``, in the weight's dtype.

Order of operations: the delta is one product of the factors in float32 (Kronecker or elementwise
product for LoKr and LoHa), it is multiplied by the product of scale and strength, and the weight is
added last. Sources: LoRA https://arxiv.org/abs/2106.09685, LyCORIS
https://arxiv.org/abs/2309.14859, DoRA https://arxiv.org/abs/2402.09353.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from everyframe.adapters.factor_shapes import dora_axis
from everyframe.adapters.lora_file import ModuleChange
from everyframe.adapters.weight_sites import Rows
from everyframe.checkpoints.tensor_file import TensorFile


@dataclass(frozen=True)
class WeightChange:
    """The change of one weight or bias by one LoRA.

    Attributes:
        file: the LoRA's tensors.
        change: tensors of one module.
        strength: factor of the whole change.
        rows: rows of the original weight that this weight holds; None for all in order.
        is_bias: whether the module's bias is changed, not its weight.
    """

    file: TensorFile
    change: ModuleChange
    strength: float
    rows: Rows | None = None
    is_bias: bool = False

    def apply(self, weight: Tensor) -> Tensor:
        """The changed weight, in the dtype of `weight` (float32 or float64)."""
        tensors = {
            role: self.file.load(key, dtype=weight.dtype)
            for role, key in self.change.keys.items()
            if role != "alpha"
        }
        if self.is_bias:
            return self._change_bias(weight, tensors)
        if self.change.kind == "set":
            new = self._pick_rows(tensors["set_weight"])
            return self._towards(new, weight)
        if "dora" in tensors:
            return self._apply_dora(weight, tensors)
        delta = self._delta(tensors, weight.shape)
        return _add(delta, self.change.scale * self.strength, weight)

    def _towards(self, new: Tensor, weight: Tensor) -> Tensor:
        """Interpolate from `weight` to `new` by the strength; overwrites `new`."""
        return new if self.strength == 1 else _add(new.sub_(weight), self.strength, weight)

    def _change_bias(self, bias: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        if "up_bias" in tensors:
            change = self._pick_rows(tensors["up_bias"])
            bias = bias + change * (self.change.scale * self.strength)
        if "diff_b" in tensors:
            bias = bias + self._pick_rows(tensors["diff_b"]) * self.strength
        return bias

    def _delta(self, tensors: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
        """The change of the weight's rows, before scaling."""
        kind = self.change.kind
        if kind == "lora":
            return self._of_lora(tensors).reshape(shape)
        whole = {
            "diff": lambda: tensors["diff"],
            "diff_m": lambda: tensors["diff_m"],
            "loha": lambda: _of_loha(tensors),
            "lokr": lambda: _of_lokr(tensors),
        }[kind]()
        return self._pick_rows(whole).reshape(shape)

    def _of_lora(self, tensors: Mapping[str, Tensor]) -> Tensor:
        up, down = self._pick_rows(tensors["up"]).flatten(1), tensors["down"]
        if "mid" in tensors:
            return _einsum("nm...,on,mi->oi...", tensors["mid"], up, down.flatten(1))
        return up @ down.flatten(1)

    def _apply_dora(self, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """DoRA: the changed weight's directions with the file's magnitudes."""
        changed = _add(self._delta(tensors, weight.shape), self.change.scale, weight)
        total = weight.shape[0] if self.rows is None else self.rows.total
        axis = dora_axis(self.change.shapes["dora"], (total, *weight.shape[1:]))
        others = [each for each in range(weight.ndim) if each != axis]
        norm = torch.linalg.vector_norm(changed, dim=others, keepdim=True)
        norm = norm.masked_fill(norm == 0, 1)  # a channel of zeros has no direction and stays zero
        # The norm of an input channel needs all rows; `patches` refuses parts of a weight.
        magnitude = tensors["dora"].flatten()
        magnitude = (self._pick_rows(magnitude) if axis == 0 else magnitude).reshape(norm.shape)
        return self._towards(changed.mul_(magnitude / norm), weight)

    def _pick_rows(self, tensor: Tensor) -> Tensor:
        """This weight's rows of a tensor with all rows of the original."""
        if self.rows is None:
            return tensor
        pieces = [tensor[first:end] for first, end in self.rows.pieces]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _add(delta: Tensor, factor: float, weight: Tensor) -> Tensor:
    """``weight + delta * factor``; overwrites `delta`, so that no further copy is held."""
    return delta.mul_(factor).add_(weight)


def _of_loha(tensors: Mapping[str, Tensor]) -> Tensor:
    parts = []
    for number in (1, 2):
        a, b = tensors[f"hada_w{number}_a"], tensors[f"hada_w{number}_b"]
        core = tensors.get(f"hada_t{number}")
        parts.append(a @ b if core is None else _tucker(core, a, b))
    return parts[0].mul_(parts[1])


def _of_lokr(tensors: Mapping[str, Tensor]) -> Tensor:
    first = _whole_or_product(tensors, "lokr_w1")
    if "lokr_t2" in tensors:
        second = _tucker(tensors["lokr_t2"], tensors["lokr_w2_a"], tensors["lokr_w2_b"])
    else:
        second = _whole_or_product(tensors, "lokr_w2")
    first = first.reshape(*first.shape, *[1] * (second.ndim - 2))
    return torch.kron(first.contiguous(), second.contiguous())


def _whole_or_product(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name in tensors:
        return tensors[name]
    a, b = tensors[f"{name}_a"], tensors[f"{name}_b"]
    return (a @ b.flatten(1)).reshape(a.shape[0], *b.shape[1:])


def _tucker(core: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Kernel (out, in, ...) of a core (r, r, ...) and factors (r, out) and (r, in)."""
    return _einsum("ij...,ip,jq->pq...", core, a, b)


def _einsum(equation: str, *operands: Tensor) -> Tensor:
    product: Tensor = torch.einsum(equation, *operands)
    return product
