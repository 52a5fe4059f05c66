"""A rank's part of a video that is dealt out by places and frames, or by batches of frames.

No torch: plans are made without it. Read next: `everyframe.parallel.token_partition`, `sharded`.
"""

from __future__ import annotations

from collections.abc import Sequence

from everyframe.core.parallel_plan import ParallelPlan
from everyframe.core.plan import Settings
from everyframe.parallel.cfg_groups import CfgGroups
from everyframe.parallel.token_partition import TokenPartition
from everyframe.runtime.interface import ModelSpec, RankShare, ShardableSpec


def grid_share(
    deal: TokenPartition, rank: int, sent_bytes: int, in_rows: str = "attention in space"
) -> RankShare:
    """The part of a rank that holds columns, and works on rows where that is needed: `in_rows`."""
    grid = deal.grid
    columns, rows = len(deal.columns[rank]), len(deal.rows[rank])
    idle = ""
    if not columns:
        idle = "there are fewer places in a frame than devices; it decodes only"
    elif not rows:
        idle = f"there are fewer frames than devices: it waits during {in_rows}"
    return RankShare(
        columns / (grid.samples * grid.places),
        rows / (grid.samples * grid.frames),
        sent_bytes,
        idle,
    )


def branch_groups(
    model: ModelSpec, settings: Settings, division: ParallelPlan, ranks: Sequence[int]
) -> CfgGroups | None:
    """Of these ranks, which make one video, those that call the denoiser apart from others, as they
    have other branches of guidance; None where all call it together.
    """
    if division.cfg == 1 or not isinstance(model, ShardableSpec) or not model.apart:
        return None
    weights = [division.weights[rank] for rank in ranks]
    return CfgGroups.of(weights, model.num_branches(settings), division.cfg)


def active_ranks(weights: Sequence[float]) -> tuple[int, ...]:
    """The ranks that have a batch in each round: all but those whose share is 0."""
    return tuple(rank for rank, weight in enumerate(weights) if weight)


def batch_owner(number: int, weights: Sequence[float]) -> int:
    """The rank that has that batch; they are dealt out round by round."""
    ranks = active_ranks(weights)
    return ranks[number % len(ranks)]


def batch_share(
    count: int, weights: Sequence[float], rank: int, sent_bytes: int, how: str
) -> RankShare:
    """The part of a rank that has some of so many batches; a batch sends so much a step.

    `how` there would be more of them.
    """
    mine = sum(batch_owner(number, weights) == rank for number in range(count))
    idle = "" if mine else f"there are fewer batches of frames than devices; {how}"
    return RankShare(mine / count, mine / count, sent_bytes if mine else 0, idle)
