"""Where one part of a model is read from, for the families that put models together from parts.

Which parts there are and where each lies is the family's. Read next: a family's `checkpoint.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyframe.checkpoints.find import PartLocation
from everyframe.checkpoints.folder import read_json


@dataclass(frozen=True)
class Source:
    """Where one part of a model is read from: a place on this disk, or a hub repository.

    `path` is None until the part is fetched. `where` is for people and for records.
    """

    where: str
    path: Path | None
    part: PartLocation | None = None

    def missing(self) -> tuple[str, ...]:
        """What must be fetched, a line each."""
        return () if self.part is None else self.part.to_fetch()

    def config(self, name: str = "config.json") -> dict[str, Any] | None:
        """The JSON file of that name beside the weights, None if it is not there."""
        if self.path is None:
            return None
        folder = self.path if self.path.is_dir() else self.path.parent
        return read_json(folder / name) if (folder / name).is_file() else None
