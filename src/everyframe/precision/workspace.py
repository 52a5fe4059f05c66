"""What kernels hold beside their operands and results, where it was measured.

Measured with torch 2.13 on a CPU with AVX-512, one thread, tensors of 10 to 150 MB: the process's
peak while one operation ran, less its result. A card's libraries take workspaces too, which nobody
here has measured; `planning.forecast.USABLE_SHARE` leaves room for them.
Read next: `everyframe.precision.rehearse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from everyframe.core.facts import DeviceFacts

#: Below this product of an input's first four sizes PyTorch takes its own 3-D convolution, which
#: writes every patch out, and not oneDNN's.
_OWN_CONVOLUTION = 20480


def workspace(
    operation: str, tensors: Sequence[Tensor], results: Sequence[Tensor], device: DeviceFacts
) -> int:
    """Bytes that a kernel holds for a moment beside `tensors` and `results`."""
    if device.kind != "cpu" or not tensors:
        return 0
    if operation == "aten::native_group_norm":
        return _in_one_piece(tensors[0])
    if operation != "aten::convolution":
        return 0
    given, weight, made = tensors[0], tensors[1], results[0]
    kernel = tuple(weight.shape[2:])
    copies = _in_one_piece(given)
    if prod(kernel) == 1:
        return copies
    small = given.ndim == 5 and prod(given.shape[:4]) <= _OWN_CONVOLUTION
    if small or (len(kernel) == 3 and kernel[1:] == (1, 1)):
        return copies + prod(kernel) * _bytes(given)  # patches written out
    return copies + max(_bytes(given), _bytes(made))  # blocks of channels


def _in_one_piece(tensor: Tensor) -> int:
    return 0 if tensor.is_contiguous() else _bytes(tensor)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
