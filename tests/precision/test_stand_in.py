"""What is computed on the stand-in without torch has the sizes and dtypes that kernels give."""

from __future__ import annotations

import pytest
import torch

from everyframe.precision.stand_in import STAND_IN, computed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 8, 5), (2, 8, 3, 4), (1, 8, 2, 3, 4)])
def test_group_norm_is_that_of_the_kernel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, ones = torch.zeros(shape, dtype=dtype), torch.ones(8, dtype=dtype)
    rest = (shape[0], 8, x[0, 0].numel(), 4, 1e-5)
    norm = torch.ops.aten.native_group_norm.default
    real = norm(x, ones, ones, *rest)
    dry = computed(norm, (x.to(STAND_IN), ones.to(STAND_IN), ones.to(STAND_IN), *rest), {})
    assert [each.shape for each in dry] == [each.shape for each in real]
    assert [each.dtype for each in dry] == [each.dtype for each in real]
    assert dry[0].stride() == real[0].stride()
    assert {each.device.type for each in dry} == {STAND_IN}


def test_anything_else_is_torch_s_own() -> None:
    x = torch.zeros(2, 3, device=STAND_IN)
    assert computed(torch.ops.aten.mm.default, (x, x.T), {}).shape == (2, 2)
