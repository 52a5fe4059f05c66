"""The Open-Sora 2.0 family object: detect a checkpoint, build the stages of its run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from everyframe.checkpoints.locate import Location
from everyframe.core.plan import Plan
from everyframe.families.opensora2.checkpoint import OpenSora2Files, find_files
from everyframe.families.opensora2.options import OpenSora2Options
from everyframe.families.opensora2.settings import is_conditioned
from everyframe.families.opensora2.spec import OpenSora2Spec
from everyframe.runtime.interface import ModelSpec, Stage
from everyframe.runtime.native_family import NativeFamily

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext


class OpenSora2Family(NativeFamily[OpenSora2Options, OpenSora2Files]):
    """Registry entry of the family."""

    name = "opensora2"
    title = "Open-Sora 2.0"
    options = OpenSora2Options
    spec = OpenSora2Spec

    def find_files(self, location: Location, options: OpenSora2Options) -> OpenSora2Files | None:
        return find_files(location, options)

    def stages(
        self, spec: ModelSpec, plan: Plan, clip: int, parallel: ParallelContext
    ) -> Sequence[Stage]:
        from everyframe.families.opensora2 import first_picture_stages as first
        from everyframe.families.opensora2 import stages

        assert isinstance(spec, OpenSora2Spec)
        assert clip == 0, "a chain is refused when the request is resolved"
        job = stages.OpenSora2Context(spec, plan.settings, parallel, clip, plan)
        found: list[Stage] = [stages.TextEncodeStage(job), stages.CLIPEncodeStage(job)]
        if plan.settings.option("first_frame"):
            found += [first.FirstDenoiseStage(job), first.FirstDecodeStage(job)]
        if is_conditioned(plan.settings):
            found.append(stages.ConditioningStage(job))
        return [*found, stages.DenoiseStage(job), stages.DecodeStage(job)]


OPEN_SORA_2 = OpenSora2Family()
