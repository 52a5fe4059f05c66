"""Dry-run rules: which dtypes may meet in an operation, and what a device lacks, as data.

Torch's meta kernels silently accept float32 with float16, and a device that is not present can't be
asked. So the rules are written here, and `tests/dry_run/test_rules.py` checks them against
torch's own kernels on real numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from everyframe.core.facts import DeviceFacts
from everyframe.precision.dtypes import dtype_name

#: Operations that require one dtype of their floating operands on every device, with the positions
#: of those operands among the arguments.
ONE_DTYPE: Mapping[str, tuple[int, ...]] = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::mv": (0, 1),
    "aten::dot": (0, 1),
    "aten::addmm": (0, 1, 2),
    "aten::addmv": (0, 1, 2),
    "aten::baddbmm": (0, 1, 2),
    "aten::convolution": (0, 1, 2),
    "aten::lerp": (0, 1),
    "aten::index_copy": (0, 3),
    "aten::scatter": (0, 3),
    "aten::grid_sampler_2d": (0, 1),
}

#: Norms whose kernels require parameters in the input's dtype; CPU kernels also accept float32
#: parameters with a narrower input.
NORMS: Mapping[str, tuple[int, ...]] = {
    "aten::native_layer_norm": (0, 2, 3),
    "aten::native_group_norm": (0, 1, 2),
}

#: Operations that a device emulates in a dtype for which it has no instructions.
PRODUCTS = frozenset(
    {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::convolution", "attention"}
)

#: Operations of angles, noise levels and hand-written statistics. In half precision a square is
#: infinite above 256 and an angle is off by radians. Kernels for a whole norm or softmax accumulate
#: in float32 themselves and are not listed.
STATISTICS = frozenset(
    {
        "aten::sin", "aten::cos", "aten::exp", "aten::log", "aten::rsqrt", "aten::square",
        "aten::var", "aten::var_mean", "aten::std", "aten::linalg_vector_norm",
    }
)  # fmt: skip

_NARROW = ("float16", "bfloat16")


def check_operands(
    operation: str, args: Sequence[Any], device: DeviceFacts
) -> Iterator[tuple[str, str]]:
    """Yield (kind, problem) for operands whose dtypes can't meet on that device."""
    if operation in ONE_DTYPE:
        names = _dtypes(args, ONE_DTYPE[operation])
        if len(set(names)) > 1:
            yield "clash", f"operands in {_join_names(names)}, must have one dtype"
    elif operation in NORMS:
        names = _dtypes(args, NORMS[operation])
        cpu_takes = device.kind == "cpu" and names[:1] != ["float32"]
        cpu_takes = cpu_takes and set(names[1:]) == {"float32"}
        if len(set(names)) > 1 and not cpu_takes:
            yield "clash", f"input and parameters in {_join_names(names)}, must have one dtype"


def check_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Iterator[tuple[str, str]]:
    """Yield (kind, problem) for the operands of fused attention."""
    names = [dtype_name(each.dtype) for each in (query, key, value)]
    if len(set(names)) > 1:
        yield "clash", f"query, key and value in {_join_names(names)}, must have one dtype"
    if mask is not None and dtype_name(mask.dtype) not in ("bool", "float32", names[0]):
        yield "clash", f"a mask in {dtype_name(mask.dtype)} for a query in {names[0]}"


def check_device(
    operation: str, tensors: Sequence[Tensor], results: Sequence[Tensor], device: DeviceFacts
) -> Iterator[tuple[str, str]]:
    """Yield (kind, problem) for what that device can't compute, or only slowly."""
    floating = [t for t in (*tensors, *results) if t.is_floating_point()]
    for name in dict.fromkeys(dtype_name(tensor.dtype) for tensor in floating):
        if name not in device.dtypes and not name.startswith("float8"):
            yield "missing", f"there is no {name} on {device.name}"
        elif operation in PRODUCTS and _emulates(device, name):
            yield "emulated", f"{name} has no instructions on {device.name}"
    limit = device.max_array_bytes
    for tensor in results:
        size = tensor.nbytes
        if limit is not None and size > limit:
            yield "too large", f"a tensor of {size / 1e9:.1f} GB, {device.name} ends at {limit}"


def check_statistics(
    operation: str, args: Sequence[Any], tensors: Sequence[Tensor]
) -> Iterator[tuple[str, str]]:
    """Yield (kind, problem) for angles, powers and statistics below float32."""
    power = args[1] if operation == "aten::pow" and len(args) > 1 else None
    squares = isinstance(power, (int, float)) and power == 2
    if operation not in STATISTICS and not squares:
        return
    for tensor in tensors:
        if dtype_name(tensor.dtype) in _NARROW:
            yield "narrow", f"in {dtype_name(tensor.dtype)}, wants float32 at least"


def check_island(operation: str, dtypes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (kind, problem) for a product or norm below float32 inside a float32 island."""
    if operation not in PRODUCTS and operation not in NORMS:
        return
    names = set(dtypes)
    if operation in NORMS and "float32" in names:
        return  # a CPU's kernel beside float32 parameters: it computes as they are
    for name in names & set(_NARROW):
        yield "island", f"computes in {name}, the plan keeps this part in float32"


def _emulates(device: DeviceFacts, dtype: str) -> bool:
    if dtype == "bfloat16":
        return device.kind == "cuda" and not device.has_fast_bf16
    return dtype == "float16" and device.kind == "cpu"


def _dtypes(args: Sequence[Any], places: Sequence[int]) -> list[str]:
    given = [args[place] for place in places if place < len(args)]
    return [
        dtype_name(each.dtype)
        for each in given
        if isinstance(each, Tensor) and each.is_floating_point()
    ]


def _join_names(names: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(names))
