"""Rectified flow against upstream's golden vectors, and diffusers' own Euler in another wording."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file
from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.samplers import rectified_flow
from everyframe.samplers.guidance import guide

GOLDEN = Path(__file__).parents[1] / "golden"


def velocity(x: Tensor, t: Tensor, c: float) -> Tensor:
    """The analytic model of the goldens' README."""
    q = (t / 1000).view(-1, 1, 1, 1, 1)
    return torch.sin(x) * (1 - q) + 0.2 * c * torch.cos(x + q)


def guided(scale: float):  # type: ignore[no-untyped-def]
    def denoise(x: Tensor, t: Tensor, x_mask: Tensor | None = None) -> Tensor:
        return guide(velocity(x, t, 1.0), velocity(x, t, -1.0), scale)

    return denoise


@pytest.mark.parametrize("name", ["rflow_10", "rflow_30", "rflow_30_mask"])
def test_matches_upstream(name: str) -> None:
    golden = load_file(GOLDEN / f"opensora_{name}" / "io.safetensors")
    config = json.loads((GOLDEN / f"opensora_{name}" / "config.json").read_text())
    sizes = {}
    if config["use_timestep_transform"]:
        sizes = {
            "resolution": (golden["height"], golden["width"]),
            "num_frames": golden["num_frames"],
        }
    timesteps = rectified_flow.schedule(config["num_sampling_steps"], **sizes)
    denoise = guided(config["cfg_scale"])
    if "mask" in golden:
        noise = golden["noise"]
        steps = rectified_flow.sample_masked(
            denoise, golden["z0"], timesteps, golden["mask"], lambda i: noise[i]
        )
    else:
        steps = rectified_flow.sample(denoise, golden["z0"], timesteps)
    *_, last = steps
    # float32 sums over 30 steps of values up to 4.5: 4e-6 measured. Values given stay bit for bit.
    assert (last.x - golden["sample"]).abs().max() < 5e-5
    if "mask" in golden:
        assert torch.equal(last.x[0, :, 0], golden["z0"][0, :, 0])


