"""AnimateLCM-SVD: its sampler, and the settings that its UNet brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import everyframe
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.core.errors import InputError
from everyframe.core.events import Event, Step
from everyframe.samplers import consistency
from helpers.tiny_checkpoints import families as tiny_families

FILE = "AnimateLCM-SVD-xt-1.1.safetensors"


def test_levels_are_every_tenth_of_forty() -> None:
    sigmas = consistency.schedule(4, 0.002, 700.0)
    places = np.array([0, 10, 20, 30]) / 39
    wanted = (700 ** (1 / 7) + places * (0.002 ** (1 / 7) - 700 ** (1 / 7))) ** 7
    np.testing.assert_allclose(sigmas[:4], wanted, rtol=1e-12)
    assert float(sigmas[-1]) == 0
    with pytest.raises(InputError, match="1 to 40 steps, got 41"):
        consistency.schedule(41, 0.002, 700.0)


def test_each_step_goes_to_the_clean_sample_and_adds_the_next_noise() -> None:
    truth = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(1, 3, 2, 2)
    sigmas = consistency.schedule(3, 0.002, 700.0)

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        sigma = torch.exp(4 * t[0])
        scale = torch.sqrt(sigma**2 + 1)
        return (x / scale - truth) * scale / sigma  # v of x = scale * given

    drawn: list[int] = []

    def noise(step: int) -> Tensor:
        drawn.append(step)
        return torch.full_like(truth, step + 1.0)

    steps = list(consistency.sample(denoise, truth + 700, sigmas, noise))
    for step, sigma in zip(steps[:-1], sigmas[1:-1], strict=True):
        torch.testing.assert_close(step.x, truth + (step.index + 1) * sigma, rtol=0, atol=1e-9)
    torch.testing.assert_close(steps[-1].x, truth, rtol=0, atol=1e-9)
    assert drawn == [0, 1]
    again = list(consistency.sample(denoise, steps[0].x, sigmas, noise, start=1))
    assert torch.equal(again[-1].x, steps[-1].x)


def test_the_unet_brings_its_settings(tmp_path: Path) -> None:
    model = tiny_families.made("svd", tmp_path)
    opened = open_checkpoint(model / "unet")
    save_file({name: opened.load(name).contiguous() for name in opened}, tmp_path / FILE)
    asked: dict[str, Any] = tiny_families.asked("svd", model=str(model))
    for name in ("num_inference_steps", "max_guidance_scale", "min_guidance_scale"):
        asked.pop(name, None)
    components = {"unet": tmp_path / FILE}
    plan = everyframe.plan(**asked, components=components)
    assert (plan.settings.num_inference_steps, plan.settings.guidance_scale) == (4, 1.0)
    assert any("known as AnimateLCM-SVD" in note for note in plan.notes)
    own = everyframe.plan(
        **asked, components=components, num_inference_steps=2, max_guidance_scale=1.5
    )
    assert (own.settings.num_inference_steps, own.settings.guidance_scale) == (2, 1.5)
    with pytest.raises(InputError, match="must be 1 to 40 for a consistency model, got 41"):
        everyframe.plan(**asked, components=components, num_inference_steps=41)
    with pytest.raises(InputError, match="ab2"):
        everyframe.plan(**asked, components=components, quality="ab2@2")
    events: list[Event] = []
    video = everyframe.generate(
        **asked, components=components, run_dir="off", on_event=events.append
    )
    assert len([each for each in events if isinstance(each, Step) and each.stage == "denoise"]) == 4
    euler = everyframe.generate(**asked, num_inference_steps=4, max_guidance_scale=1.0,
                                run_dir="off")  # fmt: skip
    assert not np.array_equal(video.frames, euler.frames)


def test_its_noise_is_scaled_as_its_own_scheduler_scales_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``(sigma_max^2 + 1)^0.5``, `init_noise_sigma` in animatelcm_scheduler.py."""
    model = tiny_families.made("svd", tmp_path)
    opened = open_checkpoint(model / "unet")
    save_file({name: opened.load(name).contiguous() for name in opened}, tmp_path / FILE)
    asked: dict[str, Any] = tiny_families.asked("svd", model=str(model))
    latents = torch.randn(1, 4, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    seen: list[Tensor] = []
    sample = consistency.sample

    def spy(denoise: Any, x: Tensor, *given: Any, **more: Any) -> Any:
        seen.append(x)
        return sample(denoise, x, *given, **more)

    monkeypatch.setattr(consistency, "sample", spy)
    everyframe.generate(
        **{**asked, "size": "32x32", "num_frames": 4, "num_inference_steps": 1},
        components={"unet": tmp_path / FILE}, latents=latents, run_dir="off",
    )  # fmt: skip
    # float32 rounds by 6e-8; a scale of 700 alone is 1e-6 less.
    torch.testing.assert_close(
        seen[0].double(), latents.double() * (700.0**2 + 1) ** 0.5, rtol=2e-7, atol=0
    )


def test_it_is_known_by_its_header_too(tmp_path: Path) -> None:
    model = tiny_families.made("svd", tmp_path)
    opened = open_checkpoint(model / "unet")
    tensors = {name: opened.load(name).contiguous() for name in opened}
    save_file(tensors, tmp_path / "unet.safetensors", {"modelspec.title": "AnimateLCM SVD xt"})
    save_file(tensors, tmp_path / "plain.safetensors", {"modelspec.title": "my own"})
    asked: dict[str, Any] = tiny_families.asked("svd", model=str(model))
    asked.pop("num_inference_steps", None)
    plans = [
        everyframe.plan(**asked, components={"unet": tmp_path / f"{name}.safetensors"})
        for name in ("unet", "plain")
    ]
    assert [plan.settings.num_inference_steps for plan in plans] == [4, 25]
