"""Step-Video's ``denoise(x, t)``: the model with both prompt embeddings and guidance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everyframe.core.plan import Settings
from everyframe.families.stepvideo.model import StepVideoModel
from everyframe.families.stepvideo.text import TextStates
from everyframe.ops.text_context import TextContext
from everyframe.runtime.memory.memory_fallbacks import cfg_batch_size
from everyframe.samplers.guidance import GuidanceShare, guided


@dataclass(frozen=True)
class PromptEmbeds:
    """Prompt embeddings of a video from both encoders; `negative` None: no guidance."""

    prompt: TextStates
    negative: TextStates | None

    @property
    def branches(self) -> tuple[TextStates, ...]:
        """Guidance branches in upstream's order: the prompt first."""
        return (self.prompt,) if self.negative is None else (self.prompt, self.negative)


class Denoiser:
    """``denoise(x, t)`` for the sampler: the guided velocity at t, 0 (noise) to 1 (data).

    If memory is short, the plan runs the branches one after the other.
    """

    #: Set from outside for a method that holds what guidance adds.
    share: GuidanceShare | None = None

    def __init__(
        self, model: StepVideoModel, text: PromptEmbeds, settings: Settings, device: str
    ) -> None:
        self._model = model
        self._scale = settings.guidance_scale
        branches = text.branches if self._scale > 1 else text.branches[:1]
        self._batch_size = cfg_batch_size(settings, len(branches))
        self._num_branches = len(branches)
        self._context = _context(model, branches, device)

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Guided velocity for x (1, C, T, h, w) and t (1,), float32 or wider."""

        def predict(start: int, stop: int) -> Tensor:
            branches = stop - start
            answer: Tensor = self._model(
                x.expand(branches, *x.shape[1:]),
                t.expand(branches),
                self._context.rows(start, stop),
            )
            return answer

        return guided(
            predict,
            self._num_branches,
            self._batch_size,
            self._scale,
            prompt_first=True,
            share=self.share,
        )


def _context(model: StepVideoModel, branches: Sequence[TextStates], device: str) -> TextContext:
    llm = torch.cat([text.llm for text in branches]).to(device)
    clip = torch.cat([text.clip_states for text in branches]).to(device)
    # Masks stay on the host, where the longest text's length is read from them.
    return model.context(llm, clip, torch.cat([text.mask for text in branches]))
