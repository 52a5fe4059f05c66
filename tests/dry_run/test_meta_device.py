"""What is computed on the stand-in without torch has the sizes and dtypes that kernels give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everyframe.dry_run.meta_device import (
    STAND_IN,
    MetaKernelCache,
    OperationDict,
    compute,
    operation_key,
    tensors_of,
)

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 8, 5), (2, 8, 3, 4), (1, 8, 2, 3, 4)])
def test_group_norm_is_that_of_the_kernel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, ones = torch.zeros(shape, dtype=dtype), torch.ones(8, dtype=dtype)
    rest = (shape[0], 8, x[0, 0].numel(), 4, 1e-5)
    norm = torch.ops.aten.native_group_norm.default
    real = norm(x, ones, ones, *rest)
    dry = compute(norm, (x.to(STAND_IN), ones.to(STAND_IN), ones.to(STAND_IN), *rest), {})
    assert [each.shape for each in dry] == [each.shape for each in real]
    assert [each.dtype for each in dry] == [each.dtype for each in real]
    assert dry[0].stride() == real[0].stride()
    assert {each.device.type for each in dry} == {STAND_IN}


def test_anything_else_is_torch_s_own() -> None:
    x = torch.zeros(2, 3, device=STAND_IN)
    assert compute(torch.ops.aten.mm.default, (x, x.T), {}).shape == (2, 2)


def known(dry: MetaKernelCache, func: Any, *args: Any) -> Any:
    return dry(operation_key(func, args, {}), func, args, {})


def test_what_is_known_of_operations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OperationDict, "most", 3)
    known = OperationDict[int]()
    for number in range(10):
        known[number] = number
        assert known[number] == number
        assert len(known) <= 3


def test_what_is_remembered_is_what_torch_would_give_again() -> None:
    """Of new storage each time, and another answer for other sizes, strides, dtypes or numbers."""
    dry = MetaKernelCache()
    x = torch.empty(4, 6, device=STAND_IN)
    half, wide = x.to(torch.bfloat16), torch.empty(2, 3, 6, 8, device=STAND_IN)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.add.Tensor, (x, x)), (aten.add.Tensor, (half, x)), (aten.add.Tensor, (x.T, x.T)),
        (aten.mul.Tensor, (half, 2)), (aten.mul.Tensor, (half, 2.0)),
        (aten.mm.default, (x, x.T)), (aten.sum.dim_IntList, (x, [1])),
        (aten.sum.dim_IntList, (x, [0])), (aten.native_layer_norm.default, (x, [6], None, None, 1)),
        (aten.cat.default, ([x, x], 1)), (aten.cat.default, ([x, x, x], 1)),
        (aten._softmax.default, (x.T, 1, False)),
        (aten.convolution.default, (wide, wide.new_empty(5, 3, 3, 3), None, [1, 1], [1, 1], [1, 1],
                                    False, [0, 0], 1)),
    ]  # fmt: skip
    for _ in range(2):
        for func, given in calls:
            wanted, found = tensors_of(func(*given)), tensors_of(known(dry, func, *given))
            facts = [
                [(each.shape, each.stride(), each.dtype, each.untyped_storage().nbytes())
                 for each in one]
                for one in (wanted, found)
            ]  # fmt: skip
            assert facts[0] == facts[1], func
            assert {each.device.type for each in found} == {STAND_IN}
    first, second = (known(dry, aten.add.Tensor, x, x) for _ in range(2))
    assert first.untyped_storage() is not second.untyped_storage()


def test_views_and_what_is_changed_in_place_are_not_remembered() -> None:
    dry, x = MetaKernelCache(), torch.empty(4, 6, device=STAND_IN)
    for _ in range(2):
        assert known(dry, aten.t.default, x).untyped_storage() is x.untyped_storage()
        assert known(dry, aten.add_.Tensor, x, 1) is x
        assert known(dry, aten._unsafe_view.default, x, [24]).shape == (24,)
    # What has numbers may decide.
    three = torch.tensor(3.0)
    assert known(dry, aten.add.Tensor, three, three).item() == 6
    assert known(dry, aten.add.Tensor, three, three + 1).item() == 7