def test_is_diffusers_flow_matching() -> None:
    x = torch.randn(2, 3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    other = FlowMatchEulerDiscreteScheduler(shift=2.5)
    other.set_timesteps(sigmas=np.linspace(1, 1 / 9, 9))
    expected = x
    for t in other.timesteps:
        # diffusers' velocity points from data to noise, upstream's from noise to data.
        v = -velocity(expected, t.expand(2), 1.0)
        expected = other.step(v, t, expected, return_dict=False)[0]
    schedule = rectified_flow.schedule(9, shift=2.5)
    *_, last = rectified_flow.sample(lambda x, t: velocity(x, t, 1.0), x, schedule)
    torch.testing.assert_close(last.x, expected, atol=1e-5, rtol=1e-5)


# From the research report: 240p/51, 480p/102, 720p/51 and 720p/408 frames, upstream's sizes.
@pytest.mark.parametrize(
    ("height", "width", "frames", "ratio"),
    [(240, 426, 51, 2.42), (480, 854, 102, 6.85), (720, 1280, 51, 7.26), (720, 1280, 408, 20.54)],
)
def test_size_ratio(height: int, width: int, frames: int, ratio: float) -> None:
    assert rectified_flow.size_ratio(height, width, frames).item() == pytest.approx(
        ratio, abs=0.006
    )


def test_schedule_ends_are_exact_for_any_size() -> None:
    for height in range(64, 1100, 37):
        timesteps = rectified_flow.schedule(30, resolution=(height, 96), num_frames=51)
        assert timesteps.dtype == torch.float64
        assert timesteps.shape == (31, 1)
        assert timesteps[0] == 1000
        assert timesteps[-1] == 0
        assert (timesteps.diff(dim=0) < 0).all()


def test_short_clips_have_a_schedule() -> None:
    # Upstream's 5 // 17 * 5 = 0 latent frames make every timestep 0 or NaN.
    assert rectified_flow.size_ratio(512, 512, 5).item() == 1.0
    assert rectified_flow.size_ratio(512, 512, 1).item() == 1.0


def test_sizes_per_sample_equal_each_alone() -> None:
    both = rectified_flow.schedule(
        7, resolution=(torch.tensor([240.0, 720.0]), torch.tensor([426.0, 1280.0])), num_frames=51
    )
    alone = [
        rectified_flow.schedule(7, resolution=size, num_frames=51)
        for size in ((240, 426), (720, 1280))
    ]
    assert torch.equal(both, torch.cat(alone, dim=1))


def test_frames_become_active_at_their_level() -> None:
    mask = torch.tensor([[0.0, 1.0, 0.7]])
    x0 = torch.ones(1, 1, 3, 1, 1, dtype=torch.float64)
    seen: list[tuple[float, list[bool]]] = []
    asked: list[int] = []

    def noise(step: int) -> Tensor:
        asked.append(step)
        return torch.full_like(x0, 5.0)

    def denoise(x: Tensor, t: Tensor, x_mask: Tensor) -> Tensor:
        seen.append((round(t.item(), 9), x_mask[0].tolist()))
        return torch.zeros_like(x)

    *_, last = rectified_flow.sample_masked(denoise, x0, rectified_flow.schedule(10), mask, noise)
    # 0.7 of 1000 is 700: active from that very timestep on, noised once, at that level.
    assert [active for _, active in seen] == [[False, True, t <= 700] for t, _ in seen]
    assert asked == [3]
    torch.testing.assert_close(last.x.flatten().tolist(), [1.0, 1.0, 0.3 * 1 + 0.7 * 5])


@pytest.mark.parametrize("start", [1, 4, 7])
def test_resumed_equals_unbroken(start: int) -> None:
    golden = load_file(GOLDEN / "opensora_rflow_30_mask" / "io.safetensors")
    timesteps = rectified_flow.schedule(8)
    arguments = (timesteps, golden["mask"], lambda i: golden["noise"][i])
    steps = list(rectified_flow.sample_masked(guided(4.0), golden["z0"], *arguments))
    again = list(
        rectified_flow.sample_masked(guided(4.0), steps[start - 1].x, *arguments, start=start)
    )
    assert [step.index for step in again] == list(range(start, 8))
    assert torch.equal(again[-1].x, steps[-1].x)
    plain = list(rectified_flow.sample(guided(4.0), golden["z0"], timesteps))
    resumed = list(rectified_flow.sample(guided(4.0), plain[start - 1].x, timesteps, start=start))
    assert torch.equal(resumed[-1].x, plain[-1].x)


def test_state_is_float32_at_least() -> None:
    x = torch.randn(1, 2, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    for given, kept in [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ]:
        times: list[Tensor] = []

        def denoise(x: Tensor, t: Tensor, times: list[Tensor] = times) -> Tensor:
            times.append(t)
            return torch.zeros_like(x, dtype=torch.bfloat16)

        *_, last = rectified_flow.sample(denoise, x.to(given), rectified_flow.schedule(3))
        assert last.x.dtype == kept
        # bfloat16 would make 666.7 into 668.
        assert math.isclose(times[1].item(), 2000 / 3, rel_tol=1e-6)


def test_refusals() -> None:
    x = torch.zeros(1, 1, 2, 1, 1)
    with pytest.raises(InputError, match="1 step or more, got 0"):
        rectified_flow.schedule(0)
    with pytest.raises(InputError, match="both resolution and num_frames"):
        rectified_flow.schedule(3, num_frames=17)
    with pytest.raises(InputError, match="shift of the timesteps must be above 0, got 0"):
        rectified_flow.schedule(3, shift=0)
    mask = torch.ones(1, 3)
    with pytest.raises(InputError, match=r"= \(1, 2\), got \(1, 3\)"):
        next(
            rectified_flow.sample_masked(
                guided(1.0), x, rectified_flow.schedule(3), mask, lambda i: x
            )
        )
    with pytest.raises(InputError, match="start must be 0 to 3"):
        next(rectified_flow.sample(guided(1.0), x, rectified_flow.schedule(3), start=4))
