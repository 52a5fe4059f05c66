"""The kernels in C as functions of tensors.

All take CPU tensors in float32 or bfloat16 and return a new tensor. Statistics and intermediate
values are float32, rounded once. Weights, biases and tables may have any dtype, as they are small.
`supports` checks whether tensors are suitable; nothing here falls back by itself. Sizes that don't
fit each other are errors, since C code would read beyond the end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from everyframe.ops.native.library import find

#: Numbers that the kernels read and write.
DTYPES = (torch.float32, torch.bfloat16)

_P, _L, _I, _D = c_void_p, c_long, c_int, c_double
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "group_norm": (_P, _P, _L, _L, _L, _L, _P, _P, _D, _P, _P, _P, _L, _I, _I, _I, _I),
    "row_norm": (_P, _P, _L, _L, _P, _P, _L, _D, _I, _I, _I),
    "geglu": (_P, _P, _L, _L, _I, _I),
    "gelu_all": (_P, _P, _L, _I, _I, _I),
    "gated_sum": (_P, _P, _P, _P, _L, _L, _L, _I, _I, _I),
    "modulate": (_P, _P, _P, _P, _L, _L, _L, _I, _I, _I),
    "rotate": (_P, _P, _L, _L, _L, _L, _P, _P, _P, _P, _L, _I, _I),
    "frame_attention": (_P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _D, _I, _I),
    "attention": (_P, _P, _P, _P, _L, _L, _L, _L, _L, _P, _D, _I, _I),
    "gated_linear": (_P, _P, _P, _P, _L, _L, _L, _I, _I),
    "has_halves": (),
    "channels_last": (_P, _P, _L, _L, _L, _I, _I),
    "winograd": (_P, _P, _P, _P, _L, _P, _P, *[_L] * 5, _P, _L, _I, _I, _P, _I, _I),
    "winograd_over_time": (_P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _L, _P, _I, _I),
}

#: Most frames and channels of a head of `frame_attention`; heads are multiples of 16 wide.
MOST_FRAMES, MOST_WIDTH = 64, 128


#: What a kernel returns without memory for its scratch.
_NO_MEMORY = 1


class KernelMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that also sees the calls of these kernels, which torch does not dispatch."""

    def note_kernel(self, inputs: Sequence[Tensor], output: Tensor) -> None:
        """A kernel has read these inputs and has written all of this output."""
        raise NotImplementedError


@cache
def _library() -> ctypes.CDLL | None:
    library = find()
    if library is not None:
        for name, types in _SIGNATURES.items():
            getattr(library, name).argtypes = types
    return library


def supports(*tensors: Tensor) -> bool:
    """Whether the kernels exist and support these tensors' dtype and device.

    False while gradients are recorded, while a block is compiled, and in a dry run.
    """
    return (
        all(each.device.type == "cpu" and each.dtype in DTYPES for each in tensors)
        and all(0 not in each.shape for each in tensors)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and _library() is not None
    )


def is_channels_last(x: Tensor) -> bool:
    """Whether the memory of `x` (N, C, ...) is rows of channels, without gaps."""
    return x.movedim(1, -1).is_contiguous()


@dataclass(frozen=True)
class NormMap:
    """Factors and summands for each place of a normed tensor, from a smaller map.

    Attributes:
        scale, shift: (N, C, ...), in the dtype of the normed tensor.
        places: for each place of a sample of that, int64, the place in the map.
    """

    scale: Tensor
    shift: Tensor
    places: Tensor


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    has_silu: bool = False,
    by: NormMap | None = None,
) -> Tensor:
    """Group norm of `x` (N, C, ...), and SiLU after it, in the memory layout of `x`.

    With a map in between, by which it is scaled and shifted, the result is channels last.
    """
    is_last = is_channels_last(x)
    is_copied = not (is_last or (by is None and x.is_contiguous()))
    if by is not None:
        x, is_last = channels_last(x), True
    elif not is_last:
        x = x.contiguous()
    y = x if is_copied else torch.empty_like(x)
    samples, channels = x.shape[:2]
    rows = x.numel() // (samples * channels)
    call(
        "group_norm", x, y, samples, rows, channels, num_groups, floats(weight, channels),
        floats(bias, channels), eps, *_map(by, x, rows), has_silu, is_last, is_bf16(x), output=y,
    )  # fmt: skip
    return y


