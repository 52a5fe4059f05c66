"""Files of a checkpoint's components: a table per family, read by one class.

A family's `checkpoint.py` declares where each component is (`ComponentFiles`) and finds the
sources; this module does the rest. No weights are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from everyframe.checkpoints.download import fetch_parts
from everyframe.checkpoints.folder import read_json
from everyframe.checkpoints.locate import PartLocation, find_part
from everyframe.checkpoints.model_zoo import HubPart


@dataclass(frozen=True)
class ComponentFiles:
    """Where a component is in a checkpoint of its family.

    Attributes:
        folder: its folder in the checkpoint; empty for the checkpoint's own.
        config: its config file in that folder.
        part: role of the hub part that holds it.
        weights: file or folder in its folder that holds the weights; empty for the folder itself.
    """

    folder: str
    config: str = "config.json"
    part: str = ""
    weights: str = ""


@dataclass(frozen=True)
class ComponentSource:
    """Source of one component: a path on this disk or a hub repository.

    `path` is None until it is downloaded. `where` is its name in messages and records.
    """

    where: str
    path: Path | None
    place: PartLocation | None = None

    def config(self, name: str = "config.json") -> dict[str, Any] | None:
        """The parsed JSON file beside the weights, or None if there is none."""
        if self.path is None:
            return None
        folder = self.path if self.path.is_dir() else self.path.parent
        return read_json(folder / name) if (folder / name).is_file() else None


_Files = TypeVar("_Files", bound="CheckpointFiles")


@dataclass(frozen=True)
class CheckpointFiles:
    """Files of one checkpoint: the source of each component, in the order of the table."""

    table: ClassVar[Mapping[str, ComponentFiles]] = {}
    sources: Mapping[str, ComponentSource]

    @classmethod
    def entry(cls, component: str) -> ComponentFiles:
        """The component's line in the table."""
        return cls.table[component]

    @classmethod
    def source_in(cls, component: str, where: str, folder: Path | None) -> ComponentSource:
        """Source of a component in a checkpoint's folder; None if that is not on this disk."""
        name = cls.entry(component).folder
        return ComponentSource(f"{where}/{name}" if name else where, folder and folder / name)

    @classmethod
    def source_at(cls, component: str, place: PartLocation) -> ComponentSource:
        """Source of a component of a hub repository, as far as it is on this disk."""
        folder = place.folder if place.is_complete else None
        return replace(cls.source_in(component, place.part.repo_id, folder), place=place)

    @classmethod
    def on_hub(cls, part: HubPart) -> ComponentSource:
        """Source of the component of a hub part, as far as it is on this disk."""
        return cls.source_at(part.role, find_part(part))

    @classmethod
    def of_parts(cls, places: Iterable[PartLocation]) -> dict[str, ComponentSource]:
        """Source of the component of each hub part, by its role."""
        return {place.part.role: cls.source_at(place.part.role, place) for place in places}

    def has(self, *components: str) -> bool:
        """Whether these components are on this disk; by default all."""
        return all(self.sources[name].path is not None for name in components or self.sources)

    def path(self, component: str) -> Path:
        """Folder or single file of a component, which must be on this disk."""
        path = self.sources[component].path
        assert path is not None, "asked before it was fetched"
        return path

    def weights_path(self, component: str) -> Path:
        """File or folder that holds a component's weights."""
        path, name = self.path(component), self.entry(component).weights
        return path / name if name and path.is_dir() else path

    def config(self, component: str) -> dict[str, Any]:
        """Parsed config of a component, which must be on this disk and have one."""
        return read_json(self.path(component) / self.entry(component).config)

    def missing(self) -> tuple[str, ...]:
        """Files to download first, one line each."""
        return tuple(line for place in self._places() for line in place.to_fetch())

    def fetch(self: _Files) -> _Files:
        """Copy with all files on this disk, downloaded if missing."""
        # All at once, so that without a network one error lists all missing files.
        found = dict(zip(self._places(), fetch_parts(self._places()), strict=True))
        return replace(
            self,
            sources={
                name: self.source_at(name, found[source.place]) if source.place else source
                for name, source in self.sources.items()
            },
        )

    def _places(self) -> list[PartLocation]:
        places = (source.place for source in self.sources.values())
        return list(dict.fromkeys(place for place in places if place is not None))
