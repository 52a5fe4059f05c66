"""Predict whether torch uses a fused attention kernel on a device that is not present.

Without one, torch materialises the scores as two products and a softmax. The rules are those of
torch 2.13 (`aten/src/ATen/native/transformers/sdp_utils_cpp.cpp` and `cuda/sdp_utils.cpp`), except
for address alignment. `tests/dry_run/test_sdpa_backend.py` checks the CPU rules against torch's
choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from everyframe.core.facts import DeviceFacts
from everyframe.precision.dtypes import dtype_name

_HALF = ("float16", "bfloat16")

#: Largest head size that flash attention supports on CUDA.
_LARGEST_HEAD = 256


@dataclass(frozen=True)
class SdpaCall:
    """Arguments of `scaled_dot_product_attention`: (…, Q, D), (…, L, D) and (…, L, V)."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    def in_one_dtype(self) -> SdpaCall:
        """The same call with all operands in the dtype of the values."""
        mask, dtype = self.attn_mask, self.value.dtype
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        return replace(self, query=self.query.to(dtype), key=self.key.to(dtype), attn_mask=mask)

    @property
    def dtype(self) -> str:
        """Name of the query's dtype."""
        return dtype_name(self.query.dtype)

    @property
    def head(self) -> int:
        """Head size (channels per head)."""
        return self.query.shape[-1]

    @property
    def has_one_size_of_head(self) -> bool:
        """Whether query, key and value have the same head size."""
        return len({each.shape[-1] for each in self.operands}) == 1


def is_fused(asked: SdpaCall, device: DeviceFacts) -> bool:
    """Whether one of the currently allowed fused kernels computes this call on the device.

    On Apple devices MPSGraph computes it as one kernel, which holds the scores; it counts as fused.
    """
    allowed = _cur_sdpa_kernel_backends()
    if device.kind == "cpu":
        return SDPBackend.FLASH_ATTENTION in allowed and _fits_processor(asked)
    if not _has_shapes(asked) or device.kind != "cuda":
        return _has_shapes(asked)
    flash = SDPBackend.FLASH_ATTENTION in allowed or SDPBackend.CUDNN_ATTENTION in allowed
    efficient = SDPBackend.EFFICIENT_ATTENTION in allowed
    return (flash and _fits_flash(asked, device)) or (efficient and _fits_efficient(asked, device))


def _has_shapes(asked: SdpaCall) -> bool:
    """Whether shapes suit a fused kernel.

    Four dimensions, one batch size, matching heads, no empty rows, contiguous channels.
    """
    query, key, value = asked.operands
    if any(each.ndim != 4 or each.stride(-1) != 1 for each in asked.operands):
        return False
    same_batch = query.shape[0] == key.shape[0] == value.shape[0]
    heads = query.shape[1], key.shape[1]
    goes = heads[0] == heads[1] or (asked.enable_gqa and heads[0] % max(heads[1], 1) == 0)
    some = query.shape[-2] > 0 and key.shape[-2] > 0
    return same_batch and goes and key.shape[1] == value.shape[1] and some


def _fits_processor(asked: SdpaCall) -> bool:
    mask = asked.attn_mask
    fits = mask is None or mask.ndim in (2, 4)
    return fits and not asked.dropout_p and asked.has_one_size_of_head and _has_shapes(asked)


def _fits_flash(asked: SdpaCall, device: DeviceFacts) -> bool:
    if device.capability is not None and device.capability < (8, 0):
        return False
    square = asked.query.shape[-2] == asked.key.shape[-2]
    fits = asked.has_one_size_of_head and asked.head <= _LARGEST_HEAD
    return (
        asked.dtype in _HALF
        and asked.attn_mask is None
        and fits
        and (square or not asked.is_causal)
    )


def _fits_efficient(asked: SdpaCall, device: DeviceFacts) -> bool:
    if asked.query.shape[1] != asked.key.shape[1]:
        return False  # groups of queries that share a key are for flash attention alone
    recent = device.capability is None or device.capability >= (8, 0)
    known = ("float16", "float32", "bfloat16") if recent else ("float16", "float32")
    if asked.dtype in _HALF:
        aligned = 8
    else:
        aligned = 4 if recent else 1
    sizes = asked.head, asked.value.shape[-1]
    return asked.dtype in known and all(size % aligned == 0 for size in sizes)


def returns_lse(asked: SdpaCall, device: DeviceFacts) -> bool:
    """Whether the device's fused kernel returns the log-sum-exp of that attention."""
    if not is_fused(asked, device):
        return False
    is_plain = asked.attn_mask is None and asked.head % 8 == 0
    return device.kind == "cpu" or (device.kind == "cuda" and is_plain)
