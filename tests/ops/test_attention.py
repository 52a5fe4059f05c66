"""Attention against the formula written out in float64, with masks and mixed dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from everyframe.numerics.fault_locator import locate_fault
from everyframe.ops.attention import (
    KERNELS,
    AttentionCore,
    attend_by,
    attention,
    by_kernel,
    merge_heads,
    plain_attention,
    restore_kernels,
    split_heads,
    unmask_empty_rows,
)


def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v.double()


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 7, 8, generator=g)
    k, v = torch.randn(2, 2, 3, 5, 8, generator=g)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_formula(scale: float | None, masked: bool) -> None:
    q, k, v = tensors()
    mask = (
        torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]]).bool()[:, None, None] if masked else None
    )
    expected = formula(q, k, v, mask, scale or 8**-0.5)
    # 8 products of about 1, rounded to 1e-7 of it each.
    torch.testing.assert_close(
        attention(q, k, v, mask, scale=scale).double(), expected, atol=2e-6, rtol=0
    )


def test_wider_queries_and_keys_follow_the_values() -> None:
    q, k, v = tensors()
    out = attention(q, k, v.bfloat16())
    assert out.dtype == torch.bfloat16
    # One rounding to bfloat16 (2^-9 of 1) in each of q, k, v and the result.
    torch.testing.assert_close(out.double(), formula(q, k, v, None, 8**-0.5), atol=3e-2, rtol=0)


class Metal:
    """A tensor's look on an Apple GPU: whose kernel was seen to read views as if contiguous."""

    dtype = torch.float32
    device = torch.device("mps")
    shape = (1, 1, 2, 2)

    def __init__(self, is_contiguous: bool = False) -> None:
        self.is_contiguous = is_contiguous

    def to(self, dtype: torch.dtype) -> Metal:
        """Nothing to do."""
        return self

    def contiguous(self) -> Metal:
        """A copy in order."""
        return Metal(is_contiguous=True)


def test_apples_kernel_gets_tensors_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Metal] = []

    def kernel(*tensors: Metal, **more: object) -> None:
        given.extend(tensors)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    attention(Metal(), Metal(), Metal())  # type: ignore[arg-type]
    assert [tensor.is_contiguous for tensor in given] == [True, True, True]


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 4)])
def test_nothing_asked_is_nothing_answered(shape: tuple[int, ...]) -> None:
    keys = torch.ones(max(shape[0], 1) if shape[2] == 0 else 0, 2, 5, 4)
    values = torch.ones(len(keys), 2, 5, 6, dtype=torch.bfloat16)
    answer = attention(torch.ones(shape), keys, values)
    assert answer.shape == (*shape[:-1], 6)
    assert answer.dtype == torch.bfloat16


@pytest.mark.parametrize("num_masks", [None, 1, 5])
def test_more_samples_than_a_kernel_of_cuda_takes_come_in_several_calls(
    num_masks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 5, 2, 7, 8, generator=g)
    mask = None if num_masks is None else torch.rand(num_masks, 1, 7, 7, generator=g) < 0.5
    if mask is not None:
        mask[..., 0] = True
    want = attention(q, k, v, mask)
    sizes: list[int] = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def seen(query: Tensor, *more: Tensor, **named: object) -> Tensor:
        sizes.append(len(query))
        out: Tensor = kernel(query, *more, **named)  # type: ignore[arg-type]
        return out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    monkeypatch.setattr("everyframe.ops.attention.device_type", lambda _: "cuda")
    monkeypatch.setattr("everyframe.ops.attention._MOST_SAMPLES", 2)
    assert torch.equal(attention(q, k, v, mask), want)
    assert sizes == [2, 2, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn", "math"])
def test_a_card_attends_in_more_samples_than_a_grid_has(kernel: str) -> None:
    q, k, v = torch.randn(3, 65_537, 1, 4, 64, device="cuda", dtype=torch.float16)
    with by_kernel(kernel, strictly=True):
        got = attention(q, k, v)
    want = formula(q[-3:], k[-3:], v[-3:], None, 64**-0.5)
    assert (got[-3:].double() - want).abs().max() < 5e-3


def test_a_row_without_keys_gets_one_to_look_at() -> None:
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]]).bool()
    assert unmask_empty_rows(mask).tolist() == [
        [True, False, True], [True, False, False], [False, True, False],
    ]  # fmt: skip


def test_heads_come_apart_and_together() -> None:
    x = torch.arange(2 * 3 * 8.0).view(2, 3, 8)
    heads = split_heads(x, 4)
    assert heads.shape == (2, 4, 3, 2)
    assert heads[1, 3, 2].tolist() == x[1, 2, 6:].tolist()
    assert merge_heads(heads).equal(x)


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether torch's fused kernel of the CPU ran, for each attention in turn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    def fused(self) -> list[bool]:
        """Since this was last asked, by the operations that every attention has one of."""
        kinds = [("flash" in name) for name in self.names if "flash" in name or "softmax" in name]
        self.names = []
        return kinds


