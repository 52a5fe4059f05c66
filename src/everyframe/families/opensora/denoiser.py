"""Open-Sora's ``denoise(x, t)``: model, prompt embeddings and guidance; and its timesteps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everyframe.core.plan import Settings
from everyframe.families.opensora.config import OpenSoraConfig
from everyframe.families.opensora.settings import PICTURE_FPS
from everyframe.families.opensora.stdit import STDiT
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.families.opensora.text import TextEmbedding
from everyframe.runtime.memory.memory_fallbacks import cfg_batch_size
from everyframe.samplers import rectified_flow
from everyframe.samplers.guidance import GuidanceShare, guided


@dataclass(frozen=True)
class PromptEmbeds:
    """Prompt embeddings of a video (T5 hidden states); `negative` None stands for the null text."""

    prompt: TextEmbedding
    negative: TextEmbedding | None


def timesteps_of(settings: Settings, config: OpenSoraConfig) -> Tensor:
    """Sampler timesteps, shifted by the video's size if the model was trained with that shift."""
    shift = float(config.defaults.get("timestep_shift", 1.0))
    if config.defaults and not config.default("use_timestep_transform"):
        return rectified_flow.schedule(settings.num_inference_steps, shift=shift)
    return rectified_flow.schedule(
        settings.num_inference_steps,
        resolution=settings.conditioned_size,
        num_frames=settings.num_frames,
        shift=shift,
    )


class Denoiser:
    """``denoise(x, t)`` for the samplers: the model with prompt embeddings and guidance.

    The unconditional branch uses the model's learned null text with the *prompt's own mask*, as
    upstream does and as the weights were sampled; a negative prompt has its own mask. If memory is
    short, the plan runs the branches one after the other.
    """

    #: Set from outside for a method that holds what guidance adds.
    share: GuidanceShare | None = None

    def __init__(
        self,
        model: STDiT | STDiT3,
        text: PromptEmbeds,
        settings: Settings,
        config: OpenSoraConfig,
        device: str,
    ) -> None:
        self._model = model
        self._version = config.version
        self._scale = settings.guidance_scale
        self._batch_size = cfg_batch_size(settings, 2)
        self._conditions: dict[str, Any] = {}
        if config.version != "1.0":
            self._conditions = {
                "fps": settings.fps if settings.num_frames > 1 else PICTURE_FPS,
                "height": float(settings.conditioned_size[0]),
                "width": float(settings.conditioned_size[1]),
            }
        # Masks stay on the host, where the longest text's length is read from them.
        hidden, mask = text.prompt.hidden.to(device), text.prompt.mask
        if self._scale != 1:
            null = model.null_text()[None].to(hidden)
            negative_mask = mask
            if text.negative is not None:
                null = text.negative.hidden.to(device)
                negative_mask = text.negative.mask
            hidden, mask = torch.cat([hidden, null]), torch.cat([mask, negative_mask])
        self._context = model.context(hidden, mask)

    def __call__(self, x: Tensor, t: Tensor, x_mask: Tensor | None = None) -> Tensor:
        """Guided output for x (1, C, T, h, w): velocity, or for 1.0 noise and variance."""

        def predict(start: int, stop: int) -> Tensor:
            branches, extra = stop - start, dict(self._conditions)
            if x_mask is not None:
                extra["x_mask"] = x_mask.expand(branches, -1)
            answer: Tensor = self._model(
                x.expand(branches, *x.shape[1:]),
                t.expand(branches),
                self._context.rows(start, stop),
                **extra,
            )
            # The second half of 1.2's channels was never trained.
            return answer if self._version == "1.0" else answer[:, : x.shape[1]]

        return guided(
            predict,
            1 if self._scale == 1 else 2,
            self._batch_size,
            self._scale,
            # 1.0 was sampled with guidance on three of its four channels, a legacy of DiT.
            channels=3 if self._version == "1.0" else None,
            prompt_first=True,
            share=self.share,
        )
