"""The StepVideo family object: detect a checkpoint, build the stages of its run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from everyframe.checkpoints.locate import Location
from everyframe.core.options import FamilyOptions
from everyframe.core.plan import Plan
from everyframe.families.stepvideo.checkpoint import find_files
from everyframe.families.stepvideo.options import StepVideoOptions
from everyframe.families.stepvideo.spec import StepVideoSpec, read_spec
from everyframe.runtime.interface import ModelSpec, Stage

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext


class StepVideoFamily:
    """Registry entry of the family."""

    name = "stepvideo"
    title = "Step-Video-T2V"
    options: type[FamilyOptions] = StepVideoOptions

    def recognise(self, location: Location, options: FamilyOptions) -> StepVideoSpec | None:
        """Detect a Step-Video checkpoint by its configs; None if it is not one."""
        assert isinstance(options, StepVideoOptions)
        files = find_files(location, options.base)
        if files is None:
            return None
        known = location.known
        variant = f"{self.title} Turbo" if files.is_turbo else self.title
        title = known.title if known else f"{variant} ({PurePath(location.name).name})"
        return read_spec(location.name, title, files, options)

    def stages(
        self, spec: ModelSpec, plan: Plan, clip: int, teams: ParallelContext
    ) -> Sequence[Stage]:
        """Stages of one clip: Step-LLM and CLIP text, denoise, decode."""
        from everyframe.families.stepvideo.stages import (
            CLIPEncodeStage,
            DecodeStage,
            DenoiseStage,
            LLMEncodeStage,
            StepVideoContext,
        )

        assert isinstance(spec, StepVideoSpec)
        assert clip == 0, "a chain is refused when the request is settled"
        job = StepVideoContext(spec, plan.settings, teams, clip, plan)
        return (LLMEncodeStage(job), CLIPEncodeStage(job), DenoiseStage(job), DecodeStage(job))


STEP_VIDEO = StepVideoFamily()
