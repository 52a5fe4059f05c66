"""Softmax attention: the one place where its kernel is chosen.

PyTorch's `scaled_dot_product_attention` has several kernels and never needs anything compiled or
installed. `attend_by` puts a module, ours or a foreign one, on one of them. Which one a run takes
is not decided here (`everyframe.fast_paths`); splitting a row over devices and projecting tokens to
queries, keys and values are not done here, see the models in `everyframe.families`.
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
from torch.utils.hooks import RemovableHandle

from everyframe.hardware.switches import exclusive, stay_exclusive
from everyframe.ops.device import kind_of

#: The plain kernel: two products and a softmax in float32, on every device. It holds all scores.
PLAIN = "math"

#: torch's kernels by our names. CUDA has all of them, a CPU has `flash`; elsewhere there is one.
KERNELS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    PLAIN: SDPBackend.MATH,
}


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

    `mask` broadcasts to (B, heads, Q, L); boolean, it is True where a key may be looked at,
    floating, in the dtype of `v`, it is added to the scores. With `is_causal` a query looks at the
    keys up to its own place. A query that may look at no key has no defined result, so every row
    needs one True. `scale` defaults to ``1 / sqrt(D)``.
    """
    if 0 in q_BHQD.shape:  # a rank without a row has nothing to ask, and kernels refuse that
        return v_BHLD.new_empty((*q_BHQD.shape[:-1], v_BHLD.shape[-1]))
    # Queries and keys come out of norms and rotations that may be wider than the projection that
    # made them; the kernels want one dtype, and that of the values is the one chosen for products.
    q_BHQD, k_BHLD = q_BHQD.to(v_BHLD.dtype), k_BHLD.to(v_BHLD.dtype)
    if kind_of(v_BHLD) == "mps":
        # Metal's kernel was seen to ignore strides (known issue mps-sdpa-noncontiguous).
        q_BHQD, k_BHLD, v_BHLD = (x.contiguous() for x in (q_BHQD, k_BHLD, v_BHLD))
    return F.scaled_dot_product_attention(
        q_BHQD, k_BHLD, v_BHLD, attn_mask=mask, scale=scale, is_causal=is_causal
    )


class AttentionCore(nn.Module):
    """`attention` as a child module, so that it can be watched, hooked or swapped from outside."""

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(
        self, q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return attention(q_BHQD, k_BHLD, v_BHLD, mask, is_causal=self.is_causal)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, heads * D) seen as (B, heads, N, D); nothing is copied."""
    return torch.unflatten(x, -1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x_BHND: Tensor) -> Tensor:
    """(B, heads, N, D) to (B, N, heads * D)."""
    return x_BHND.transpose(1, 2).flatten(2)


def keys_with_a_place_to_look(mask_BL: Tensor) -> Tensor:
    """`mask_BL` with the first key opened in rows that have none.

    The caller sets that key's value to zero, so attention over nothing is zero and not NaN.
    """
    first = torch.zeros_like(mask_BL)
    first[:, 0] = ~mask_BL.any(dim=1)
    return mask_BL | first


@dataclass(frozen=True)
class Kernels:
    """Which kernels torch may choose from, and in which order it tries all that there are.

    torch's own `sdpa_kernel` keeps the order of those alone that were allowed.
    """

    allowed: tuple[SDPBackend, ...]
    order: tuple[int, ...]

    @classmethod
    def now(cls) -> Kernels:
        """As it is in this process."""
        order = map(int, torch._C._get_sdp_priority_order())
        return cls(tuple(_cur_sdpa_kernel_backends()), tuple(order))

    def use(self) -> None:
        """Have it so in the whole process: only for a run that computes alone."""
        _sdpa_kernel(self.allowed)
        torch._C._set_sdp_priority_order(list(self.order))


@contextmanager
def by_kernel(*kernels: str, strictly: bool = False) -> Iterator[None]:
    """Within, torch's attention is computed by the first of these `KERNELS` that takes it.

    Where none takes what is given (a mask, a dtype) the plain kernel does it; `strictly` torch
    raises a `RuntimeError` there. The choice is the process': no other run of ours computes
    meanwhile.
    """
    with kernels_kept():
        _sdpa_kernel(_wanted(kernels, strictly), set_priority=True)
        yield


def _wanted(kernels: Sequence[str], strictly: bool = False) -> list[SDPBackend]:
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
    """torch's attention by its plain kernel, whichever the process chooses; nothing is switched."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        added = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = added.masked_fill_(attn_mask.logical_not(), -torch.inf)
    made: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return made


@contextmanager
def kernels_kept() -> Iterator[None]:
    """However the block ends, torch chooses kernels afterwards as it did before.

    Torch calls no hook for what is not an `Exception` (an interrupt, the end of a search for a
    fault), so a module of `attend_by` is not left then. No other run of ours computes meanwhile.
    """
    with exclusive():
        before = Kernels.now()
        try:
            yield
        finally:
            before.use()


@contextmanager
def kernels_lent(to: Kernels | None = None) -> Iterator[None]:
    """Within, others choose kernels, of `to` at first; afterwards they are as before.

    Not after an exception: whoever leaves by one computes no more.
    """
    before = Kernels.now()
    if to is not None:
        to.use()
    yield
    before.use()


def takes(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> bool:
    """Whether that kernel computes attention of such tensors here, as torch itself knows."""
    with by_kernel(kernel, strictly=True):
        try:
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        except RuntimeError as error:
            if not any(words in str(error) for words in _NONE_TAKES):
                raise
            return False
    return True


#: What torch says where no kernel that it may use takes what it is given.
_NONE_TAKES = ("No available kernel", "No viable backend", "no viable backend")


class AttendBy:
    """What `attend_by` has put on a module; `remove` takes it off. A second call does nothing."""

    def __init__(self, parts: Sequence[nn.Module], kernels: Sequence[str], *, inside: bool) -> None:
        self._kernels = tuple(kernels)
        # Plain states and no context managers: one that is never left would set kernels when it is
        # collected, at any time.
        self._before: list[tuple[nn.Module, Kernels]] = []
        self._handles: list[RemovableHandle] = []
        for part in parts:
            # Around all other hooks or inside of them, and left again even if the call raises.
            enter = part.register_forward_pre_hook(self._enter, prepend=not inside)
            leave = part.register_forward_hook(self._leave, prepend=inside, always_call=True)
            self._handles += [enter, leave]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, module: nn.Module, *_: object) -> None:
        self._before.append((module, Kernels.now()))
        _sdpa_kernel(_wanted(self._kernels), set_priority=True)

    def _leave(self, module: nn.Module, *_: object) -> None:
        # A call that ended in somebody's hook before ours was never entered.
        if self._before and self._before[-1][0] is module:
            self._before.pop()[1].use()


def attend_by(
    module: nn.Module, *kernels: str, parts: Sequence[str] = ("",), inside: bool = False
) -> AttendBy:
    """Compute every attention inside of `module` as `by_kernel` does, until it is removed.

    `parts` are the dotted names of what is really called, ``""`` the module itself; an autoencoder
    whose ``decode`` is called needs its decoder's. The innermost of several wins, so one attention
    can be put on the plain kernel inside of a model that is on a fast one; of several on the same
    module that is the one which is put `inside`, whichever came first. The choice is the process',
    so the run that does this computes alone from here on.
    """
    stay_exclusive()
    return AttendBy([module.get_submodule(part) for part in parts], kernels, inside=inside)
