"""The OpenSora family object: detect a checkpoint, build the stages of its run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from everyframe.checkpoints.locate import Location
from everyframe.core.plan import Plan
from everyframe.families.opensora.checkpoint import OpenSoraFiles, find_files
from everyframe.families.opensora.options import OpenSoraOptions
from everyframe.families.opensora.spec import OpenSoraSpec
from everyframe.runtime.interface import ModelSpec, Stage
from everyframe.runtime.native_family import NativeFamily

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext


class OpenSoraFamily(NativeFamily[OpenSoraOptions, OpenSoraFiles]):
    """Registry entry of the family."""

    name = "opensora"
    title = "Open-Sora 1.0 and 1.2"
    options = OpenSoraOptions
    spec = OpenSoraSpec

    def find_files(self, location: Location, options: OpenSoraOptions) -> OpenSoraFiles | None:
        return find_files(location, options)

    def variant(self, files: OpenSoraFiles) -> str:
        return f"Open-Sora {files.version}"

    def stages(
        self, spec: ModelSpec, plan: Plan, clip: int, parallel: ParallelContext
    ) -> Sequence[Stage]:
        from everyframe.families.opensora.stages import (
            ConditioningStage,
            DecodeStage,
            DenoiseStage,
            OpenSoraContext,
            TextEncodeStage,
        )

        assert isinstance(spec, OpenSoraSpec)
        job = OpenSoraContext(spec, plan.settings, parallel, clip, plan)
        stages: list[Stage] = [TextEncodeStage(job)] if clip == 0 else []
        given = plan.settings.given_frames
        if job.is_continuation() or "image" in given or (
            "last_image" in given and clip == plan.settings.chain - 1
        ):  # fmt: skip
            stages.append(ConditioningStage(job))
        return [*stages, DenoiseStage(job), DecodeStage(job)]


OPEN_SORA = OpenSoraFamily()
