"""Where one part of a model is read from, for the families that put models together from parts.

Which parts there are and where each lies is the family's. Read next: a family's `checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from everyframe.checkpoints.fetch import fetch_parts
from everyframe.checkpoints.find import PartLocation
from everyframe.checkpoints.folder import read_json
from everyframe.checkpoints.part import Part

_Key = TypeVar("_Key")


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


def missing(sources: Iterable[Source]) -> tuple[str, ...]:
    """What must be fetched of these parts, a line each."""
    return tuple(line for source in sources for line in source.missing())


def fetched(
    sources: Mapping[_Key, Source], of_part: Callable[[Part], Source]
) -> dict[_Key, Source]:
    """The same parts with all files on this disk; ``of_part(part)`` is the source of one there."""
    places = {place.part.part: place.part for place in sources.values() if place.part is not None}
    # All at once, so that somebody without a network is told of all that is missing.
    found = {place.part: of_part(place.part) for place in fetch_parts([*places.values()])}
    return {
        name: source if source.part is None else found[source.part.part]
        for name, source in sources.items()
    }