def _map(by: NormMap | None, x: Tensor, rows: int) -> tuple[Tensor | int | None, ...]:
    """Scales, shifts, the place in them of each row of channels, and how many they have."""
    if by is None:
        return None, None, None, 0
    size, places = by.scale[0, 0].numel(), by.places.contiguous()
    wanted = (x.dtype, *x.shape[:2], size)
    maps = [(each.dtype, *each.shape[:2], each[0, 0].numel()) for each in (by.scale, by.shift)]
    if maps != [wanted] * 2:
        raise ValueError(f"a map of {wanted} is needed, got {maps}")
    least, most = map(int, places.aminmax())
    if (places.dtype, places.numel()) != (torch.int64, rows) or not 0 <= least <= most < size:
        given = f"{places.numel()} from {least} to {most} in {places.dtype}"
        raise ValueError(f"{rows} places among {size} are needed, got {given}")
    return channels_last(by.scale), channels_last(by.shift), places, size


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    is_rms: bool = False,
) -> Tensor:
    """Layer or RMS norm over the last dimension of `x`.

    Weight and bias are (C,), or tables whose rows apply as those of `gated_add`'s gate.
    """
    is_copied, x = not x.is_contiguous(), x.contiguous()
    y = x if is_copied else torch.empty_like(x)
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    size = next((each.numel() for each in (weight, bias) if each is not None), width)
    weights = [None if each is None else floats(each, size) for each in (weight, bias)]
    call("row_norm", x, y, rows, width, *weights, _rows_a_table(rows, width, size), eps, is_rms,
         is_bf16(x), output=y)  # fmt: skip
    return y


def geglu(x: Tensor) -> Tensor:
    """``value * gelu(gate)`` (..., C) of `x` (..., 2 C), which holds the values, then the gates."""
    if x.shape[-1] % 2:
        raise ValueError(f"values and gates are as many, got {x.shape[-1]} numbers a row")
    x = x.contiguous()
    width = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], width))
    call("geglu", x, y, y.numel() // width, width, is_bf16(x), output=y)
    return y


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`geglu` (..., C) of ``x W^T + b`` (..., 2 C), which is not rounded on the way.

    The weight (2 C, D) has the dtype of `x` (..., D); see `supports_products` for bfloat16.
    """
    depth, width = x.shape[-1], weight.shape[0] // 2
    if weight.shape != (2 * width, depth) or weight.dtype != x.dtype:
        given = f"{tuple(weight.shape)} in {weight.dtype}"
        raise ValueError(f"a weight (2 C, {depth}) in {x.dtype} is needed, got {given}")
    x, weight = x.contiguous(), weight.contiguous()
    y = x.new_empty((*x.shape[:-1], width))
    own = None if bias is None else floats(bias, 2 * width)
    rows = x.numel() // depth
    call("gated_linear", x, weight, own, y, rows, depth, width, is_bf16(x), output=y)
    return y


def supports_products(x: Tensor, weight: Tensor) -> bool:
    """Whether `gated_linear` supports these: even depths, bfloat16 only with its instructions."""
    if x.dtype != weight.dtype or not supports(x, weight):
        return False
    library = _library()
    assert library is not None
    return x.dtype != torch.bfloat16 or (x.shape[-1] % 2 == 0 and bool(library.has_halves()))


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """`torch.nn.functional.gelu`."""
    x = x.contiguous()
    y = torch.empty_like(x)
    call("gelu_all", x, y, x.numel(), approximate == "tanh", is_bf16(x), output=y)
    return y


def gated_add(x: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    """``x + gate * branch`` in the dtype of `x`.

    A row of `gate` (..., C) applies to consecutive rows of `x`: its leading sizes are those of
    `x`, followed by ones.
    """
    if branch.shape != x.shape:
        raise ValueError(f"x and branch have the shapes {tuple(x.shape)} and {tuple(branch.shape)}")
    x, branch = x.contiguous(), branch.contiguous()
    y = torch.empty_like(x)
    width = x.shape[-1]
    rows, size = x.numel() // width, gate.numel()
    call("gated_sum", x, branch, floats(gate, size), y, rows, width,
          _rows_a_table(rows, width, size), is_bf16(x), is_bf16(branch), output=y)  # fmt: skip
    return y


def modulate(x: Tensor, shift: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x (1 + scale) + shift`` in that dtype, float32 or that of `x`.

    Rows of `shift` and `scale` apply as those of `gated_add`'s gate.
    """
    x = x.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    width = x.shape[-1]
    rows, size = x.numel() // width, scale.numel()
    call("modulate", x, floats(scale, size), floats(shift, size), y, rows, width,
         _rows_a_table(rows, width, size), is_bf16(x), is_bf16(y), output=y)  # fmt: skip
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor, widths: Sequence[int] = ()) -> Tensor:
    """Rotate `x` (..., N, D) by tables of each of the N positions, in its order in memory.

    Tables are `everyframe.ops.rope.RotaryTable`'s (N, D), or with the `widths` of axes those of
    `AxesTable` (N, D/2).
    """
    positions, width = x.shape[-2:]
    if width % 2 or (widths and (sum(widths) != width or any(each % 2 for each in widths))):
        raise ValueError(f"pairs of channels rotate, got {width} as {tuple(widths)}")
    x_BHND = x if x.ndim == 4 else x.reshape(1, -1, positions, width)
    if x_BHND.stride(-1) != 1:
        x_BHND = x_BHND.contiguous()
    y = torch.empty_like(x_BHND)
    strides = [*x_BHND.stride()[:3], *y.stride()[:3]]
    size = positions * width // (2 if widths else 1)
    call(
        "rotate", x_BHND, y, *x_BHND.shape, (c_long * 6)(*strides), floats(cos, size),
        floats(sin, size), (c_long * len(widths))(*widths), len(widths), is_bf16(x), output=y,
    )  # fmt: skip
    return y.reshape(x.shape)


