"""The SVD family object: detect a checkpoint, build the stages of its run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from everyframe.checkpoints.locate import Location
from everyframe.core.plan import Plan
from everyframe.families.svd.checkpoint import SVDFiles, find_files
from everyframe.families.svd.options import SVDOptions
from everyframe.families.svd.spec import SVDSpec
from everyframe.runtime.interface import ModelSpec, Stage
from everyframe.runtime.native_family import NativeFamily

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext


class SVDFamily(NativeFamily[SVDOptions, SVDFiles]):
    """Registry entry of the family."""

    name = "svd"
    title = "Stable Video Diffusion"
    options = SVDOptions
    spec = SVDSpec

    def find_files(self, location: Location, options: SVDOptions) -> SVDFiles | None:
        return find_files(location, options.variant)

    def title_of(self, location: Location, files: SVDFiles) -> str:
        title = super().title_of(location, files)
        if files.assumed_frames is None:
            return title
        # The title goes into the record, with the assumptions.
        return f"{title}, taken for the model of {files.assumed_frames} frames"

    def stages(
        self, spec: ModelSpec, plan: Plan, clip: int, parallel: ParallelContext
    ) -> Sequence[Stage]:
        from everyframe.families.svd.stages import (
            DecodeStage,
            DenoiseStage,
            ImageEmbedStage,
            ImageLatentStage,
            SVDContext,
        )

        assert isinstance(spec, SVDSpec)
        assert clip == 0, "a chain is refused when the request is resolved"
        job = SVDContext(spec, plan.settings, parallel, clip, plan)
        return (ImageEmbedStage(job), ImageLatentStage(job), DenoiseStage(job), DecodeStage(job))


SVD = SVDFamily()