class Two(nn.Module):
    """Two attentions, one after the other, and a failure where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = AttentionCore(), AttentionCore()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, fails: bool = False) -> Tensor:
        first: Tensor = self.first(q, k, v)
        if fails:
            raise ValueError("planted")
        return first + self.second(q, k, v)


def test_a_module_is_put_on_a_kernel_and_taken_off() -> None:
    model, given = Two(), tensors()
    with Seen() as seen, torch.no_grad():
        plain = attend_by(model, "math")
        by_math = model(*given)
        assert seen.fused() == [False, False]
        plain.remove()
        plain.remove()
        by_flash = attend_by(model, "flash")
        fast = model(*given)
        assert seen.fused() == [True, True]
        # The innermost wins: one attention of a fast model on the plain kernel.
        attend_by(model.second, "math")
        model(*given)
        assert seen.fused() == [True, False]
        by_flash.remove()
    # Another order of the same sums of 8 and 5 numbers.
    torch.testing.assert_close(fast, by_math, atol=2e-6, rtol=0)


def test_of_two_on_one_module_the_one_inside_wins() -> None:
    """Whichever came first: a repair comes after a model's own kernel, a remembered one before."""
    with Seen() as seen, torch.no_grad():
        for inside_first in (False, True):
            model = Two()
            for inside in (inside_first, not inside_first):
                attend_by(model, "math" if inside else "flash", inside=inside)
            model(*tensors())
            assert seen.fused() == [False, False]
            attention(*tensors())
            assert seen.fused() == [True]


def test_a_call_that_fails_leaves_the_kernels_as_they_were() -> None:
    model = Two()
    attend_by(model, "math")
    with Seen() as seen, torch.no_grad():
        with pytest.raises(ValueError, match="planted"):
            model(*tensors(), fails=True)
        seen.fused()
        attention(*tensors())
        assert seen.fused() == [True]


def test_what_a_kernel_does_not_take_is_computed_plainly() -> None:
    q, k, v = tensors()
    with torch.no_grad():
        # The CPU has no such kernel at all.
        with by_kernel("cudnn"):
            out = attention(q, k, v)
        with by_kernel("cudnn", strictly=True), pytest.raises(RuntimeError):
            attention(q, k, v)
    torch.testing.assert_close(out.double(), formula(q, k, v, None, 8**-0.5), atol=2e-6, rtol=0)
    assert set(KERNELS.values()) <= set(SDPBackend.__members__.values())


def test_an_interrupt_leaves_no_kernel_behind() -> None:
    """torch calls no hook then; `attend_by` alone would leave its kernel for all that follows."""

    class Interrupted(AttentionCore):
        def forward(self, *_: object, **__: object) -> Tensor:
            raise KeyboardInterrupt

    core = Interrupted()
    attend_by(core, "math")
    assert torch.backends.cuda.flash_sdp_enabled()
    with pytest.raises(KeyboardInterrupt), restore_kernels():
        core()
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("has_mask", [False, True])
def test_plain_attention_is_that_of_the_plain_kernel(*, has_mask: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8, generator=generator) for _ in range(3))
    mask = torch.randn(16, 16, generator=generator) > 0 if has_mask else None
    with by_kernel("math"):
        wanted = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.equal(plain_attention(q, k, v, mask), wanted)
    assert not torch.equal(nn.functional.scaled_dot_product_attention(q, k, v, mask), wanted)


def test_the_order_of_kernels_that_are_not_allowed_just_now_is_kept() -> None:
    """torch tries all that are allowed in one order, which holds for those that are not, too."""
    before = torch._C._get_sdp_priority_order()
    with sdpa_kernel(SDPBackend.MATH):
        with by_kernel("math", "flash"):
            assert _cur_sdpa_kernel_backends(with_priority=True)[0] == SDPBackend.MATH
        core = AttentionCore()
        attend_by(core, "math")
        core(*(torch.ones(1, 1, 4, 8) for _ in range(3)))
        with restore_kernels():
            assert _cur_sdpa_kernel_backends() == [SDPBackend.MATH]
    assert torch._C._get_sdp_priority_order() == before


@pytest.mark.filterwarnings("error")
def test_a_call_that_ends_before_ours_was_entered_is_not_left() -> None:
    """Somebody's hook on all modules may raise; torch then calls what follows a call all the same.

    What such a hook of ours raises itself, torch makes a warning of.
    """

    def end(module: nn.Module, given: object) -> None:
        if module is inner:
            raise OSError("no space")

    inner = AttentionCore()
    whole = nn.Sequential(inner)
    attend_by(whole, "math", parts=("", "0"))
    q = torch.ones(1, 1, 4, 8)
    handle = nn.modules.module.register_module_forward_pre_hook(end)
    try:
        with pytest.raises(OSError, match="no space"):
            whole(q)
        with pytest.raises(OSError, match="no space"):
            locate_fault({"net": whole}, lambda: whole(q))
        with pytest.raises(OSError, match="no space"):
            locate_fault({"net": inner}, lambda: inner(q))
    finally:
        handle.remove()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_the_search_for_a_fault_leaves_no_kernel_behind() -> None:
    core, whole = AttentionCore(), nn.Module()
    whole.core = core
    attend_by(core, "math")
    bad = torch.full((1, 1, 4, 8), 3e38)
    fault = locate_fault({"net": whole}, lambda: core(bad, bad, bad)).fault
    assert fault is not None
    assert fault.module == "core"
    assert torch.backends.cuda.flash_sdp_enabled()
