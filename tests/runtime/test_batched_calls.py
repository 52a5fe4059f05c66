"""Calls of a module made as one: each has the bits that it has alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from everyframe.ops.call_override import ModuleCall
from everyframe.runtime.batched_calls import BatchedModule


class Net(nn.Module):
    """A product over rows, and one over a table that all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table_layer = nn.Linear(64, 64), nn.Linear(64, 64)
        self.table = nn.Parameter(torch.randn(2, 64))

    def forward(self, x_B: Tensor) -> Tensor:
        y: Tensor = self.layer(x_B.flatten(0, 1)).unflatten(0, x_B.shape[:2])
        return y + self.table_layer(self.table).sum(0)


class RowCounter(nn.Linear):
    """Counts the rows of each product, as a kernel is chosen by them."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return super().forward(x)


def call_of(net: nn.Module, rows: int) -> ModuleCall:
    return ModuleCall(net, type(net), (torch.randn(rows, 5, 64),), {})


@torch.inference_mode()
def test_products_have_the_rows_of_one_video() -> None:
    net = Net()
    net.layer = counter = RowCounter()
    with BatchedModule(net) as batched:
        # A call of as many rows as two of the others have together.
        call_of(net, 2).compute()
        calls = [call_of(net, 1) for _ in range(2)]
        alone = [call.compute() for call in calls]
        counter.rows.clear()
        together = batched.compute(calls)
    assert counter.rows == [5, 5]
    assert all(map(torch.equal, together, alone))
    assert type(net.layer) is RowCounter, "the module is as before"
    assert not net._forward_pre_hooks
