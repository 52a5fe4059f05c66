"""The SVD family object: detect a checkpoint, build the stages of its run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from everyframe.checkpoints.locate import Location
from everyframe.core.options import FamilyOptions
from everyframe.core.plan import Plan
from everyframe.families.svd.checkpoint import find_files
from everyframe.families.svd.options import SVDOptions
from everyframe.families.svd.spec import SVDSpec, read_spec
from everyframe.runtime.interface import ModelSpec, Stage

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext


class SVDFamily:
    """Registry entry of the family."""

    name = "svd"
    title = "Stable Video Diffusion"
    options: type[FamilyOptions] = SVDOptions

    def recognise(self, location: Location, options: FamilyOptions) -> SVDSpec | None:
        """Detect a Stable Video Diffusion checkpoint by its configs; None if it is not one."""
        assert isinstance(options, SVDOptions)
        files = find_files(location, options.variant)
        if files is None:
            return None
        known = location.known
        title = known.title if known else f"{self.title} ({PurePath(location.name).name})"
        if files.assumed_frames is not None:
            # The title goes into the record, and what was assumed with it.
            title = f"{title}, taken for the model of {files.assumed_frames} frames"
        return read_spec(location.name, title, files, options)

    def stages(
        self, spec: ModelSpec, plan: Plan, clip: int, teams: ParallelContext
    ) -> Sequence[Stage]:
        """Stages of one clip: image embedding, image latents, denoise, decode."""
        from everyframe.families.svd.stages import (
            DecodeStage,
            DenoiseStage,
            ImageEmbedStage,
            ImageLatentStage,
            SVDContext,
        )

        assert isinstance(spec, SVDSpec)
        assert clip == 0, "a chain is refused when the request is settled"
        job = SVDContext(spec, plan.settings, teams, clip, plan)
        return (ImageEmbedStage(job), ImageLatentStage(job), DenoiseStage(job), DecodeStage(job))


SVD = SVDFamily()
