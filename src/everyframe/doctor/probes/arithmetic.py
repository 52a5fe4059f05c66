"""Probes of products, attention and timestep embedding, each against float64 on the CPU.

They use the settings of a run: true float32 and wide accumulation.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from everyframe.doctor.probes import outcome
from everyframe.hardware.accelerators import accelerator_facts, has_fast_bf16
from everyframe.numerics.tensor_stats import largest_error
from everyframe.ops.attention import attention
from everyframe.ops.embeddings import timestep_embedding
from everyframe.precision.dtypes import dtype_name
from everyframe.precision.strict_float32 import strict_float32

#: Maximum error of a sum of about a thousand products, relative to the largest value of the result:
#: some ten roundings of the result's dtype. TF32 gives 5e-4 and so fails as float32.
LIMITS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

#: (dtype, rows, in, out) of linear layers that crashed or gave errors or zeros: H20 with cuBLAS
#: 12.1, RTX 4090 with torch 2.9.1, Intel GPUs. See the known issues of the probe `linear`.
_SHAPES = (
    (torch.bfloat16, 2, 1024, 18432),
    (torch.float16, 64, 14688, 1536),
    (torch.bfloat16, 1, 256, 6144),
    (torch.float16, 14, 4096, 4096),
    (torch.float16, 2, 320, 1280),
    (torch.float32, 2, 320, 1280),
)


def dtypes_of(device: str) -> tuple[torch.dtype, ...]:
    """Dtypes that runs use on that device: no emulated ones, no fp16 on a CPU."""
    kind = torch.device(device).type
    if kind == "cpu":
        return torch.float32, torch.bfloat16
    if kind == "cuda" and torch.version.hip is None:
        has_bf16 = has_fast_bf16(torch.cuda.get_device_capability(device))
    else:
        known = {each.torch_name: each.has_fast_bf16 for each in accelerator_facts()}
        has_bf16 = known.get(device, False)
    narrow = (torch.bfloat16, torch.float16) if has_bf16 else (torch.float16,)
    return torch.float32, *narrow


def products(device: str) -> dict[str, Any]:
    """A product in every dtype, and one with partial sums beyond fp16 whose total fits."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(192, 1024, generator=generator)
    b = torch.randn(1024, 192, generator=generator)
    wrong, errors = [], {}
    with strict_float32():
        for dtype in dtypes_of(device):
            x, y = a.to(dtype), b.to(dtype)
            error = _relative(x.to(device) @ y.to(device), x.double() @ y.double())
            errors[dtype_name(dtype)] = error
            if not error <= LIMITS[dtype]:
                wrong.append(
                    f"products in {dtype_name(dtype)} are off by {error:.1e} of the largest value "
                    f"(allowed {LIMITS[dtype]:.0e})"
                )
            if not _sums_widely(device, dtype):
                wrong.append(
                    f"products in {dtype_name(dtype)} are summed too narrowly, and overflow"
                )
    return outcome(wrong, errors=errors)


def _sums_widely(device: str, dtype: torch.dtype) -> bool:
    """Whether 16 * (4096 - 4096) + 8 gives 8; the first half alone exceeds fp16."""
    x = torch.full((16, 8192), 16.0, dtype=dtype, device=device)
    y = torch.ones(8192, 16, dtype=dtype, device=device)
    y[4096:] = -1
    y[0] = 1.5
    return bool(torch.isclose((x @ y).float().cpu(), torch.tensor(8.0), atol=0.05).all())


def linear(device: str) -> dict[str, Any]:
    """Linear layers of the sizes in `_SHAPES`, whose exact result is known in advance."""
    wrong = []
    with strict_float32():
        for dtype, rows, wide, out in _SHAPES:
            if dtype not in dtypes_of(device):
                continue
            x = torch.ones(rows, wide, dtype=dtype, device=device)
            weight = torch.full((out, wide), 2.0**-10, dtype=dtype, device=device)
            bias = torch.ones(out, dtype=dtype, device=device)
            want = wide / 1024 + 1
            error = float((F.linear(x, weight, bias).float().cpu() - want).abs().max()) / want
            if not error <= 1e-2:
                wrong.append(
                    f"a linear layer from {wide} to {out} with {rows} rows in {dtype_name(dtype)} "
                    f"is off by {error:.1e}"
                )
    return outcome(wrong)


