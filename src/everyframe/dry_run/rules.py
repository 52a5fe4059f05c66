"""What may meet in an operation, and what a device lacks: the rules of a dry run, as data.

torch's meta kernels multiply float32 with float16 without a word, and a device that is not here
can't be asked; so the rules stand here, and `tests/dry_run/test_rules.py` holds them against what
torch's own kernels say on real numbers. Read next: `everyframe.dry_run.executor`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from everyframe.core.facts import DeviceFacts
from everyframe.precision.dtypes import dtype_name

#: Operations that multiply or write their floating operands in one dtype, and refuse two, on every
#: device: the places of those operands among the arguments.
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

#: Norms whose kernels take parameters of the input's dtype; a CPU's take float32 ones beside a
#: narrower input as well.
NORMS: Mapping[str, tuple[int, ...]] = {
    "aten::native_layer_norm": (0, 2, 3),
    "aten::native_group_norm": (0, 1, 2),
}

#: Products, which a device without instructions for a dtype emulates.
PRODUCTS = frozenset(
    {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::convolution", "attention"}
)

#: What angles, noise levels and hand-written statistics are made with. In half precision a square
#: is infinite above 256 and an angle is off by radians. Kernels that compute a whole norm or
#: softmax hold their statistics in float32 themselves, and are not among these.
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
    """(kind, problem) for operands that can't meet on that device."""
    if operation in ONE_DTYPE:
        names = _dtypes(args, ONE_DTYPE[operation])
        if len(set(names)) > 1:
            yield "clash", f"operands in {_listed(names)}, must have one dtype"
    elif operation in NORMS:
        names = _dtypes(args, NORMS[operation])
        cpu_takes = device.kind == "cpu" and names[:1] != ["float32"]
        cpu_takes = cpu_takes and set(names[1:]) == {"float32"}
        if len(set(names)) > 1 and not cpu_takes:
            yield "clash", f"input and parameters in {_listed(names)}, must have one dtype"


def check_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Iterator[tuple[str, str]]:
    """(kind, problem) of fused attention's operands."""
    names = [dtype_name(each.dtype) for each in (query, key, value)]
    if len(set(names)) > 1:
        yield "clash", f"query, key and value in {_listed(names)}, must have one dtype"
    if mask is not None and dtype_name(mask.dtype) not in ("bool", "float32", names[0]):
        yield "clash", f"a mask in {dtype_name(mask.dtype)} for a query in {names[0]}"


def check_device(
    operation: str, tensors: Sequence[Tensor], results: Sequence[Tensor], device: DeviceFacts
) -> Iterator[tuple[str, str]]:
    """(kind, problem) for what that device has no way, or only a slow one, to compute."""
    floating = [t for t in (*tensors, *results) if t.is_floating_point()]
    for name in dict.fromkeys(dtype_name(tensor.dtype) for tensor in floating):
        if name not in device.dtypes and not name.startswith("float8"):
            yield "missing", f"there is no {name} on {device.name}"
        elif operation in PRODUCTS and _emulates(device, name):
            yield "emulated", f"{name} has no instructions on {device.name}"
    limit = device.max_array_bytes
    for tensor in results:
        size = tensor.numel() * tensor.element_size()
        if limit is not None and size > limit:
            yield "too large", f"a tensor of {size / 1e9:.1f} GB, {device.name} ends at {limit}"


def check_statistics(
    operation: str, args: Sequence[Any], tensors: Sequence[Tensor]
) -> Iterator[tuple[str, str]]:
    """(kind, problem) for angles, powers and statistics below float32."""
    power = args[1] if operation == "aten::pow" and len(args) > 1 else None
    squares = isinstance(power, (int, float)) and power == 2
    if operation not in STATISTICS and not squares:
        return
    for tensor in tensors:
        if dtype_name(tensor.dtype) in _NARROW:
            yield "narrow", f"in {dtype_name(tensor.dtype)}, wants float32 at least"


def check_island(operation: str, tensors: Sequence[Tensor]) -> Iterator[tuple[str, str]]:
    """(kind, problem) for a product or norm below float32, in a part that the plan keeps wide."""
    if operation not in PRODUCTS and operation not in NORMS:
        return
    names = {dtype_name(tensor.dtype) for tensor in tensors}
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


def _listed(names: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(names))
