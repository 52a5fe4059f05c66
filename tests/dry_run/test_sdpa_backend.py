"""The rules of torch's fused attention against torch's own choice, where it can be asked."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from everyframe.core.facts import DeviceFacts
from everyframe.dry_run.sdpa_backend import SdpaCall, is_fused
from everyframe.hardware.accelerators import accelerator_facts
from everyframe.hardware.profiles import find_profile
from everyframe.ops.attention import PLAIN, by_kernel


def cases(device: str) -> list[SdpaCall]:
    """Attention of every kind that models ask for, and of kinds that no kernel takes."""

    def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    q, kv = (1, 2, 5), (1, 2, 7)
    found = [
        SdpaCall(x(*q, d, dtype=dtype), x(*kv, d, dtype=dtype), x(*kv, d, dtype=dtype))
        for d, dtype in product(
            (1, 6, 8, 72, 320), (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        )
    ]
    three = x(*q, 8), x(*kv, 8), x(*kv, 8)
    masks = [(5, 7), (1, 7), (1, 1, 5, 7), (1, 2, 5, 7), (1, 1, 1, 7), (1, 5, 7)]
    found += [SdpaCall(*three, x(*mask).bool()) for mask in masks]
    found += [SdpaCall(*three, x(*mask)) for mask in masks]
    return [
        *found,
        SdpaCall(three[0], three[1], x(*kv, 16)),  # other heads for values
        SdpaCall(x(2, 5, 8), x(2, 7, 8), x(2, 7, 8)),  # no heads
        SdpaCall(x(1, 4, 5, 8), *three[1:], enable_gqa=True),
        SdpaCall(x(2, 2, 5, 8), *three[1:]),  # two samples, and keys of one
        SdpaCall(x(1, 2, 8, 5).transpose(2, 3), *three[1:]),  # numbers that are not side by side
        SdpaCall(x(1, 2, 0, 8), *three[1:]),
        SdpaCall(*three, is_causal=True),
        SdpaCall(*three, dropout_p=0.1),
    ]


def agrees(asked: SdpaCall, device: DeviceFacts) -> bool:
    chosen = torch._fused_sdp_choice(
        *asked.operands,
        asked.attn_mask,
        asked.dropout_p,
        asked.is_causal,
        enable_gqa=asked.enable_gqa,
    )
    return is_fused(asked, device) is (SDPBackend(chosen) != SDPBackend.MATH)


def test_a_processors_rules_are_torchs() -> None:
    asked = cases("cpu")
    device = find_profile("cpu-fp32").machine().devices[0]
    assert [each for each in asked if not agrees(each, device)] == []
    assert {is_fused(each, device) for each in asked} == {True, False}
    with by_kernel(PLAIN):
        assert not any(is_fused(each, device) for each in asked)


@pytest.mark.gpu
def test_a_cards_rules_are_torchs() -> None:
    device = next(each for each in accelerator_facts() if each.kind == "cuda")
    asked = [each for each in cases("cuda") if not each.dropout_p]
    assert [each for each in asked if not agrees(each, device)] == []


@pytest.mark.parametrize(
    ("profile", "dtype", "head", "expected"),
    [
        ("cuda-sm70", torch.float16, 64, True),
        ("cuda-sm70", torch.float16, 20, False),  # not by eights
        ("cuda-sm75", torch.bfloat16, 64, False),  # which it would emulate
        ("cuda-sm75", torch.float32, 6, True),
        ("cuda-sm80", torch.float32, 6, False),  # not by fours
        ("cuda-sm80", torch.bfloat16, 20, True),  # flash attention pads
        ("cuda-sm80", torch.bfloat16, 512, True),  # an autoencoder's one head
        ("cuda-sm90", torch.float64, 64, False),
        ("rocm", torch.bfloat16, 64, True),
        ("mps", torch.float32, 6, True),
    ],
)
def test_a_cards_rules_by_its_age(
    profile: str, dtype: torch.dtype, head: int, expected: bool
) -> None:
    q = torch.zeros(1, 2, 5, head, dtype=dtype)
    assert is_fused(SdpaCall(q, q, q), find_profile(profile).machine().devices[0]) is expected


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, True), (torch.float32, False)])
def test_queries_that_share_a_key_are_for_flash_attention_alone(
    dtype: torch.dtype, expected: bool
) -> None:
    """Seen on an H100: torch computes them in float32 without a fused kernel."""
    q, k = torch.zeros(1, 4, 5, 8, dtype=dtype), torch.zeros(1, 2, 5, 8, dtype=dtype)
    card = find_profile("cuda-sm90").machine().devices[0]
    assert is_fused(SdpaCall(q, k, k, enable_gqa=True), card) is expected
