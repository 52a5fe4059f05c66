"""Softmax attention, and the choice of its kernel.

PyTorch's `scaled_dot_product_attention` (SDPA) has several kernels, and none needs anything
compiled or installed. `attend_by` selects one for a module, ours or a foreign one. The kernels of a
run are decided in `everyframe.fast_paths`; sequence parallelism is in `everyframe.parallel`, and
the projections to queries, keys and values are in the models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import (
    SDPBackend,
    _cur_sdpa_kernel_backends,
    _sdpa_kernel,
)
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.hooks import RemovableHandle

from everyframe.hardware.switches import exclusive, stay_exclusive
from everyframe.ops.device import device_type

#: Plain kernel: two products and a softmax in float32, on every device. It stores all scores.
PLAIN = "math"

#: SDPA kernels by our names. CUDA has all of them, a CPU has `flash`; other devices have one.
KERNELS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    PLAIN: SDPBackend.MATH,
}


#: Samples that one call of a kernel on CUDA can take; flash attention fails above
#: (pytorch/pytorch#146704; seen on an H200 with torch 2.11).
_MOST_SAMPLES = 65535


def attention(
    q_BHQD: Tensor,
    k_BHLD: Tensor,
    v_BHLD: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """``softmax(q k^T scale) v`` as (B, heads, Q, D) in the dtype of `v`.

    Args:
        q_BHQD: queries.
        k_BHLD: keys.
        v_BHLD: values.
        mask: broadcasts to (B, heads, Q, L). Boolean: True where a key is visible. Floating, in the
            dtype of `v`: added to the scores. Each row needs one visible key, or its result is
            undefined.
        scale: defaults to ``1 / sqrt(D)``.
        is_causal: each query sees the keys up to its own position.
    """
    if 0 in q_BHQD.shape:  # a rank without a row has nothing to ask, and kernels refuse that
        return v_BHLD.new_empty((*q_BHQD.shape[:-1], v_BHLD.shape[-1]))
    # Queries and keys come out of norms and rotations that may be wider than the projection that
    # made them; the kernels want one dtype, and that of the values is the one chosen for products.
    q_BHQD, k_BHLD = q_BHQD.to(v_BHLD.dtype), k_BHLD.to(v_BHLD.dtype)
    if device_type(v_BHLD) == "mps":
        # Metal's kernel was seen to ignore strides (known issue mps-sdpa-noncontiguous).
        q_BHQD, k_BHLD, v_BHLD = (x.contiguous() for x in (q_BHQD, k_BHLD, v_BHLD))
    if device_type(v_BHLD) == "cuda" and len(v_BHLD) > _MOST_SAMPLES:
        # Temporal attention of large videos has such batches: each position attends over its
        # frames.
        parts = [torch.split(x, _MOST_SAMPLES) for x in (q_BHQD, k_BHLD, v_BHLD)]
        masks = [mask] * len(parts[0])
        if mask is not None and mask.ndim == 4 and len(mask) > 1:
            masks = [*torch.split(mask, _MOST_SAMPLES)]
        given = zip(*parts, masks, strict=True)
        return torch.cat([attention(*each, scale=scale, is_causal=is_causal) for each in given])
    return F.scaled_dot_product_attention(
        q_BHQD, k_BHLD, v_BHLD, attn_mask=mask, scale=scale, is_causal=is_causal
    )


def attention_with_lse(
    q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """Attention (B, heads, Q, D) by SDPA's kernel, and the log-sum-exp (B, heads, Q) of its scores.

    The kernel is the one that SDPA would use now. None if that kernel returns no log-sum-exp: the
    plain one, one for a mask on an accelerator, and those of devices other than CPU and CUDA.

    Args:
        q_BHQD: queries, in the dtype of the values, as are the keys.
        k_BHLD: keys; at least one.
        v_BHLD: values.
        mask: as in `attention`, but a query may have no visible key. Its result is 0 and its
            log-sum-exp minus infinity.
    """
    operands = q_BHQD, k_BHLD, v_BHLD
    if has_torch_function(operands):  # a dry run, which knows the kernel of another device
        return handle_torch_function(attention_with_lse, operands, *operands, mask)
    kernel = SDPBackend(torch._fused_sdp_choice(*operands, mask))
    if device_type(v_BHLD) == "cpu" and kernel == SDPBackend.FLASH_ATTENTION:
        return _flash_on_cpu(*operands, mask)
    if device_type(v_BHLD) != "cuda" or mask is not None or q_BHQD.shape[-1] % 8:
        return None  # SDPA pads heads to eight channels
    if kernel == SDPBackend.FLASH_ATTENTION:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*operands)
    elif kernel == SDPBackend.EFFICIENT_ATTENTION:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(*operands, None, True)
    elif kernel == SDPBackend.CUDNN_ATTENTION:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*operands, None, True)
    else:
        return None
    # One kernel pads the queries, another has a last dimension of its own.
    return out, lse.flatten(2)[..., : q_BHQD.shape[2]]


def _flash_on_cpu(
    q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    if mask is not None and mask.dtype == torch.bool:
        added = torch.zeros_like(mask, dtype=q_BHQD.dtype)
        mask = added.masked_fill_(mask.logical_not(), -torch.inf)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q_BHQD, k_BHLD, v_BHLD, attn_mask=mask)
    if mask is not None:
        # The kernel's log-sum-exp of no visible key is 0, that of one key with a score of 0.
        is_blind = (mask == -torch.inf).all(dim=-1)
        lse = lse.masked_fill(is_blind.expand(lse.shape), -torch.inf)
        out = out.masked_fill(is_blind[..., None], 0)
    return out, lse


class AttentionCore(nn.Module):
    """`attention` as a child module without parameters, for hooks and replacement from outside."""

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(
        self, q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return attention(q_BHQD, k_BHLD, v_BHLD, mask, is_causal=self.is_causal)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """View (B, N, heads * D) as (B, heads, N, D); copies nothing."""
    return torch.unflatten(x, -1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x_BHND: Tensor) -> Tensor:
    """Reshape (B, heads, N, D) to (B, N, heads * D)."""
    return x_BHND.transpose(1, 2).flatten(2)


def unmask_empty_rows(mask_BL: Tensor) -> Tensor:
    """Make the first key visible in mask rows without a visible key.

    The caller sets that key's value to zero, so attention over nothing gives zero and not NaN.
    """
    first = torch.zeros_like(mask_BL)
    first[:, 0] = ~mask_BL.any(dim=1)
    return mask_BL | first


@dataclass(frozen=True)
class Kernels:
    """SDPA kernels that torch may use, and the order in which it tries all that exist.

    torch's own `sdpa_kernel` restores the order of the allowed ones only.
    """

    allowed: tuple[SDPBackend, ...]
    order: tuple[int, ...]

    @classmethod
    def now(cls) -> Kernels:
        """Current setting of this process."""
        order = map(int, torch._C._get_sdp_priority_order())
        return cls(tuple(_cur_sdpa_kernel_backends()), tuple(order))

    def use(self) -> None:
        """Apply the setting to the whole process; only for a run that computes alone."""
        _sdpa_kernel(self.allowed)
        torch._C._set_sdp_priority_order(list(self.order))


@contextmanager
def by_kernel(*kernels: str, strictly: bool = False) -> Iterator[None]:
    """Context: SDPA uses the first of these `KERNELS` that supports its inputs.

    If none does (a mask, a dtype), the plain kernel computes; with `strictly` torch raises
    `RuntimeError`. The setting is process-wide, so no other run computes meanwhile.
    """
    with restore_kernels():
        _sdpa_kernel(_to_backends(kernels, strictly), set_priority=True)
        yield


def _to_backends(kernels: Sequence[str], strictly: bool = False) -> list[SDPBackend]:
    wanted = [KERNELS[kernel] for kernel in kernels]
    if not strictly and PLAIN not in kernels:
        wanted.append(KERNELS[PLAIN])
    return wanted


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """SDPA by its plain kernel, whatever the process-wide setting; changes no setting."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        added = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = added.masked_fill_(attn_mask.logical_not(), -torch.inf)
    made: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return made


