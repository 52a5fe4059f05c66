"""What all stages of a Stable Video Diffusion run share: the plan, the model, the picture.

Not here: what is done with it. Read next: `stages.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everyframe.families import job
from everyframe.families.family import Take
from everyframe.families.svd.config import SVDConfig
from everyframe.families.svd.family import SVDModel

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Job(job.Job[SVDModel]):
    """What all stages share, and what they ask of it."""

    @property
    def config(self) -> SVDConfig:
        """The model's configs."""
        return self.model.config

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.settings.height, self.settings.width

    @property
    def fit(self) -> str:
        """How a picture of other proportions is fitted."""
        return str(self.settings.option("fit"))


@dataclass(frozen=True)
class Picture:
    """The given picture as the denoiser sees it: CLIP's embedding (1, 1, D), latents (1, C, h, w).

    `latents` is None until the autoencoder has run. Both in float32 on the CPU.
    """

    embedding: Tensor
    latents: Tensor | None = None


def given_picture(take: Take) -> Any:
    """The picture that came with a take: uint8 (1, H, W, 3)."""
    assert take.given.first is not None, "settled without a picture"
    return take.given.first
