"""Upcasts go as far as the device has dtypes."""

from __future__ import annotations

import pytest
import torch

from everyframe.ops.device import simulate_device_type
from everyframe.ops.dtypes import upcast_to_widest


@pytest.mark.parametrize(
    ("kind", "widest"),
    [("cuda", torch.float64), ("cpu", torch.float64), ("mps", torch.float32),
     ("npu", torch.float32), ("xpu", torch.float32)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_some_devices_have_no_float64(kind: str, widest: torch.dtype, dtype: torch.dtype) -> None:
    with simulate_device_type(kind):
        assert upcast_to_widest(torch.empty(2, dtype=dtype, device="meta")).dtype == widest
