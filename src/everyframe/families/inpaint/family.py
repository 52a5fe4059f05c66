"""The Inpaint family object: detect a checkpoint, build the stages of its run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from everyframe.checkpoints.locate import Location
from everyframe.core.options import FamilyOptions
from everyframe.core.plan import Plan
from everyframe.families.inpaint.checkpoint import find_files
from everyframe.families.inpaint.options import InpaintOptions
from everyframe.families.inpaint.spec import InpaintSpec, read_spec
from everyframe.runtime.interface import ModelSpec, Stage

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext


class InpaintFamily:
    """Registry entry of the family."""

    name = "inpaint"
    title = "ControlNet inpainting"
    options: type[FamilyOptions] = InpaintOptions

    def recognise(self, location: Location, options: FamilyOptions) -> InpaintSpec | None:
        """Detect a checkpoint that can inpaint by its configs; None if it cannot."""
        assert isinstance(options, InpaintOptions)
        files = find_files(location, options.controlnet)
        if files is None:
            return None
        known = location.known
        title = known.title if known else f"{self.title} ({PurePath(location.name).name})"
        return read_spec(location.name, title, files, options)

    def stages(
        self, spec: ModelSpec, plan: Plan, clip: int, teams: ParallelContext
    ) -> Sequence[Stage]:
        """Stages of one clip: text, source latents, denoise, decode."""
        from everyframe.families.inpaint.stage_context import InpaintContext
        from everyframe.families.inpaint.stages import DenoiseStage, TextEncodeStage
        from everyframe.families.inpaint.vae_stages import DecodeStage, SourceLatentStage

        assert isinstance(spec, InpaintSpec)
        assert clip == 0, "a chain is refused when the request is settled"
        job = InpaintContext(spec, plan.settings, teams, clip, plan)
        return (TextEncodeStage(job), SourceLatentStage(job), DenoiseStage(job), DecodeStage(job))


INPAINT = InpaintFamily()
