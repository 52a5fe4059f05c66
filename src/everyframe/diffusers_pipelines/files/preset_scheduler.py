"""Sampler of a step-distilled model: diffusers' flow-matching Euler on a schedule of its own."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from everyframe.runtime.sampling_preset import SamplingPreset


class PresetScheduler(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """Flow-matching Euler whose noise levels are those of a preset, whatever the pipeline asks."""

    preset: SamplingPreset

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: Any = None,
        mu: float | None = None,
        timesteps: Any = None,
    ) -> None:
        """Set the schedule for so many steps; `sigmas`, `timesteps` and `mu` only count them."""
        given = sigmas if sigmas is not None else timesteps
        count = num_inference_steps if given is None else len(given)
        assert count is not None
        super().set_timesteps(sigmas=self.preset.unshifted_sigmas(count), device=device)


def preset_scheduler(preset: SamplingPreset, own: Any) -> PresetScheduler:
    """The scheduler of a preset in place of a pipeline's `own`."""
    train = own.config.get("num_train_timesteps", 1000)
    scheduler = PresetScheduler(num_train_timesteps=train, shift=preset.shift or 1.0)
    scheduler.preset = preset
    return scheduler