@contextmanager
def restore_kernels() -> Iterator[None]:
    """Context: restore torch's kernel setting afterwards, however the block ends.

    After an exception that is not an `Exception` (an interrupt, the end of a fault search) torch
    calls no hooks, so hooks of `attend_by` do not restore it. No other run computes meanwhile.
    """
    with exclusive():
        before = Kernels.now()
        try:
            yield
        finally:
            before.use()


@contextmanager
def lend_kernels(to: Kernels | None = None) -> Iterator[None]:
    """Context: start with the setting `to`, let foreign code change it, then restore it.

    It is not restored after an exception, because the run ends there.
    """
    before = Kernels.now()
    if to is not None:
        to.use()
    yield
    before.use()


def supports_inputs(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> bool:
    """Whether the kernel supports these inputs on this machine, tested by calling it."""
    with by_kernel(kernel, strictly=True):
        try:
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        except RuntimeError as error:
            if not any(words in str(error) for words in _UNSUPPORTED):
                raise
            return False
    return True


#: Errors of torch when no allowed kernel supports the inputs.
_UNSUPPORTED = ("No available kernel", "No viable backend", "no viable backend")


class AttendBy:
    """Handle of the hooks of `attend_by`; `remove` may be called twice."""

    def __init__(self, parts: Sequence[nn.Module], kernels: Sequence[str], *, inside: bool) -> None:
        self._kernels = tuple(kernels)
        # Plain states and no context managers: one that is never left would set kernels when it is
        # collected, at any time.
        self._before: list[tuple[nn.Module, Kernels]] = []
        self._handles: list[RemovableHandle] = []
        for part in parts:
            # Outside or inside all other hooks, and undone even if the call raises.
            enter = part.register_forward_pre_hook(self._enter, prepend=not inside)
            leave = part.register_forward_hook(self._leave, prepend=inside, always_call=True)
            self._handles += [enter, leave]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, module: nn.Module, *_: object) -> None:
        self._before.append((module, Kernels.now()))
        _sdpa_kernel(_to_backends(self._kernels), set_priority=True)

    def _leave(self, module: nn.Module, *_: object) -> None:
        # A foreign hook may have raised before ours ran.
        if self._before and self._before[-1][0] is module:
            self._before.pop()[1].use()


def attend_by(
    module: nn.Module, *kernels: str, parts: Sequence[str] = ("",), inside: bool = False
) -> AttendBy:
    """Select SDPA kernels for all attention inside `module`, as `by_kernel` does, until removed.

    The setting is process-wide, so the run computes alone from this call on. The innermost
    selection wins: one attention can use the plain kernel inside a model on a fast one.

    Args:
        module: ours or a foreign one.
        kernels: names of `KERNELS`, first choice first.
        parts: dotted names of the submodules that are called, ``""`` for the module itself; an
            autoencoder whose ``decode`` is called needs its decoder's.
        inside: wins over other selections on the same module, in whatever order they were made.
    """
    stay_exclusive()
    return AttendBy([module.get_submodule(part) for part in parts], kernels, inside=inside)