def large_keys(device: str) -> dict[str, Any]:
    """Attention with scores above 65504 before scaling; fp16 accumulation gives NaN."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 128, 128, generator=generator).sign() * 24
    k = q + 0.5 * torch.randn(q.shape, generator=generator)
    v = torch.randn(q.shape, generator=generator)
    wrong, errors = [], {}
    # fp16 on a CPU too: it is quick at this size, and the probe is about its range.
    for dtype in {torch.float16, *dtypes_of(device)} - {torch.float32}:
        a, b, c = (x.to(dtype) for x in (q, k, v))
        got = attention(a.to(device), b.to(device), c.to(device))
        want = F.scaled_dot_product_attention(a.double(), b.double(), c.double())
        error = _relative(got, want)
        errors[dtype_name(dtype)] = error
        if not error <= 0.02:
            wrong.append(
                f"attention in {dtype_name(dtype)} with large keys "
                + ("is not finite" if not bool(got.isfinite().all()) else f"is off by {error:.1e}")
            )
    return outcome(wrong, errors=errors)


def strides(device: str) -> dict[str, Any]:
    """torch's attention on permuted views and with a mask, with every available kernel."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, 200, 4, 64, generator=generator) for _ in range(3)]
    mask = torch.ones(200, 200, dtype=torch.bool)
    mask[:, -37:] = False
    wrong, errors = [], {}
    for dtype, masked in itertools.product(dtypes_of(device), (None, mask)):
        q, k, v = (x.to(dtype) for x in rows)
        want = _attend(q.double(), k.double(), v.double(), masked)
        there = masked.to(device) if masked is not None else None
        for name, kernel in _kernels(device).items():
            with strict_float32():
                got = _by_kernel(kernel, q.to(device), k.to(device), v.to(device), there)
            if got is None:
                continue  # this kernel doesn't take such inputs, which torch knows
            case = f"{name}, {dtype_name(dtype)}{', masked' if masked is not None else ''}"
            errors[case] = _relative(got, want)
            if not errors[case] <= 2 * LIMITS[dtype]:
                wrong.append(f"attention ({case}) is off by {errors[case]:.1e}")
    return outcome(wrong, errors=errors)


def _kernels(device: str) -> dict[str, SDPBackend | None]:
    """Kernels to try by name; None is torch's own choice."""
    kernels: dict[str, SDPBackend | None] = {"torch's choice": None}
    if torch.device(device).type == "cuda":
        for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
            kernels[name.lower()] = getattr(SDPBackend, name)
    return kernels


def _by_kernel(
    kernel: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Tensor | None:
    """Attention with that kernel; None if torch has none for these inputs."""
    if kernel is None:
        return _attend(q, k, v, mask)
    with sdpa_kernel(kernel):
        try:
            return _attend(q, k, v, mask)
        except RuntimeError as error:
            if "No available kernel" in str(error):
                return None
            raise


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention over (B, N, heads, D), viewed as (B, heads, N, D) without a copy."""
    a, b, c = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(a, b, c, attn_mask=mask)


def timestep(device: str) -> dict[str, Any]:
    """Embedding of timesteps that bf16 would round to others."""
    t = torch.tensor([0.5, 750.0, 937.0, 988.49, 999.4], dtype=torch.float64)
    got = timestep_embedding(t.float().to(device), 256)
    # float32 rounds angles of 1000 by 6e-5; kernels with fast sines were seen at 1e-3.
    error = _relative(got, timestep_embedding(t.float().double(), 256))
    wrong = [] if error <= 5e-4 else [f"the embedding of timesteps is off by {error:.1e}"]
    return outcome(wrong, error=error)


def _relative(got: Tensor, want: Tensor) -> float:
    return largest_error(got, want).relative
