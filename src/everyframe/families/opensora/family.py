"""The OpenSora family object: detect a checkpoint, build the stages of its run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from everyframe.checkpoints.locate import Location
from everyframe.core.options import FamilyOptions
from everyframe.core.plan import Plan
from everyframe.families.opensora.checkpoint import find_files
from everyframe.families.opensora.options import OpenSoraOptions
from everyframe.families.opensora.spec import OpenSoraSpec, read_spec
from everyframe.runtime.interface import ModelSpec, Stage

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext


class OpenSoraFamily:
    """Registry entry of the family."""

    name = "opensora"
    title = "Open-Sora 1.0 and 1.2"
    options: type[FamilyOptions] = OpenSoraOptions

    def recognise(self, location: Location, options: FamilyOptions) -> OpenSoraSpec | None:
        """Detect an Open-Sora checkpoint by its names and configs; None if it is not one."""
        assert isinstance(options, OpenSoraOptions)
        files = find_files(location, options)
        if files is None:
            return None
        title = location.known.title if location.known is not None else None
        return read_spec(location.name, files, options, title)

    def stages(
        self, spec: ModelSpec, plan: Plan, clip: int, teams: ParallelContext
    ) -> Sequence[Stage]:
        """Stages of one clip: text (once), conditioning frames if any, denoise, decode."""
        from everyframe.families.opensora.stages import (
            ConditioningStage,
            DecodeStage,
            DenoiseStage,
            OpenSoraContext,
            TextEncodeStage,
        )

        assert isinstance(spec, OpenSoraSpec)
        job = OpenSoraContext(spec, plan.settings, teams, clip, plan)
        stages: list[Stage] = [TextEncodeStage(job)] if clip == 0 else []
        given = plan.settings.given_frames
        if job.goes_on() or "image" in given or (
            "last_image" in given and clip == plan.settings.chain - 1
        ):  # fmt: skip
            stages.append(ConditioningStage(job))
        return [*stages, DenoiseStage(job), DecodeStage(job)]


OPEN_SORA = OpenSoraFamily()
