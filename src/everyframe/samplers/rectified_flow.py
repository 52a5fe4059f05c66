"""Rectified flow by Euler steps, as Open-Sora 1.2 samples.

The state at timestep t is ``(1 - s) x0 + s noise`` with ``s = t / 1000``, and the model predicts
``x0 - noise``. Liu et al. 2022, "Flow Straight and Fast" (arXiv 2209.03003); the timestep
transform is Esser et al. 2024 (arXiv 2403.03206), section 5.3.2, extended to frames by
hpcaitech/Open-Sora v1.2.0, opensora/schedulers/rf.

Frame masks: 1 = generate, 0 = conditioning frame, in between = edit; higher values edit more. A
frame is active once ``t <= mask * 1000``; an edited one gets noise of that level at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.samplers.base import Denoise, MaskedDenoise, Noise, Step, as_state, check_start
from everyframe.samplers.multistep import DiffusionPath

NUM_TIMESTEPS = 1000
_BASE_RESOLUTION = 512 * 512


def schedule(
    num_steps: int,
    *,
    num_timesteps: int = NUM_TIMESTEPS,
    resolution: tuple[float | Tensor, float | Tensor] | None = None,
    num_frames: int | float | Tensor | None = None,
    shift: float = 1.0,
) -> Tensor:
    """Timesteps from `num_timesteps` down to 0, float64 on the CPU.

    The shape is (num_steps + 1, 1), or (num_steps + 1, B) if sizes are given per sample.

    Args:
        num_steps: number of steps.
        num_timesteps: the highest timestep.
        resolution: height and width in pixels. With `num_frames` (both or neither), timesteps are
            transformed: larger and longer videos spend more steps at high noise.
        num_frames: frames of the video, not of its latents.
        shift: the same transform for models with sizes of their own; above 1, more steps are at
            high noise.
    """
    if num_steps < 1:
        raise InputError(f"a sampler needs 1 step or more, got {num_steps}")
    if (resolution is None) != (num_frames is None):
        raise InputError("the timestep transform needs both resolution and num_frames, or neither")
    if not shift > 0:
        raise InputError(f"the shift of the timesteps must be above 0, got {shift}")
    s = torch.linspace(1.0, 0.0, num_steps + 1, dtype=torch.float64, device="cpu")[:, None]
    if resolution is not None and num_frames is not None:
        s = transform(s, size_ratio(*resolution, num_frames))
    return transform(s, shift) * num_timesteps


def size_ratio(
    height: float | Tensor, width: float | Tensor, num_frames: int | float | Tensor
) -> Tensor:
    """Size of a video relative to one frame of 512x512: (1,) or (B,), float64.

    Latent frames are upstream's ``num_frames // 17 * 5``, or 1 below 17 frames (for 2 to 16 frames
    upstream's formula gives 0, and with it no usable schedule).
    """
    height, width, frames = (
        torch.as_tensor(value, dtype=torch.float64, device="cpu").reshape(-1)
        for value in (height, width, num_frames)
    )
    latent_frames = (torch.floor(frames / 17) * 5).clamp(min=1)
    return torch.sqrt(height * width / _BASE_RESOLUTION) * torch.sqrt(latent_frames)


def transform(s: Tensor, ratio: float | Tensor) -> Tensor:
    """``ratio s / (1 + (ratio - 1) s)`` for s in 0..1, in a form that maps 0 and 1 exactly.

    If 1 became 1 + 1e-16, a frame to generate would not be active at the first step.
    """
    return s / (s + (1.0 - s) / ratio)


def add_noise(x0: Tensor, noise: Tensor, s: Tensor) -> Tensor:
    """``(1 - s) x0 + s noise``, s broadcastable."""
    return (1.0 - s) * x0 + s * noise


def sample(
    denoise: Denoise,
    x: Tensor,
    timesteps: Tensor,
    *,
    num_timesteps: int = NUM_TIMESTEPS,
    start: int = 0,
) -> Iterator[Step]:
    """Sample by Euler steps from x (B, ...) along `timesteps` (see `schedule`)."""
    num_steps = len(timesteps) - 1
    check_start(start, num_steps)
    x = as_state(x)

    def clean() -> Tensor:
        return x + velocity * _broadcast(timesteps[index + 1] / num_timesteps, x)

    for index in range(start, num_steps):
        t = _per_sample(timesteps[index], x)
        velocity = denoise(x, t).to(x.dtype)
        x = x + velocity * _dt(timesteps, index, num_timesteps, x)
        yield Step(index, num_steps, t, x, clean=clean)


def path(
    timesteps: Tensor, mask: Tensor | None = None, *, num_timesteps: int = NUM_TIMESTEPS
) -> DiffusionPath:
    """The path of `sample` for the solvers of `multistep`; `timesteps` are (N + 1, 1).

    With a `mask` (B, T) of 0 and 1, that of `sample_masked`: frames with 0 stay as they are.
    """
    levels = tuple((timesteps[:, 0] / num_timesteps).tolist())
    active = None if mask is None else mask == 1

    def predict(denoise: Callable[..., Tensor], x: Tensor, index: int) -> tuple[Tensor, Tensor]:
        t = _per_sample(timesteps[index], x)
        masks = () if active is None else (active.to(x.device),)
        return t, x + denoise(x, t, *masks).to(x.dtype) * levels[index]

    shown = None if active is None else active[:, None, :, None, None]
    alphas = tuple(1.0 - level for level in levels)
    return DiffusionPath(alphas, levels, predict, is_flow=True, active=shown)


def sample_masked(
    denoise: MaskedDenoise,
    x: Tensor,
    timesteps: Tensor,
    mask: Tensor,
    noise: Noise,
    *,
    num_timesteps: int = NUM_TIMESTEPS,
    start: int = 0,
) -> Iterator[Step]:
    """`sample` with conditioning or edited frames: x (B, C, T, H, W), mask (B, T) in 0..1.

    `x` holds noise where mask is 1 and clean latents elsewhere. ``denoise(x, t, x_mask)`` gets the
    active frames (bool, (B, T)); its output for other frames is ignored. `noise` is called only in
    steps in which an edited frame becomes active.
    """
    num_steps = len(timesteps) - 1
    check_start(start, num_steps)
    if mask.shape != (x.shape[0], x.shape[2]):
        raise InputError(
            f"a frame mask must be (batch, latent frames) = {(x.shape[0], x.shape[2])}, "
            f"got {tuple(mask.shape)}"
        )
    x = as_state(x)
    # Compared on the CPU, so that all devices agree, and in float32, where 0.7 * 1000 is 700, so
    # that a frame edited by 0.7 begins at that timestep.
    threshold = mask.to("cpu", torch.float32) * num_timesteps

    def clean() -> Tensor:
        ahead = x + velocity * _broadcast(timesteps[index + 1] / num_timesteps, x)
        return torch.where(_per_frame(active, x), ahead, x)

    for index in range(start, num_steps):
        t = _per_sample(timesteps[index], x)
        active = _active(threshold, timesteps, index)
        before = _active(threshold, timesteps, index - 1) if index else threshold >= num_timesteps
        begins = active & ~before
        if begins.any():
            s = _broadcast(timesteps[index] / num_timesteps, x)
            noisy = add_noise(x, noise(index).to(x.device, x.dtype), s)
            x = torch.where(_per_frame(begins, x), noisy, x)
        velocity = denoise(x, t, active.to(x.device)).to(x.dtype)
        moved = x + velocity * _dt(timesteps, index, num_timesteps, x)
        x = torch.where(_per_frame(active, x), moved, x)
        yield Step(index, num_steps, t, x, clean=clean)


def _active(threshold_BT: Tensor, timesteps: Tensor, index: int) -> Tensor:
    return threshold_BT >= timesteps[index].to(torch.float32)[:, None]


def _per_sample(t: Tensor, x: Tensor) -> Tensor:
    return t.expand(x.shape[0]).to(x.dtype).to(x.device)


def _broadcast(value: Tensor, x: Tensor) -> Tensor:
    # Cast before moving: not every device has float64.
    return value.reshape(-1, *[1] * (x.ndim - 1)).to(x.dtype).to(x.device)


def _per_frame(flags_BT: Tensor, x: Tensor) -> Tensor:
    return flags_BT[:, None, :, None, None].to(x.device)


def _dt(timesteps: Tensor, index: int, num_timesteps: int, x: Tensor) -> Tensor:
    return _broadcast((timesteps[index] - timesteps[index + 1]) / num_timesteps, x)
