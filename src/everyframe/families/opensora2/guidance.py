"""Guidance of Open-Sora 2.0: up to three branches per step; unneeded branches are not computed.

The velocity is ``u_bare + g_picture (u_negative - u_bare) + g_text (u_prompt - u_negative)``, where
the bare branch has the negative prompt and no condition. Without a condition the bare and the
negative branch are equal. In odd steps from 10 on both scales may be 1; the prompt's branch is then
the result. Source: hpcaitech/Open-Sora 7ad6a96, opensora/utils/sampling.py, `I2VDenoiser`, which
computes all three in every step: 150 in 50 steps, where 110 suffice with given frames, 80 without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from everyframe.core.plan import Settings

if TYPE_CHECKING:
    from torch import Tensor

#: Text row (0 prompt, 1 negative prompt) and condition of each branch, in their order.
PROMPT, NEGATIVE, BARE = (0, True), (1, True), (1, False)
#: Both scales oscillate from this step on: they are 1 in odd steps.
_FIRST_ODD = 10


@dataclass(frozen=True)
class StepGuidance:
    """Guidance of one step: its branches, and the scales that combine them.

    `picture` has one number for each latent frame, or one for all.
    """

    branches: tuple[tuple[int, bool], ...]
    text: float
    picture: tuple[float, ...]

    def combine(self, outputs: Sequence[Tensor]) -> Tensor:
        """The velocity (B, C, T, h, w) of the branches' velocities, in float32 at least."""
        import torch  # not by who plans

        wide = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in outputs]
        if len(wide) == 1:
            return wide[0]
        prompt, negative = wide[:2]
        base = negative
        if len(wide) == 3:
            scale = torch.tensor(self.picture, dtype=base.dtype, device="cpu").to(base.device)
            base = wide[2] + scale.view(-1, 1, 1) * (negative - wide[2])
        return base + self.text * (prompt - negative)


@dataclass(frozen=True)
class Guidance:
    """Guidance of a run.

    Attributes:
        text, picture: scales of the prompt and of the given frames; 1 is off.
        text_oscillates, picture_oscillates: whether the scale is 1 in odd steps from 10 on.
        fades: whether the picture's scale falls to 1 over the steps, and rises over the frames.
        is_conditioned: whether there are given frames.
    """

    num_steps: int
    text: float
    picture: float
    text_oscillates: bool = True
    picture_oscillates: bool = True
    fades: bool = True
    is_conditioned: bool = False

    def at(self, step: int, latent_frames: int) -> StepGuidance:
        """Guidance of step `step` from 0."""
        is_odd = step >= _FIRST_ODD and step % 2 == 1
        text = 1.0 if is_odd and self.text_oscillates else self.text
        picture: tuple[float, ...] = (1.0 if is_odd and self.picture_oscillates else self.picture,)
        if self.fades and picture[0] > 1:
            last = self.picture + (1 - self.picture) * step / self.num_steps
            steps = max(latent_frames - 1, 1)
            picture = tuple(1 + (last - 1) * frame / steps for frame in range(latent_frames))
        branches: tuple[tuple[int, bool], ...] = (PROMPT, NEGATIVE, BARE)
        if not self.is_conditioned or all(scale == 1 for scale in picture):
            branches = branches[:1] if text == 1 else branches[:2]
        return StepGuidance(branches, text, picture)

    def num_evaluations(self, latent_frames: int, steps: Iterable[int] | None = None) -> int:
        """Branches that these steps compute, by default all of a run."""
        computed = range(self.num_steps) if steps is None else steps
        return sum(len(self.at(step, latent_frames).branches) for step in computed)


def guidance_of(settings: Settings, *, is_conditioned: bool) -> Guidance:
    """The guidance of these settings."""
    found = Guidance(
        settings.num_inference_steps,
        settings.guidance_scale,
        settings.option("image_guidance_scale"),
        settings.option("text_oscillation"),
        settings.option("image_oscillation"),
        settings.option("image_fading"),
        is_conditioned,
    )
    # Upstream fades where the condition is a picture; a clip's scale is the same in all frames.
    return replace(found, fades=found.fades and not settings.option("given_clip"))


def time_shift(frame_tokens: int, latent_frames: int) -> float:
    """Shift of the schedule towards high noise, larger for larger frames and longer videos.

    Linear from 1 at 256 tokens of a frame to 3 at 4096, times the root of the latent frames.
    """
    return (1 + (frame_tokens - 256) * 2 / 3840) * math.sqrt(latent_frames)
