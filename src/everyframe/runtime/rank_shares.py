"""Compute each rank's share of a video that is split by tokens, or by batches of frames.

No torch: the planner uses it. See `everyframe.parallel.token_partition` for the partition.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from everyframe.core.parallel_plan import ParallelPlan
from everyframe.core.plan import Settings
from everyframe.parallel.cfg_groups import CfgGroups
from everyframe.parallel.head_partition import HeadPartition, sent_vectors
from everyframe.parallel.token_partition import TokenPartition
from everyframe.parallel.uneven_split import assign_pieces
from everyframe.runtime.interface import ModelSpec, RankShare, ShardableSpec

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext


def key_of_rank(parallel: ParallelContext | None) -> tuple[Hashable, ...]:
    """Key of a rank's work in a dry run: ranks with equal keys do the same. Empty for one rank."""
    if parallel is None:
        return ()
    return (
        parallel.video_group.rank,
        parallel.video_group.weights,
        parallel.num_cfg_groups,
        parallel.sequence_backend,
    )


def decode_share(num_pieces: int, parallel: ParallelContext | None) -> float:
    """Fraction (0..1) of a video's pieces that its busiest rank decodes; 1 for one rank."""
    if parallel is None:
        return 1.0
    owners = assign_pieces(num_pieces, parallel.video_group.weights)
    return max(map(owners.count, owners)) / num_pieces


def grid_share(
    partition: TokenPartition, rank: int, sent_bytes: int, in_rows: str = "attention in space"
) -> RankShare:
    """Share of a rank that holds columns, and computes on rows in the layers named by `in_rows`."""
    grid = partition.grid
    columns, rows = len(partition.columns[rank]), len(partition.rows[rank])
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


def attention_share(
    partition: TokenPartition, backend: str, rank: int, vector_bytes: int, token_bytes: int
) -> RankShare:
    """Share of a rank in a denoiser whose tokens all attend to each other.

    See `model_sharding.FullAttentionSharding`: one-head vectors are exchanged, of `vector_bytes`
    over all layers, and the result of the last projection, `token_bytes` each, is gathered.
    """
    tokens = len(partition.columns[rank])
    held = tokens / (partition.grid.samples * partition.grid.places)
    heads = HeadPartition(partition)
    attention = held if backend == "ring" else heads.share(rank)
    vectors = sent_vectors(partition, rank) if backend == "ring" else heads.num_sent(rank)
    sent = vectors * vector_bytes + tokens * token_bytes * (partition.num_ranks - 1)
    idle = "" if tokens else "there are fewer tokens than devices; it decodes only"
    if attention and not tokens:
        idle = "there are fewer tokens than devices: it works in attention and decoding alone"
    return RankShare(held, attention, sent, idle)


def branch_groups(
    model: ModelSpec, settings: Settings, division: ParallelPlan, ranks: Sequence[int]
) -> CfgGroups | None:
    """CFG groups of these ranks of one video, if each group calls the denoiser independently.

    None if all ranks call it together.
    """
    if (
        division.cfg_degree == 1
        or not isinstance(model, ShardableSpec)
        or not model.has_independent_branches
    ):
        return None
    weights = [division.speeds[rank] for rank in ranks]
    return CfgGroups.of(weights, model.num_branches(settings), division.cfg_degree)


def active_ranks(weights: Sequence[float]) -> tuple[int, ...]:
    """Ranks with one batch per round: all whose share is not 0."""
    return tuple(rank for rank, weight in enumerate(weights) if weight)


def batch_owner(number: int, weights: Sequence[float]) -> int:
    """The rank that has that batch; batches are assigned round-robin."""
    ranks = active_ranks(weights)
    return ranks[number % len(ranks)]


def batch_share(
    count: int, weights: Sequence[float], rank: int, sent_bytes: int, how: str
) -> RankShare:
    """Share of a rank that has some of `count` batches and sends `sent_bytes` a step.

    `how` tells the user how to get more batches.
    """
    mine = sum(batch_owner(number, weights) == rank for number in range(count))
    idle = "" if mine else f"there are fewer batches of frames than devices; {how}"
    return RankShare(mine / count, mine / count, sent_bytes if mine else 0, idle)
