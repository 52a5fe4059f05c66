"""Classifier-free guidance by hand-worked numbers."""

from __future__ import annotations

import torch

from everyframe.samplers.guidance import guide

COND = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
UNCOND = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0]])


def test_all_channels() -> None:
    assert guide(COND, UNCOND, 7.0).tolist() == [[7.0, 8.0, 15.0, 22.0, 29.0]]


def test_three_channels_and_the_rest_is_the_conditional_answer() -> None:
    assert guide(COND, UNCOND, 7.0, channels=3).tolist() == [[7.0, 8.0, 15.0, 4.0, 5.0]]


def test_scale_one_is_the_conditional_answer() -> None:
    assert torch.equal(guide(COND, UNCOND, 1.0), COND)


def test_half_precision_is_guided_in_float32() -> None:
    # In float16 7 * 10000 is infinite.
    got = guide(torch.tensor([[1e4]]).half(), torch.tensor([[0.0]]).half(), 7.0)
    assert got.dtype == torch.float32
    assert got.item() == 7e4
    assert guide(COND.double(), UNCOND.double(), 2.0).dtype == torch.float64
