"""Where the parts of a Stable Video Diffusion lie: a diffusers folder, here or on the hub.

``model_index.json`` names the pipeline; ``unet``, ``vae`` and ``image_encoder`` hold a config and
weights, ``scheduler`` and ``feature_extractor`` a config each. Weights are not read here.
Read next: `config.py`, `family.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from everyframe.checkpoints.fetch import fetch
from everyframe.checkpoints.find import Location, PartLocation, find_part
from everyframe.checkpoints.folder import read_json
from everyframe.families.svd.config import RELEASED

PIPELINE = "StableVideoDiffusionPipeline"
#: The components that have weights, in the order in which they run.
WEIGHTS = ("image_encoder", "vae", "unet")

_CONFIGS = {
    "unet": "config.json",
    "vae": "config.json",
    "image_encoder": "config.json",
    "scheduler": "scheduler_config.json",
    "feature_extractor": "preprocessor_config.json",
}
#: The frames that the released models were trained on, for plans made before they are fetched.
_RELEASED_FRAMES = {"svd": 14, "svd-xt": 25, "svd-xt-1.1": 25}


@dataclass(frozen=True)
class Files:
    """A model's place: `folder` is None until it is fetched. `where` is for people and records."""

    where: str
    folder: Path | None
    parts: tuple[PartLocation, ...] = ()
    known: str | None = None

    def missing(self) -> tuple[str, ...]:
        """What must be fetched, a line each."""
        return tuple(_line(place) for place in self.parts if not place.complete)

    def fetched(self) -> Files:
        """The same with all files on this disk."""
        folder, parts = self.folder, []
        for place in self.parts:
            if not place.complete:
                folder = fetch(place.part.repo_id, place.part.patterns)
            parts.append(find_part(place.part))
        return replace(self, folder=folder, parts=tuple(parts))

    def configs(self) -> Mapping[str, Mapping[str, Any]]:
        """The config of each part by its folder; the released ones before they are fetched."""
        folder = self.folder
        if folder is None:
            frames = _RELEASED_FRAMES[self.known or "svd"]
            return {**RELEASED, "unet": {**RELEASED["unet"], "num_frames": frames}}
        return {name: read_json(folder / name / file) for name, file in _CONFIGS.items()}

    def weights(self, component: str) -> Path:
        """The folder of a component's weights."""
        assert self.folder is not None, "asked before it was fetched"
        return self.folder / component


def find_files(location: Location) -> Files | None:
    """The files of a Stable Video Diffusion at that place; None if it is something else.

    Raises:
        CheckpointError: a ``model_index.json`` that is no JSON object.
    """
    if location.known is not None:
        if location.known.family != "svd":
            return None
        complete = all(place.complete for place in location.parts)
        folder = location.parts[0].folder if complete else None
        where = location.parts[0].part.repo_id
        return Files(where, folder, location.parts, location.known.name)
    if location.path is not None:
        return _in_folder(location.path.name or location.asked, location.path)
    place = location.parts[0]
    if place.folder is None or not place.complete:
        return None
    return _in_folder(location.asked, place.folder)


def _in_folder(where: str, folder: Path) -> Files | None:
    index = folder / "model_index.json"
    if not index.is_file() or read_json(index).get("_class_name") != PIPELINE:
        return None
    return Files(where, folder)


def _line(place: PartLocation) -> str:
    size = place.bytes_to_fetch
    about = f", about {size / 1e9:.1f} GB" if size else ""
    return f"{place.part.repo_id}: {', '.join(place.missing)}{about}"
