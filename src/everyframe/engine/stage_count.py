"""Count the seconds of stages towards the trials of their kernels."""

from __future__ import annotations

from contextlib import closing

from everyframe.core.events import Events, StageDone
from everyframe.engine.distributed import RankContext
from everyframe.planning.component_certificates import count_stage
from everyframe.planning.resolve import PreparedPlan
from everyframe.runtime.batch_member import MEMBER


def with_counted_stages(events: Events, prepared: PreparedPlan, here: RankContext) -> Events:
    """The events of a run of that plan; the first rank counts each stage as it ends."""
    plan = prepared.plan
    # Runs of a batch share their seconds.
    number = 1 if plan.batch is None or MEMBER.get() is None else plan.batch.num_videos
    with closing(events):
        for event in events:
            if isinstance(event, StageDone) and here.teams.world.rank == 0:
                count_stage(
                    prepared.chooser.certificates, plan.components, prepared.fitted.runs,
                    event.stage, event.seconds / number,
                )  # fmt: skip
            yield event
