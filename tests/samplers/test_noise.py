"""Noise depends on (seed, purpose, step) alone; its values are pinned, since they are a promise."""

from __future__ import annotations

import pytest
import torch

from everyframe.samplers.noise import generator, start_noise, step_noise

SHAPE = (4, 5, 6, 6)


# Drawn in float64: another CPU's logarithm may differ by one unit in float64's last place, which
# is far less than one in float32's.
def test_pinned_values() -> None:
    first = start_noise(7, SHAPE).flatten()[:4].tolist()
    assert first == pytest.approx(
        [1.8111766576766968, -0.3618367314338684, 0.9218387007713318, -0.10542456805706024],
        rel=2e-7,
    )
    last = step_noise(7, 3, SHAPE).flatten()[-3:].tolist()
    assert last == pytest.approx(
        [0.847437858581543, 0.12819591164588928, 1.6221849918365479], rel=2e-7
    )


def test_pinned_seeds() -> None:
    # First 8 bytes of blake2b, top bit dropped; hashlib is not asked here.
    assert generator(7, "start").initial_seed() == 5776974459312070802
    assert generator(7, "step", 3).initial_seed() == 7777100676923066540


def test_every_purpose_and_step_has_its_own() -> None:
    draws = [start_noise(7, SHAPE), start_noise(8, SHAPE)]
    draws += [step_noise(seed, step, SHAPE) for seed in (7, 8) for step in range(3)]
    for i, one in enumerate(draws):
        for other in draws[:i]:
            correlation = (one * other).mean().abs().item()
            # 720 numbers: the standard deviation of this mean is 0.037.
            assert correlation < 0.2


def test_nothing_outside_matters() -> None:
    expected = step_noise(1, 2, SHAPE)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    step_noise(1, 1, SHAPE)
    assert torch.equal(step_noise(1, 2, SHAPE), expected)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.device("meta"):
        assert start_noise(1, SHAPE).device.type == "cpu"


def test_unit_variance_float32() -> None:
    noise = start_noise(0, (4, 16, 32, 32))
    assert noise.dtype == torch.float32
    # 65536 numbers: standard deviations of mean and variance are 0.004 and 0.006.
    assert abs(noise.mean().item()) < 0.02
    assert abs(noise.var().item() - 1) < 0.03


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, 10**30, -1])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert start_noise(seed, (2,)).isfinite().all()
