"""IDDPM against upstream's golden vectors, and diffusers' DDPM in float64 for other step counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.schedulers import scheduling_ddpm
from safetensors.torch import load_file
from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.samplers import iddpm
from everyframe.samplers.guidance import guide

GOLDEN = Path(__file__).parents[1] / "golden"


def model(x: Tensor, t: Tensor, c: float) -> Tensor:
    """The analytic model of the goldens' README."""
    tt = (t / 1000).view(-1, 1, 1, 1, 1)
    return torch.cat([torch.tanh(x * (0.7 + 0.2 * tt) + 0.1 * c), 0.5 * torch.sin(x)], dim=1)


@pytest.mark.parametrize("name", ["iddpm_20", "iddpm_100"])
def test_matches_upstream(name: str) -> None:
    golden = load_file(GOLDEN / f"opensora_{name}" / "io.safetensors")
    config = json.loads((GOLDEN / f"opensora_{name}" / "config.json").read_text())
    plan = iddpm.schedule(config["num_sampling_steps"])
    assert torch.equal(plan.timestep_map, golden["timestep_map"])
    torch.testing.assert_close(plan.betas, golden["betas"], atol=1e-12, rtol=1e-12)

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        return guide(model(x, t, 1.0), model(x, t, -1.0), config["cfg_scale"], channels=3)

    *_, last = iddpm.sample(denoise, golden["z0"], plan, lambda i: golden["noise"][i, :2])
    # Bit for bit where measured; another CPU's tanh and sin may move last bits, and guidance by 7
    # over 100 steps grows them.
    error = (last.x - golden["sample"]).abs().max() / golden["sample"].abs().max()
    assert error < 1e-4


@pytest.mark.parametrize(
    ("num_steps", "place", "timestep"),
    [(21, 10, 499), (61, 10, 167), (93, 46, 500), (115, 95, 833)],
)
def test_halves_are_rounded_as_upstream_adds_them_up(
    num_steps: int, place: int, timestep: int
) -> None:
    # Worked out by hand from `space_timesteps` of hpcaitech/Open-Sora v1.0.0, which adds the stride
    # up in float64: 21 steps of 49.95 come to 499.49999999999994, while 10 * 49.95 is 499.5.
    assert iddpm.schedule(num_steps).timestep_map[place] == timestep


@pytest.mark.parametrize("num_steps", [2, 7, 50])
def test_is_diffusers_ddpm(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.Generator().manual_seed(num_steps)
    draws = torch.randn(num_steps + 1, 2, 4, 3, 5, 5, generator=source, dtype=torch.float64)
    other = DDPMScheduler(
        variance_type="learned_range", clip_sample=False, timestep_spacing="linspace"
    )
    other.betas = torch.linspace(1e-4, 2e-2, 1000, dtype=torch.float64)
    other.alphas = 1 - other.betas
    other.alphas_cumprod = torch.cumprod(other.alphas, dim=0)
    other.one = torch.tensor(1.0, dtype=torch.float64)
    other.set_timesteps(num_steps)
    x = draws[-1]
    for index, t in enumerate(other.timesteps):
        monkeypatch.setattr(
            scheduling_ddpm, "randn_tensor", lambda *args, index=index, **options: draws[index]
        )
        x = other.step(model(x, t.double().expand(2), 1.0), t, x).prev_sample
    plan = iddpm.schedule(num_steps)
    *_, last = iddpm.sample(lambda x, t: model(x, t, 1.0), draws[-1], plan, lambda i: draws[i])
    # The same formula in float64.
    torch.testing.assert_close(last.x, x, atol=1e-9, rtol=1e-9)


def test_resumed_equals_unbroken_and_noise_is_asked_by_step() -> None:
    golden = load_file(GOLDEN / "opensora_iddpm_20" / "io.safetensors")
    plan = iddpm.schedule(9)
    asked: list[int] = []

    def noise(step: int) -> Tensor:
        asked.append(step)
        return golden["noise"][step, :2]

    steps = list(iddpm.sample(lambda x, t: model(x, t, 1.0), golden["z0"], plan, noise))
    assert asked == list(range(8))  # the last step adds none
    assert [step.t[0].item() for step in steps] == plan.timestep_map.flip(0).tolist()
    again = list(iddpm.sample(lambda x, t: model(x, t, 1.0), steps[4].x, plan, noise, start=5))
    assert torch.equal(again[-1].x, steps[-1].x)


def test_one_step_is_finite() -> None:
    x = torch.ones(1, 1, 1, 1, 1)
    *_, last = iddpm.sample(lambda x, t: model(x, t, 1.0), x, iddpm.schedule(1), lambda i: x)
    assert last.x.isfinite().all()


def test_refusals() -> None:
    for steps in (0, 1001):
        with pytest.raises(InputError, match=f"1 to 1000 steps, got {steps}"):
            iddpm.schedule(steps)
    x = torch.ones(1, 4, 1, 1, 1)
    with pytest.raises(InputError, match=r"8 output channels .* got 4"):
        next(iddpm.sample(lambda x, t: x, x, iddpm.schedule(3), lambda i: x))
