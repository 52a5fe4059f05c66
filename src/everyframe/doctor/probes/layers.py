"""Probes of the layers of diffusion models: availability, results and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.doctor.probes import outcome
from everyframe.doctor.probes.arithmetic import LIMITS, dtypes_of
from everyframe.numerics.tensor_stats import largest_error
from everyframe.precision.dtypes import dtype_name
from everyframe.precision.strict_float32 import strict_float32

#: More memory than this many outputs indicates an indirect algorithm, such as im2col.
_MAX_OUTPUTS = 12


def layers(device: str) -> dict[str, Any]:
    """Run every layer of our models once in every dtype that runs use on the device."""
    wrong = []
    for dtype in dtypes_of(device):
        for name, call in _LAYERS.items():
            try:
                result = call(device, dtype)
            except (RuntimeError, TypeError, NotImplementedError) as error:
                wrong.append(f"{name} in {dtype_name(dtype)}: {' '.join(str(error).split())[:120]}")
                continue
            if not bool(result.isfinite().all()):
                wrong.append(f"{name} in {dtype_name(dtype)} is not finite")
    if float(torch.ones(2, device=device).cpu().numpy().sum()) != 2:
        wrong.append("tensors don't turn into arrays of NumPy")
    return outcome(wrong)


def _ones(*shape: int) -> Callable[[str, torch.dtype], Tensor]:
    return lambda device, dtype: torch.ones(shape, device=device, dtype=dtype)


def _layer(module: nn.Module, *shape: int) -> Callable[[str, torch.dtype], Tensor]:
    def call(device: str, dtype: torch.dtype) -> Tensor:
        result: Tensor = module.to(device, dtype)(_ones(*shape)(device, dtype))
        return result

    return call


_LAYERS: dict[str, Callable[[str, torch.dtype], Tensor]] = {
    "linear": _layer(nn.Linear(8, 8), 2, 8),
    "layer norm": _layer(nn.LayerNorm(8), 2, 8),
    "group norm": _layer(nn.GroupNorm(2, 8), 1, 8, 4, 4),
    "2D convolution": _layer(nn.Conv2d(4, 4, 3), 1, 4, 8, 8),
    "3D convolution": _layer(nn.Conv3d(4, 4, 3), 1, 4, 4, 8, 8),
    "GELU": _layer(nn.GELU(approximate="tanh"), 4),
    "SiLU": _layer(nn.SiLU(), 4),
    "softmax": _layer(nn.Softmax(-1), 4),
    "padding": _layer(nn.ReplicationPad3d(1), 1, 2, 4, 4, 4),
    "index": lambda device, dtype: _ones(4, 4)(device, dtype)[torch.tensor([1, 2], device=device)],
}


def convolution(device: str) -> dict[str, Any]:
    """A 3D convolution of a video autoencoder: values, peak memory and time in every dtype."""
    kind = torch.device(device).type
    channels, shape = (16, (5, 20, 20)) if kind == "cpu" else (128, (6, 96, 96))
    torch.manual_seed(0)
    conv, x = nn.Conv3d(channels, channels, 3), torch.randn(1, channels, *shape)
    wrong, notes, measured = [], [], {}
    with torch.no_grad(), strict_float32():
        for dtype in dtypes_of(device):
            module, given = conv.to(dtype), x.to(dtype)
            corner = given[..., :16, :16].double()
            want = F.conv3d(corner, _wide(module.weight), _wide(module.bias))
            got, seconds, outputs = _time(module.to(device), given.to(device), kind)
            module.to("cpu")
            error = largest_error(got[..., :14, :14], want).relative
            measured[dtype_name(dtype)] = {"error": error, "seconds": seconds, "outputs": outputs}
            if not error <= 2 * LIMITS[dtype]:
                wrong.append(f"a 3D convolution in {dtype_name(dtype)} is off by {error:.1e}")
            if outputs is not None and outputs > _MAX_OUTPUTS:
                notes.append(
                    f"a 3D convolution in {dtype_name(dtype)} takes {outputs:.0f} times the memory "
                    "of its output"
                )
            conv = conv.float()
        if kind == "cuda":
            wrong += _turing(device)
    return outcome(wrong, notes, dtypes=measured)


def _wide(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.detach().cpu().double()


def _time(module: nn.Module, x: Tensor, kind: str) -> tuple[Tensor, float, float | None]:
    """The result, its time in seconds, and its peak memory beyond the result."""
    peak = None
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats(x.device)
        before = torch.cuda.memory_allocated(x.device)
        result = module(x)
        grown = torch.cuda.max_memory_allocated(x.device) - before
        peak = grown / result.nbytes
    began = time.perf_counter()
    result = module(x)
    got: Tensor = result.cpu()  # waits for the device
    return got, time.perf_counter() - began, peak


def _turing(device: str) -> list[str]:
    """The tensor that becomes NaN on GTX 16xx: 0.5 through 640 channels in fp16."""
    conv = nn.Conv2d(640, 640, 3, padding=1).to(device, torch.float16)
    x = torch.full((2, 640, 64, 64), 0.5, device=device, dtype=torch.float16)
    finite = bool(conv(x).isfinite().all())
    return [] if finite else ["a 2D convolution of 640 channels in fp16 is not finite"]


def upsampling(device: str) -> dict[str, Any]:
    """Nearest upsampling of images and clips, which must repeat values exactly."""
    wrong = []
    for dtype in dtypes_of(device):
        for shape in ((1, 4, 6, 6), (1, 4, 3, 6, 6)):
            x = torch.arange(4.0 * 6 * 6 * (3 if len(shape) == 5 else 1)).reshape(shape) % 128
            want = x
            for axis in range(2, len(shape)):
                want = want.repeat_interleave(2, axis)
            try:
                got = F.interpolate(x.to(device, dtype), scale_factor=2.0, mode="nearest")
            except (RuntimeError, NotImplementedError) as error:
                wrong.append(f"{len(shape) - 2}D in {dtype_name(dtype)}: {str(error)[:120]}")
                continue
            if not torch.equal(got.float().cpu(), want):
                wrong.append(f"{len(shape) - 2}D upsampling in {dtype_name(dtype)} changes values")
    return outcome(wrong)
