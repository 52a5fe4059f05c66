"""Classifier-free guidance by hand-worked numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from everyframe.samplers.guidance import GuidanceShare, guide, guided

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


@pytest.mark.parametrize(("batch_size", "calls"), [(1, [(0, 1), (1, 2)]), (2, [(0, 2)])])
def test_branches_are_predicted_at_once_or_one_by_one(
    batch_size: int, calls: list[tuple[int, int]]
) -> None:
    asked: list[tuple[int, int]] = []

    def predict(start: int, stop: int) -> Tensor:
        asked.append((start, stop))
        return torch.cat([UNCOND, COND])[start:stop]

    assert torch.equal(guided(predict, 2, batch_size, 7.0), guide(COND, UNCOND, 7.0))
    assert asked == calls
    other_order = guided(predict, 2, batch_size, 7.0, prompt_first=True)
    assert torch.equal(other_order, guide(UNCOND, COND, 7.0))


def test_one_branch_is_the_prediction_itself() -> None:
    assert torch.equal(guided(lambda start, stop: COND, 1, 2, 7.0), COND)


@pytest.mark.parametrize("prompt_first", [True, False])
def test_a_held_share_is_added_to_the_prompts_branch_alone(prompt_first: bool) -> None:
    asked: list[tuple[int, int]] = []
    branches = [COND, UNCOND] if prompt_first else [UNCOND, COND]

    def predict(start: int, stop: int) -> Tensor:
        asked.append((start, stop))
        return torch.cat(branches[start:stop])

    share = GuidanceShare(is_held=True)
    plain = guided(predict, 2, 2, 7.0, prompt_first=prompt_first)
    first = guided(predict, 2, 2, 7.0, prompt_first=prompt_first, share=share)
    assert torch.equal(first, plain), "nothing to hold yet"
    assert share.value is not None
    assert torch.equal(share.value, plain - COND)
    branches = [each + 1 for each in branches]
    held = guided(predict, 2, 2, 7.0, prompt_first=prompt_first, share=share)
    assert asked == [(0, 2), (0, 2), (0, 1) if prompt_first else (1, 2)]
    assert torch.equal(held, plain + 1)
    share.is_held = False
    guided(predict, 2, 2, 7.0, prompt_first=prompt_first, share=share)
    assert asked[-1] == (0, 2)
