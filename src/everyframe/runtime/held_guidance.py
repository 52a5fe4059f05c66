"""Guidance held over single steps: ``denoise(x, t)`` for methods such as ``abm2@10e130h``.

Classifier-free guidance adds ``(scale - 1) (cond - uncond)`` to the prompt's own prediction. Held
steps compute the prompt's branch alone and add what the step before added.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from torch import Tensor

from everyframe.samplers.base import Step

_Make = Callable[[], Callable[..., Tensor]]


class GuidedDenoise(Protocol):
    """A denoiser that can be built anew, and tells what guidance added in its last call."""

    num_done: int

    @property
    def share(self) -> Tensor | None:
        """What guidance added; None for a single branch."""
        ...

    def make_by(self, make: _Make) -> None:
        """Build another denoiser for the remaining steps."""
        ...

    def __call__(self, *given: Tensor) -> Tensor:
        """The answer."""
        ...


class HeldGuidanceDenoise:
    """``denoise(x, t)`` that computes the prompt's branch alone in `held` steps.

    `memory` is its state after each step, to be saved and passed to a resumed one.
    """

    def __init__(
        self,
        denoise: GuidedDenoise,
        make: _Make,
        make_unguided: _Make,
        held: Collection[int],
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        self._denoise, self._make, self._make_unguided = denoise, make, make_unguided
        is_exact = memory is not None and memory["error"] < 0
        self._held = frozenset() if is_exact else frozenset(held)
        self._is_guided = True
        self._share: Tensor | None = None if memory is None else memory["guidance"]

    def __call__(self, *given: Tensor) -> Tensor:
        """The answer; `given` are x (B, ...), t (B,) and what else the denoiser takes."""
        share = self._share if self._denoise.num_done in self._held else None
        if self._is_guided != (share is None):
            self._is_guided = share is None
            self._denoise.make_by(self._make if self._is_guided else self._make_unguided)
        answer = self._denoise(*given)
        if share is None:
            self._share = self._denoise.share
            return answer
        return answer + share.to(answer)

    @property
    def memory(self) -> dict[str, Any]:
        """State that a resumed run needs: one latent."""
        return {"guidance": self._share}

    def finish(self, step: Step) -> None:
        """Go on to the next step. After the error's limit was passed, all have guidance."""
        self._denoise.num_done = step.index + 1
        if step.memory["error"] < 0:
            self._held = frozenset()
