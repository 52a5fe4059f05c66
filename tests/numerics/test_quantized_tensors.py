"""Faults in modules whose weights are tensors of a quantizer's class, in which few operations work.

Those of torchao are wrappers: codes and scales are tensors inside them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everyframe.numerics.fault_locator import bad_weights, locate_fault
from everyframe.numerics.tensor_stats import iter_tensors, value_range


class Codes(Tensor):
    """A weight in eight bits with one scale; it multiplies and is detached, nothing else."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Codes:
        made: Codes = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=scale.dtype, device=codes.device
        )
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Codes(args[0].codes, args[0].scale)
        if func in (torch.ops.aten.t.default, torch.ops.aten.mm.default):
            wide = [each.codes * each.scale if type(each) is Codes else each for each in args]
            return func(*wide)
        raise NotImplementedError(f"no {func} of a quantizer's tensors")


def layer(scale: float) -> nn.Linear:
    made = nn.Linear(4, 4, bias=False).requires_grad_(False)
    codes = Codes(torch.full((4, 4), 100, dtype=torch.int8), torch.tensor(scale).half())
    made.weight = nn.Parameter(codes, requires_grad=False)
    return made


def test_such_a_tensor_stands_for_its_scales() -> None:
    weight = layer(0.5).weight
    with pytest.raises(NotImplementedError):
        torch.aminmax(weight)
    assert [each.item() for each in iter_tensors(weight)] == [0.5]
    assert value_range(weight).largest == 0.5
    assert bad_weights({"net": layer(0.5)}) == []


def test_a_product_that_overflows_is_found() -> None:
    net = layer(600.0)  # 100 * 600 fits into float16, four of them don't
    found = locate_fault({"net": net}, lambda: net(torch.ones(1, 4, dtype=torch.float16)))
    assert found.fault is not None
    assert (found.fault.place, found.fault.operation, found.fault.made.high) == (
        "net", "mm", float("inf"),
    )  # fmt: skip


def test_scales_that_are_not_finite_are_weights_that_are_not() -> None:
    net = layer(float("nan"))
    assert [name for name, _ in bad_weights({"net": net})] == ["net.weight"]
    found = locate_fault({"net": net}, lambda: net(torch.ones(1, 4, dtype=torch.float16)))
    assert found.fault is not None
    assert (found.fault.cause, found.fault.module) == ("weights", "weight")
