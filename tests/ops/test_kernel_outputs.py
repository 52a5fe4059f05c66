"""Where the kernels in C write: not into their input, and to memory of the CPU, if there is any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from everyframe.hardware.memory import is_out_of_memory
from everyframe.ops.native import convolutions, kernels, library
from helpers.kernel_numbers import numbers

pytestmark = [
    pytest.mark.skipif(bool(missing := library.why_not()), reason=str(missing)),
    pytest.mark.usefixtures("inference_mode"),
]


class Placeholder(Tensor):
    """Stands for a tensor that somebody else holds: any operation on it is one on that."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = [x.as_subclass(Tensor) if isinstance(x, cls) else x for x in args]
            return func(*plain, **(kwargs or {}))


def test_norms_leave_what_a_placeholder_stands_for() -> None:
    """Which is another object than the placeholder, and no copy of it."""
    x, w = numbers(2, 8, 3, 4, 8), torch.ones(8)
    before, given = x.clone(), x.as_subclass(Placeholder)
    by = kernels.NormMap(x[..., :1, :1, :1], x[..., :1, :1, :1], torch.zeros(3, 4, 8).long())
    kernels.layer_norm(given, w, None, 1e-6)
    kernels.group_norm(given, 2, w, w, 1e-6)
    kernels.group_norm(given, 2, w, w, 1e-6, by=by)
    kernels.group_norm(kernels.channels_last(x).as_subclass(Placeholder), 2, w, w, 1e-6, by=by)
    assert torch.equal(x, before)


def test_a_kernel_without_memory_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's are, so that a run falls back and a trial refuses nothing."""
    monkeypatch.setattr(kernels, "_library", lambda: SimpleNamespace(gelu_all=lambda *_: 1))
    with pytest.raises(MemoryError, match="out of memory in the kernel gelu_all") as error:
        kernels.gelu(numbers(3))
    assert is_out_of_memory(error.value)


def test_results_are_on_the_cpu_whatever_the_default_device_is() -> None:
    q = numbers(1, 2, 5, 16)
    x_NCHW, weight = numbers(1, 4, 6, 6), numbers(3, 4, 3, 3)
    with torch.device("meta"):
        made = (
            kernels.attention(q, q, q, 0.25),
            kernels.frame_attention(q, q, q, 1, 0.25),
            convolutions.winograd(x_NCHW, weight, None),
        )
    assert {each.device.type for each in made} == {"cpu"}
