"""Redistribute tokens across ranks by all-to-all: from columns (places) to rows (frames) and back.

Each direction is one uneven all-to-all. A rank sends only tokens that are in other ranks' rows:
N (P - 1) / P^2 tokens, with equal shares of N tokens over P ranks. Heads are not split, and nothing
is padded or computed, so the tokens equal those of one device bit for bit. Idea: DSP (arXiv
2403.10266), which pads. The partition is in `token_partition`.

Shapes: (B, T, S, C) of the whole batch, or of the `samples` that a rank has tokens of. A rank's
columns are (b, T, s, C): some samples b with the same places s of each, or b = 1 and s columns of
several samples concatenated (see `TokenPartition.segments`). A rank's rows are (1, r, S, C): whole
frames of any samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from everyframe.parallel.communicator import Communicator
from everyframe.parallel.token_partition import SampleSegment, TokenPartition, cut


class Redistribute:
    """Redistribute tensors of one grid on one rank; the indices are computed once."""

    def __init__(self, partition: TokenPartition, group: Communicator) -> None:
        assert partition.num_ranks == group.size
        self.partition, self.group = partition, group
        self.samples = partition.samples(group.rank)
        self.segments: tuple[SampleSegment, ...] = partition.segments(group.rank)
        self._on_device: dict[tuple[str, str], Tensor] = {}
        grid = partition.grid
        if group.size == 1:  # all stays where it is, and of a large video numbers take gigabytes
            self._shape: tuple[int, ...] = (grid.samples, grid.frames, grid.places)
            self._send_order = self._arrive_order = None
            self._sizes = [[grid.num_tokens]]
            return
        self._tokens = torch.arange(grid.num_tokens).view(grid.samples, grid.frames, grid.places)
        mine = self.take(self._tokens[self.samples][..., None])
        self._shape = tuple(mine.shape[:3])
        self._send_order = _order(mine.flatten())
        self._sizes = _sizes(partition)
        self._arrive_order = _order(self._holders(self._row_tokens(group.rank)))

    def take(self, x_BTSC: Tensor) -> Tensor:
        """This rank's columns (b, T, s, C) of the tokens of its samples."""
        parts = [x_BTSC[each.samples, :, each.places] for each in self.segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def to_rows(self, x_bTsC: Tensor) -> Tensor:
        """Columns (b, T, s, C) to this rank's rows (1, r, S, C)."""
        flat = self._to_order(x_bTsC.flatten(0, 2), "send", self._send_order)
        came = self.group.all_to_all(flat, self._sizes, "frames are gathered")
        rows = self._from_order(came, "arrive", self._arrive_order)
        return rows.view(1, -1, self.partition.grid.places, x_bTsC.shape[-1])

    def to_columns(self, x_1rSC: Tensor) -> Tensor:
        """Rows (1, r, S, C) to this rank's columns (b, T, s, C)."""
        flat = self._to_order(x_1rSC.flatten(0, 2), "arrive", self._arrive_order)
        back = [list(column) for column in zip(*self._sizes, strict=True)]
        came = self.group.all_to_all(flat, back, "frames are given back")
        return self._from_order(came, "send", self._send_order).view(*self._shape, x_1rSC.shape[-1])

    def gather(self, x_bTsC: Tensor) -> Tensor:
        """The whole (B, T, S, C) on every rank."""
        if self.group.size == 1:
            return x_bTsC
        grid = self.partition.grid
        sizes = [len(columns) * grid.frames for columns in self.partition.columns]
        # In numeric order, a rank's columns come sample by sample.
        flat = self._to_order(x_bTsC.flatten(0, 2), "send", self._send_order)
        came = self.group.gather(flat, sizes, "the last projection is gathered")
        tokens = [self._column_tokens(rank) for rank in range(self.group.size)]
        whole = self._from_order(came, "gather", torch.cat(tokens))
        return whole.view(grid.samples, grid.frames, grid.places, -1)

    def _row_tokens(self, rank: int) -> Tensor:
        """Indices of the tokens in a rank's rows, in order."""
        rows, places = self.partition.rows[rank], self.partition.grid.places
        return torch.arange(rows.start * places, rows.stop * places)

    def _column_tokens(self, rank: int) -> Tensor:
        """Indices of the tokens in a rank's columns, in order."""
        columns = self._columns_of(self._tokens)
        mine = self.partition.columns[rank]
        return self._tokens[(columns >= mine.start) & (columns < mine.stop)]

    def _columns_of(self, tokens: Tensor) -> Tensor:
        grid = self.partition.grid
        samples = tokens.div(grid.frames * grid.places, rounding_mode="floor")
        return samples * grid.places + tokens % grid.places

    def _holders(self, tokens: Tensor) -> Tensor:
        """The rank whose columns contain each token."""
        ends = torch.tensor([columns.stop for columns in self.partition.columns])
        return torch.searchsorted(ends, self._columns_of(tokens), right=True)

    def _to_order(self, flat_NC: Tensor, name: str, order: Tensor | None) -> Tensor:
        if order is None:
            return flat_NC
        return flat_NC.index_select(0, self._here(name, order, flat_NC))

    def _from_order(self, flat_NC: Tensor, name: str, order: Tensor | None) -> Tensor:
        """Inverse of `_to_order`."""
        if order is None:
            return flat_NC
        return torch.empty_like(flat_NC).index_copy_(0, self._here(name, order, flat_NC), flat_NC)

    def _here(self, name: str, order: Tensor, beside: Tensor) -> Tensor:
        """`order` on the device of `beside`, copied once."""
        key = (name, str(beside.device))
        if key not in self._on_device:
            self._on_device[key] = order.to(beside.device)
        return self._on_device[key]


def _sizes(partition: TokenPartition) -> list[list[int]]:
    """Number of tokens that each rank sends to each other: where its columns cross their rows."""
    grid = partition.grid
    columns, rows = (
        [{sample: stop - start for sample, start, stop in cut(each, length)} for each in spans]
        for spans, length in ((partition.columns, grid.places), (partition.rows, grid.frames))
    )
    return [
        [sum(number * theirs.get(sample, 0) for sample, number in mine.items()) for theirs in rows]
        for mine in columns
    ]


def _order(keys: Tensor) -> Tensor | None:
    """Stable argsort of `keys`; None if they are sorted already."""
    if bool((keys[1:] >= keys[:-1]).all()):
        return None
    return torch.argsort(keys, stable=True)
