"""A rank's part of a video whose tokens are dealt out by places and by frames, as plans tell it.

No torch: plans are made without it. Read next: `everyframe.parallel.grid`, `sharded`.
"""

from __future__ import annotations

from everyframe.families.family import RankPart
from everyframe.parallel.grid import Deal


def dealt_part(
    deal: Deal, rank: int, sent_bytes: int, in_rows: str = "attention in space"
) -> RankPart:
    """The part of a rank that holds columns, and works on rows where that is needed: `in_rows`."""
    grid = deal.grid
    columns, rows = len(deal.columns[rank]), len(deal.rows[rank])
    idle = ""
    if not columns:
        idle = "there are fewer places in a frame than devices; it decodes only"
    elif not rows:
        idle = f"there are fewer frames than devices: it waits during {in_rows}"
    return RankPart(
        columns / (grid.samples * grid.places),
        rows / (grid.samples * grid.frames),
        sent_bytes,
        idle,
    )
