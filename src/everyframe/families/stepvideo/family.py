"""The StepVideo family object: detect a checkpoint, build the stages of its run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from everyframe.checkpoints.locate import Location
from everyframe.core.plan import Plan
from everyframe.families.stepvideo.checkpoint import StepVideoFiles, find_files
from everyframe.families.stepvideo.options import StepVideoOptions
from everyframe.families.stepvideo.spec import StepVideoSpec
from everyframe.runtime.interface import ModelSpec, Stage
from everyframe.runtime.native_family import NativeFamily

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext


class StepVideoFamily(NativeFamily[StepVideoOptions, StepVideoFiles]):
    """Registry entry of the family."""

    name = "stepvideo"
    title = "Step-Video-T2V"
    options = StepVideoOptions
    spec = StepVideoSpec

    def find_files(self, location: Location, options: StepVideoOptions) -> StepVideoFiles | None:
        return find_files(location, options.base)

    def variant(self, files: StepVideoFiles) -> str:
        return f"{self.title} Turbo" if files.is_turbo else self.title

    def stages(
        self, spec: ModelSpec, plan: Plan, clip: int, parallel: ParallelContext
    ) -> Sequence[Stage]:
        from everyframe.families.stepvideo.stages import (
            CLIPEncodeStage,
            DecodeStage,
            DenoiseStage,
            LLMEncodeStage,
            StepVideoContext,
        )

        assert isinstance(spec, StepVideoSpec)
        assert clip == 0, "a chain is refused when the request is resolved"
        job = StepVideoContext(spec, plan.settings, parallel, clip, plan)
        return (LLMEncodeStage(job), CLIPEncodeStage(job), DenoiseStage(job), DecodeStage(job))


STEP_VIDEO = StepVideoFamily()
