"""Forecasts of time against times that others published: Step-Video's own table.

One number is fitted (the share of the peak, in the profile ``4gpu-stepvideo``); three are met.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everyframe.core.facts import Throughput
from everyframe.core.plan import Precision, Settings
from everyframe.dry_run.result import Work
from everyframe.families.stepvideo.components import (
    DENOISER_ISLANDS,
    StepVideoBuilder,
)
from everyframe.families.stepvideo.config import (
    HUNYUAN_CLIP,
    StepLLMConfig,
    StepVideoConfig,
    StepVideoModelConfig,
)
from everyframe.families.stepvideo.options import StepVideoOptions
from everyframe.families.stepvideo.spec import StepVideoSpec
from everyframe.families.stepvideo.vae_config import StepVAEConfig
from everyframe.hardware.profiles import find_profile
from everyframe.planning.dry_runs import call_seconds
from helpers import config_only_models
from helpers.dry_runs import dry_run_call

CARDS = find_profile("4gpu-stepvideo").machine().devices[:4]
#: 50 steps on four cards with flash attention: (height, width, frames), seconds.
PUBLISHED = {(768, 768, 204): 860, (544, 992, 204): 743, (544, 992, 136): 408}


def work(height: int, width: int, frames: int, layers: int) -> Work:
    denoiser = StepVideoModelConfig(num_layers=layers)
    builder = StepVideoBuilder(
        StepVideoConfig(denoiser, StepLLMConfig(), HUNYUAN_CLIP, StepVAEConfig())
    )
    settings: Settings = replace(
        config_only_models.settings(height, width, frames, guidance=9.0), num_inference_steps=50
    )
    files: Any = None
    spec = StepVideoSpec("released", "released", StepVideoOptions(), files, builder)
    calls = {each.component: each for each in spec.dry_run_calls(settings)}
    precision = Precision("bfloat16", "bfloat16", DENOISER_ISLANDS)
    return dry_run_call(calls["denoiser"], precision, CARDS[0]).found.work


def seconds_of_a_step(size: tuple[int, int, int], rates: Throughput) -> float:
    """Of the released model: its 48 blocks are alike, so two of them tell of all."""
    one, two = (call_seconds(work(*size, layers), rates) for layers in (1, 2))
    return one + 47 * (two - one)


@pytest.mark.parametrize("size", PUBLISHED)
def test_step_video_s_times_on_four_cards(size: tuple[int, int, int]) -> None:
    rates: Any = CARDS[0].rates
    forecast = 50 * seconds_of_a_step(size, rates) / len(CARDS)
    assert forecast == pytest.approx(PUBLISHED[size], rel=0.1)


def test_the_operations_are_those_that_can_be_counted_by_hand() -> None:
    """Twice each weight for every token and branch, and attention's two products."""
    tokens = 36 * 34 * 62
    found = [sum(n for _, n in work(544, 992, 204, layers).products) for layers in (1, 2)]
    weights = 25.4e9 / 48  # what of a block is asked for every token (a text's keys are not)
    by_hand = 2 * (2 * weights * tokens) + 2 * 4 * tokens**2 * 6144
    # The text's keys and values, and attention to them, are counted too.
    assert found[1] - found[0] == pytest.approx(by_hand, rel=0.02)
