"""Guidance: the needed branches give the result of all three, and no other is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from everyframe.families.opensora2.conditions import GivenLatents
from everyframe.families.opensora2.guidance import BARE, NEGATIVE, PROMPT, Guidance, time_shift

BRANCHES = (PROMPT, NEGATIVE, BARE)
PICTURE = Guidance(50, 7.5, 3.0, is_conditioned=True)
TEXT = replace(PICTURE, is_conditioned=False)


@pytest.mark.parametrize(
    ("guidance", "evaluations"),
    [
        (PICTURE, 110),
        (TEXT, 80),
        (replace(TEXT, text_oscillates=False), 100),
        (replace(PICTURE, text_oscillates=False, picture_oscillates=False), 150),
        (replace(PICTURE, text_oscillates=False), 130),
        (replace(PICTURE, picture=1.0), 80),
        (replace(PICTURE, text=1.0, picture=1.0), 50),
        (replace(TEXT, text=1.0), 50),
    ],
)
def test_only_the_needed_branches_are_computed(guidance: Guidance, evaluations: int) -> None:
    assert guidance.num_evaluations(9) == evaluations


@pytest.mark.parametrize("oscillates", [True, False])
@pytest.mark.parametrize("fades", [True, False])
@pytest.mark.parametrize("is_conditioned", [True, False])
@pytest.mark.parametrize("scales", [(7.5, 3.0), (1.0, 3.0), (4.0, 1.0), (4.0, 0.5), (1.0, 1.0)])
def test_they_give_the_result_of_all_three(
    scales: tuple[float, float], is_conditioned: bool, fades: bool, oscillates: bool
) -> None:
    """The formula of upstream, written out, in float64."""
    steps, frames = 16, 5
    guidance = Guidance(steps, *scales, oscillates, oscillates, fades, is_conditioned)
    torch.manual_seed(0)
    prompt, negative, bare = torch.randn(3, 1, 2, frames, 2, 2, dtype=torch.float64)
    if not is_conditioned:
        bare = negative
    for step in range(steps):
        text, picture = scales
        if oscillates and step >= 10 and step % 2:
            text = picture = 1.0
        weight = torch.full((frames, 1, 1), picture, dtype=torch.float64)
        if fades and picture > 1:
            last = torch.linspace(scales[1], 1, steps + 1, dtype=torch.float64)[step]
            weight = torch.linspace(1, float(last), frames, dtype=torch.float64).view(-1, 1, 1)
        wanted = bare + weight * (negative - bare) + text * (prompt - negative)
        now = guidance.at(step, frames)
        outputs = [(prompt, negative, bare)[BRANCHES.index(each)] for each in now.branches]
        assert torch.allclose(now.combine(outputs), wanted, rtol=0, atol=1e-12)


def test_schedules_are_shifted_as_published() -> None:
    assert time_shift(252, 33) == pytest.approx(5.73, abs=0.01)
    assert time_shift(2304, 33) == pytest.approx(11.87, abs=0.01)
    assert time_shift(576, 32) == pytest.approx(6.60, abs=0.01)
    assert time_shift(2304, 1) == pytest.approx(2.07, abs=0.01)


def test_given_latents_are_a_condition_and_are_pasted() -> None:
    first, last = torch.randn(1, 2, 1, 3, 4), torch.randn(1, 2, 2, 3, 4)
    given = GivenLatents(first, last)
    cond = given.condition((2, 6, 3, 4))
    assert cond.shape == (1, 3, 6, 3, 4)
    assert cond[0, 0, :, 0, 0].tolist() == [1, 0, 0, 0, 1, 1]
    assert torch.equal(cond[:, 1:, :1], first)
    assert not cond[:, 1:, 1:4].any()
    x = torch.randn(1, 2, 6, 3, 4)
    pasted = given.paste(x)
    assert torch.equal(pasted[:, :, 4:], last)
    assert torch.equal(pasted[:, :, 1:4], x[:, :, 1:4])
    assert not GivenLatents().condition((2, 6, 3, 4)).any()