def attention(q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, scale: float) -> Tensor:
    """``softmax(q k^T scale) v`` (B, Q, heads, D), without a matrix of scores.

    `supports_attention` checks its inputs.
    """
    (batches, heads, queries, width), keys = q_BHQD.shape, k_BHLD.shape[2]
    given = [q_BHQD, k_BHLD, v_BHLD]
    if any(each.shape != (batches, heads, keys, width) for each in given[1:]) or scale <= 0:
        raise ValueError(f"queries, keys and values of {[tuple(x.shape) for x in given]}, {scale}")
    strides = [step for each in given for step in each.stride()[:3]]
    y = q_BHQD.new_empty((batches, queries, heads, width))
    call(
        "attention", *given, y, batches, heads, queries, keys, width, (c_long * 9)(*strides),
        scale, is_bf16(y), output=y,
    )  # fmt: skip
    return y


def supports_attention(q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor) -> bool:
    """Whether `attention` supports these: contiguous rows, bfloat16 as in `supports_products`."""
    given = (q_BHQD, k_BHLD, v_BHLD)
    return (
        len({(each.dtype, each.shape[-1], each.stride(-1)) for each in given}) == 1
        and q_BHQD.stride(-1) == 1
        and k_BHLD.shape == v_BHLD.shape
        and q_BHQD.shape[:2] == k_BHLD.shape[:2]
        and supports_products(q_BHQD, k_BHLD)
        and supports(v_BHLD)
        and (
            q_BHQD.dtype != torch.bfloat16
            or not any(step % 2 for each in given for step in each.stride()[:3])
        )
    )


def frame_attention(
    q_bTsC: Tensor, k_bTsC: Tensor, v_bTsC: Tensor, num_heads: int, scale: float
) -> Tensor:
    """Attention of each pixel over its frames, (b, T, s, C); heads are side by side in C.

    The three are of one shape and dtype; parts of contiguous rows are read where they lie.
    """
    batches, frames, pixels, channels = q_bTsC.shape
    parts = [q_bTsC, k_bTsC, v_bTsC]
    if any(each.shape != q_bTsC.shape for each in parts) or channels % num_heads:
        raise ValueError(f"{num_heads} heads of {[tuple(each.shape) for each in parts]}")
    step = q_bTsC.stride(2)
    strides = (frames * pixels * step, pixels * step, step, 1)
    if any(each.stride() != strides for each in parts):
        parts, step = [each.contiguous() for each in parts], channels
    y = q_bTsC.new_empty((batches, frames, pixels, channels))
    call(
        "frame_attention", *parts, y, batches, frames, pixels, num_heads, channels // num_heads,
        step, scale, is_bf16(y), output=y,
    )  # fmt: skip
    return y


def channels_last(x_NCTHW: Tensor) -> Tensor:
    """The same numbers as rows of channels, moved by a kernel where they are contiguous."""
    if not x_NCTHW.is_contiguous():
        return x_NCTHW.contiguous(memory_format=torch.channels_last_3d)
    y = torch.empty_like(x_NCTHW, memory_format=torch.channels_last_3d)
    samples, channels = x_NCTHW.shape[:2]
    pixels = x_NCTHW[0, 0].numel()
    call("channels_last", x_NCTHW, y, samples, channels, pixels, is_bf16(y), output=y)
    return y


def floats(values: Tensor, size: int) -> Tensor:
    """So many values as the kernels read them."""
    if values.device.type != "cpu" or values.numel() != size:
        found = f"{values.numel()} on {values.device}"
        raise ValueError(f"{size} values on the CPU are needed, got {found}")
    return values.float().contiguous()


def _rows_a_table(rows: int, width: int, size: int) -> int:
    """Rows of `width` for each row of a table of `size` numbers."""
    if size == 0 or size % width or rows % (size // width):
        raise ValueError(f"a table of {size} numbers is not for {rows} rows of {width}")
    return rows * width // size


def is_bf16(x: Tensor) -> bool:
    """Whether the numbers are bfloat16, and not float32; others would be read beyond their end."""
    if x.dtype not in DTYPES:
        raise ValueError(f"the kernels in C compute float32 and bfloat16, got {x.dtype}")
    return x.dtype == torch.bfloat16


def call(name: str, *given: Any, output: Tensor) -> None:
    """Call a kernel, which writes to this output among its arguments.

    Raises:
        MemoryError: there is none for its scratch.
        RuntimeError: it does not compute these sizes, which callers should have checked.
    """
    library = _library()
    assert library is not None, "callers check `supports` first"
    plain = [each.data_ptr() if isinstance(each, Tensor) else each for each in given]
    failed = getattr(library, name)(*plain, torch.get_num_threads())
    if failed == _NO_MEMORY:
        raise MemoryError(f"out of memory in the kernel {name}")
    if failed:
        raise RuntimeError(f"the kernel {name} does not compute these sizes")
    if torch._C._len_torch_dispatch_stack():
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, KernelMode):
                inputs = [x for x in given if isinstance(x, Tensor) and x is not output]
                mode.note_kernel(inputs, output)
