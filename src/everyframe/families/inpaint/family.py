"""The Inpaint family object: detect a checkpoint, build the stages of its run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from everyframe.checkpoints.locate import Location
from everyframe.core.plan import Plan
from everyframe.families.inpaint.checkpoint import InpaintFiles, find_files
from everyframe.families.inpaint.options import InpaintOptions
from everyframe.families.inpaint.spec import InpaintSpec
from everyframe.runtime.interface import ModelSpec, Stage
from everyframe.runtime.native_family import NativeFamily

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext


class InpaintFamily(NativeFamily[InpaintOptions, InpaintFiles]):
    """Registry entry of the family."""

    name = "inpaint"
    title = "ControlNet inpainting"
    options = InpaintOptions
    spec = InpaintSpec

    def find_files(self, location: Location, options: InpaintOptions) -> InpaintFiles | None:
        return find_files(location, options.controlnet)

    def stages(
        self, spec: ModelSpec, plan: Plan, clip: int, parallel: ParallelContext
    ) -> Sequence[Stage]:
        from everyframe.families.inpaint.stage_context import InpaintContext
        from everyframe.families.inpaint.stages import DenoiseStage, TextEncodeStage
        from everyframe.families.inpaint.vae_stages import DecodeStage, SourceLatentStage

        assert isinstance(spec, InpaintSpec)
        assert clip == 0, "a chain is refused when the request is resolved"
        job = InpaintContext(spec, plan.settings, parallel, clip, plan)
        return (TextEncodeStage(job), SourceLatentStage(job), DenoiseStage(job), DecodeStage(job))


INPAINT = InpaintFamily()
