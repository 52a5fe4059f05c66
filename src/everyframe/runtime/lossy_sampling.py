"""Which lossy sampling methods a family's stages can run by; a base of their specs. No torch."""

from __future__ import annotations

from typing import ClassVar

from everyframe.core.plan import Settings
from everyframe.core.quality import PREDICTORS


class LossySampling:
    """Implements `LossySpec` for families with stages of their own.

    Attributes:
        methods: names of methods; multistep solvers need `DenoiseStage.path`.
    """

    methods: ClassVar[tuple[str, ...]] = tuple(PREDICTORS)
    has_partial_guidance: ClassVar[bool] = True
    has_held_guidance: ClassVar[bool] = False

    @property
    def is_distilled(self) -> bool:
        """See `LossySpec`."""
        return False

    def sampling_methods(self, settings: Settings) -> tuple[str, ...]:
        """See `LossySpec`. A frame that is edited is denoised in some of the steps only."""
        return () if 0 < settings.edit_strength < 1 else self.methods

    def why_not(self, method: str) -> str | None:
        """See `LossySpec`."""
        return None
