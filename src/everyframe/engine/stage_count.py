"""Count the seconds of stages towards the trials of their kernels."""

from __future__ import annotations

from everyframe.core.events import Event, StageDone
from everyframe.engine.distributed import RankContext
from everyframe.planning.fast_paths.component_certificates import count_stage
from everyframe.planning.resolve import PreparedPlan
from everyframe.runtime.batch_member import MEMBER


def count_event(event: Event, prepared: PreparedPlan, here: RankContext) -> None:
    """Count a stage of a run of that plan as it ends, on the first rank alone."""
    if not isinstance(event, StageDone) or here.parallel.world.rank:
        return
    plan = prepared.plan
    # Runs of a batch share their seconds.
    number = 1 if plan.batch is None or MEMBER.get() is None else plan.batch.num_videos
    count_stage(
        prepared.chooser.certificates, plan.components, prepared.fitted.runs, event.stage,
        event.seconds / number,
    )  # fmt: skip
