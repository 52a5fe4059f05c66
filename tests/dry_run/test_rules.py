"""The rules of the dry run are torch's own: each is tried on real numbers, on this CPU.

What only cards refuse can't be tried here and is marked so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from everyframe.core.facts import DeviceFacts
from everyframe.dry_run import rules
from everyframe.hardware.profiles import find_profile

aten: Any = torch.ops.aten
WIDE, NARROW = torch.float32, torch.bfloat16
CPU = DeviceFacts("a processor", "cpu", None, 1, 1, has_fast_bf16=True)


def a(*shape: int, dtype: torch.dtype = WIDE) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def device(name: str) -> DeviceFacts:
    return find_profile(name).machine().devices[0]


CONV = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
#: Operation -> arguments in one dtype; one operand after the other is narrowed.
OPERATIONS: dict[str, tuple[Any, ...]] = {
    "mm": (a(2, 3), a(3, 2)),
    "bmm": (a(1, 2, 3), a(1, 3, 2)),
    "mv": (a(2, 3), a(3)),
    "dot": (a(3), a(3)),
    "addmm": (a(2), a(2, 3), a(3, 2)),
    "addmv": (a(2), a(2, 3), a(3)),
    "baddbmm": (a(1, 2, 2), a(1, 2, 3), a(1, 3, 2)),
    "convolution": (a(1, 2, 3, 3), a(2, 2, 1, 1), a(2), *CONV),
    "lerp": (a(2), a(2), 0.5),
    "index_copy": (a(2, 2), 0, torch.tensor([0]), a(1, 2)),
    "scatter": (a(2, 2), 0, torch.zeros(1, 2, dtype=torch.int64), a(1, 2)),
    "grid_sampler_2d": (a(1, 1, 2, 2), a(1, 2, 2, 2), 0, 0, False),
}


def test_every_rule_is_tried() -> None:
    assert {f"aten::{name}" for name in OPERATIONS} == set(rules.ONE_DTYPE)


@pytest.mark.parametrize("name", OPERATIONS)
def test_torch_refuses_what_the_rules_call_a_clash(name: str) -> None:
    args = OPERATIONS[name]
    operation = getattr(aten, name)
    if name == "convolution":
        # The bare operation takes another bias on a CPU, the function that everybody calls doesn't.
        args, operation = args[:3], F.conv2d
    operation(*args)
    assert not list(rules.check_operands(f"aten::{name}", args, CPU))
    for place in rules.ONE_DTYPE[f"aten::{name}"]:
        if name == "addmv" and place == 0 and Version(torch.__version__) < Version("2.13"):
            continue  # seen with torch 2.11: it takes another bias there
        mixed = list(args)
        mixed[place] = args[place].to(NARROW)
        with pytest.raises(RuntimeError):
            operation(*mixed)
        (kind, problem), *_ = rules.check_operands(f"aten::{name}", mixed, CPU)
        assert kind == "clash"
        assert "float32" in problem
        assert "bfloat16" in problem


@pytest.mark.parametrize(
    "operation", [torch.add, torch.mul, torch.maximum, lambda x, y: torch.cat([x, y]),
                  lambda x, y: torch.addcmul(x, y, y), lambda x, y: torch.where(x > 0, x, y)]
)  # fmt: skip
def test_what_promotes_is_no_clash(operation: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert operation(a(2), a(2, dtype=NARROW)).dtype == WIDE


def test_norms_take_wide_parameters_on_a_cpu_alone() -> None:
    x, wide = a(1, 2, 4, dtype=NARROW), a(2)
    F.group_norm(x, 1, wide, wide)
    args = (x, wide, wide, 1, 2, 4, 1, 1e-5)
    assert not list(rules.check_operands("aten::native_group_norm", args, CPU))
    # The card's kernel reads parameters in the input's dtype (aten/native/cuda/group_norm).
    card = replace(CPU, kind="cuda")
    assert list(rules.check_operands("aten::native_group_norm", args, card))
    narrow = a(2, dtype=NARROW)
    with pytest.raises(RuntimeError):
        F.group_norm(a(1, 2, 4), 1, narrow, narrow)
    args = (a(1, 2, 4), narrow, narrow, 1, 2, 4, 1, 1e-5)
    assert list(rules.check_operands("aten::native_group_norm", args, CPU))


def test_attention_wants_one_dtype_and_a_mask_that_goes_with_it() -> None:
    q, narrow = a(1, 1, 2, 8), a(1, 1, 2, 8, dtype=NARROW)
    mask = torch.ones(2, 2, dtype=torch.bool)
    for operands, fine in (
        ((q, q, q, mask), True),
        ((q, q, q, mask.to(WIDE)), True),
        ((narrow, narrow, narrow, mask.to(NARROW)), True),
        ((q, narrow, q, mask), False),
        ((q, q, q, mask.to(NARROW)), False),
    ):
        assert (not list(rules.check_attention(*operands))) is fine
        if fine:
            F.scaled_dot_product_attention(*operands)
        else:
            with pytest.raises(RuntimeError):
                F.scaled_dot_product_attention(*operands)


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("mps", torch.float64, "missing"),
        ("cuda-sm70", torch.bfloat16, "emulated"),
        ("cuda-sm75", torch.bfloat16, "emulated"),
        ("cuda-sm80", torch.bfloat16, None),
        ("rocm", torch.bfloat16, None),
        ("cpu-bf16", torch.bfloat16, None),
        ("cpu-fp32", torch.float16, "emulated"),
        ("cpu-fp32", torch.float64, None),
    ],
)
def test_what_a_device_lacks(name: str, dtype: torch.dtype, kind: str | None) -> None:
    x = torch.empty(2, 2, dtype=dtype, device="meta")
    found = [kind for kind, _ in rules.check_device("aten::mm", [x, x], [x], device(name))]
    assert found == ([] if kind is None else [kind])
    # Only products have instructions of their own.
    adding = [kind for kind, _ in rules.check_device("aten::add", [x, x], [x], device(name))]
    assert adding == (["missing"] if kind == "missing" else [])


def test_apples_arrays_end_at_4_gib() -> None:
    large = torch.empty(1 << 30, 2, dtype=torch.float32, device="meta")
    found = dict(rules.check_device("aten::add", [], [large], device("mps")))
    assert "8.6 GB" in found["too large"]
    assert not list(rules.check_device("aten::add", [], [large], device("cuda-sm90")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_angles_and_squares_below_float32_are_reported(dtype: torch.dtype) -> None:
    narrow, wide = a(2, dtype=dtype), a(2)
    for operation, args in (("aten::sin", ()), ("aten::pow", (narrow, 2)), ("aten::rsqrt", ())):
        assert list(rules.check_statistics(operation, args, [narrow]))
        assert not list(rules.check_statistics(operation, args, [wide]))
    # A cube is an activation's (GELU), no statistic.
    assert not list(rules.check_statistics("aten::pow", (narrow, 3), [narrow]))


def test_why_they_are_reported() -> None:
    """The numbers behind it: a noise level of 700 squared, and timestep 999.4."""
    assert torch.tensor(700.0).half().square().isinf()
    assert torch.tensor(999.4).bfloat16().item() == 1000
