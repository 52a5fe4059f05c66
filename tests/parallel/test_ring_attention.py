"""Attention to parts of the keys merges to attention to all, as torch computes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from everyframe.ops.attention import PLAIN, attention_with_lse, by_kernel
from everyframe.parallel import ring_attention as subject
from everyframe.parallel.ring_attention import Partial, merge, partial_attention


def qkv(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64).to(dtype) for n in (5, 11, 11))
    return q, k, v


def merged(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cuts: tuple[int, ...]) -> Partial:
    whole: Partial | None = None
    for start, stop in zip((0, *cuts), (*cuts, k.shape[2]), strict=True):
        part = None if mask is None else mask[..., start:stop]
        found = partial_attention(q, k[:, :, start:stop], v[:, :, start:stop], part)
        whole = found if whole is None else merge(whole, found)
    assert whole is not None
    return whole


@pytest.mark.parametrize("cuts", [(), (4,), (1, 2, 9), (0, 11)])
@pytest.mark.parametrize("kind", ["", "keys", "places", "scores"])
@pytest.mark.parametrize("kernel", ["flash", PLAIN])
def test_parts_merge_to_the_whole(
    kernel: str, cuts: tuple[int, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a part has no key to look at, and queries are computed a few at a time."""
    q, k, v = qkv()
    mask = {
        "": None,
        "keys": (torch.arange(11) > 4).expand(2, 1, 1, 11),
        "places": torch.ones(5, 11).triu(3).bool()[None, None],
        "scores": torch.randn(1, 3, 5, 11, dtype=torch.float64),
    }[kind]
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with by_kernel(kernel):
        assert (attention_with_lse(q, k, v, mask) is None) == (kernel == PLAIN)
        found = merged(q, k, v, mask, cuts)
        torch.testing.assert_close(found.out, wanted, rtol=0, atol=1e-14)
        monkeypatch.setattr(subject, "_SCORES", 2 * 3 * 11 * 2)
        torch.testing.assert_close(merged(q, k, v, mask, cuts).out, wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("kernel", ["flash", PLAIN])
def test_nothing_to_look_at_is_zeros_that_weigh_nothing(kernel: str, is_added: bool) -> None:
    q, k, v = qkv()
    hidden = torch.zeros(1, 1, 1, 11, dtype=torch.bool)
    if is_added:
        hidden = torch.full(hidden.shape, -torch.inf, dtype=q.dtype)
    with by_kernel(kernel):
        nothing = partial_attention(q, k, v, hidden)
    assert torch.equal(nothing.out, torch.zeros_like(nothing.out))
    assert bool((nothing.lse == -torch.inf).all())
    some = partial_attention(q, k, v)
    for one, other in ((nothing, some), (some, nothing)):
        torch.testing.assert_close(merge(one, other).out, some.out, rtol=0, atol=1e-15)
    assert torch.equal(merge(nothing, nothing).out, nothing.out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_float32_and_scores_do_not_overflow(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    q = q * 200  # scores beyond what exponentials of float32 hold
    with by_kernel(PLAIN):
        found = merged(q, k, v, None, (4,))
    assert found.out.dtype == found.lse.dtype == torch.float32
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    # float32 scores of some hundreds are off by 2^-24 of themselves, weights by that much.
    torch.testing.assert_close(found.out.double(), wanted, rtol=0, atol=5e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fused_kernel_rounds_each_part_once(dtype: torch.dtype) -> None:
    """Half a unit in the last place of the largest value for each of two parts, then merged."""
    q, k, v = qkv(dtype)
    found = merged(q, k, v, None, (4,))
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert found.out.dtype == found.lse.dtype == torch.float32
    bar = 2 * float(v.abs().max()) * torch.finfo(dtype).eps
    torch.testing.assert_close(found.out.double(), wanted, rtol=0, atol=bar)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_kernels_of_a_card_return_the_log_sum_exp(kernel: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 64).to("cuda", torch.float16) for n in (70, 90, 90))
    with by_kernel(kernel):
        found = attention_with_lse(q, k, v)
        assert found is not None
        parts = merged(q, k, v, None, (37,))
    scores = q.double() @ k.double().mT / 8
    wanted = scores.softmax(-1) @ v.double()
    assert found[1].shape == scores.shape[:3]
    torch.testing.assert_close(found[1].double(), scores.logsumexp(-1), rtol=0, atol=2e-3)
    torch.testing.assert_close(parts.out.double(), wanted, rtol=0, atol=4e-3)
