"""What all stages of a Stable Video Diffusion run share: the plan, the model's files, the picture.

Not here: what is done with it. Read next: `stages.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Plan, Settings
from everyframe.families.family import Savings, Take
from everyframe.families.loading import load_component
from everyframe.families.svd.checkpoint import Files
from everyframe.families.svd.components import Sizes
from everyframe.families.svd.config import SVDConfig
from everyframe.parallel.team import ONE, Teams

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Job:
    """What all stages share: the plan, the model's configs and files, ranks."""

    plan: Plan
    sizes: Sizes
    files: Files
    savings: Savings | None = None
    teams: Teams = ONE

    @property
    def settings(self) -> Settings:
        """The plan's settings."""
        return self.plan.settings

    @property
    def config(self) -> SVDConfig:
        """The model's configs."""
        return self.sizes.config

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.settings.height, self.settings.width

    @property
    def fit(self) -> str:
        """How a picture of other proportions is fitted."""
        return str(self.settings.option("fit"))

    def device(self, component: str) -> str:
        """Where a component runs."""
        return self.plan.component(component).device

    def load_vae(self) -> Any:
        """The autoencoder with its weights."""
        return load_component(
            self.plan.component("vae"),
            self.sizes.vae,
            *self.files.weights("vae"),
            outputs=self.sizes.outputs("vae"),
        )


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
