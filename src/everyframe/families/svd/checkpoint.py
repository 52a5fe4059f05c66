"""Find the files of a Stable Video Diffusion checkpoint: a folder or a single file, local or hub.

In diffusers' folder layout ``model_index.json`` names the pipeline; ``unet``, ``vae`` and
``image_encoder`` hold a config and weights, ``scheduler`` and ``feature_extractor`` a config each.
A single file holds all weights (`single_file.py`). No weights are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from everyframe.checkpoints.folder import read_json
from everyframe.checkpoints.locate import Location, PartLocation
from everyframe.checkpoints.refuse_pickles import refuse_pickled
from everyframe.core.errors import CheckpointError, InputError
from everyframe.families.svd import single_file
from everyframe.families.svd.config import IMAGE_VAE, released
from everyframe.runtime.components.component_files import (
    CheckpointFiles,
    ComponentFiles,
    ComponentSource,
)

if TYPE_CHECKING:
    from everyframe.checkpoints.key_map import KeyMap
    from everyframe.checkpoints.tensor_file import TensorFile

PIPELINE = "StableVideoDiffusionPipeline"
#: Components with weights, in execution order.
WEIGHTS = ("image_encoder", "vae", "unet")
#: Training frames of the released models, for plans made before download.
_RELEASED_FRAMES = {
    "svd": 14, "svd-image-decoder": 14,
    "svd-xt": 25, "svd-xt-1.1": 25, "svd-xt-image-decoder": 25,
}  # fmt: skip


@dataclass(frozen=True)
class SVDFiles(CheckpointFiles):
    """Files of one Stable Video Diffusion model.

    Attributes:
        where: name for people and records.
        known: short name of a released model, or None.
        variant: stored precision of the weights that was requested.
        stands_in: variant used because only it is on this disk and none was requested, or None.
    """

    where: str
    known: str | None = None
    variant: str | None = None
    stands_in: str | None = None

    table: ClassVar = {
        "unet": ComponentFiles("unet", part="denoiser"),
        "vae": ComponentFiles("vae", part="vae"),
        "image_encoder": ComponentFiles("image_encoder", part="image_encoder"),
        "scheduler": ComponentFiles("scheduler", "scheduler_config.json", part="denoiser"),
        "feature_extractor": ComponentFiles(
            "feature_extractor", "preprocessor_config.json", part="image_encoder"
        ),
    }

    @classmethod
    def source_at(cls, component: str, place: PartLocation) -> ComponentSource:
        """Source in a hub repository; a model of one part is a single file."""
        source = super().source_at(component, place)
        is_single = place.is_complete and place.part.role == "model"
        return replace(source, path=place.files[0]) if is_single else source

    @property
    def is_single(self) -> bool:
        """Whether all weights are in one file, without configs."""
        return self.has() and self.path("unet").is_file()

    @property
    def assumed_frames(self) -> int | None:
        """Assumed training frames, where only the file's name indicates them; else None."""
        if self.known is not None or not self.is_single:
            return None
        return single_file.frames_by_name(self.path("unet").stem)

    def configs(self) -> Mapping[str, Mapping[str, Any]]:
        """Config of each component by its folder; the released configs before download."""
        if not self.has():
            return _released_configs(self.known or "svd")
        if not self.is_single:
            return {name: self.config(name) for name in self.table}
        configs = single_file.read_configs(self.path("unet"))
        if self.known is None:
            return configs
        frames = _RELEASED_FRAMES[self.known]
        return {**configs, "unet": {**configs["unet"], "num_frames": frames}}

    def weights(self, component: str) -> tuple[TensorFile, KeyMap]:
        """Files of a component's weights, and their key map."""
        from everyframe.checkpoints.reshape import rearranged
        from everyframe.checkpoints.tensor_file import open_checkpoint
        from everyframe.families.svd import weights

        path = self.weights_path(component)
        if not self.is_single:
            opened = open_checkpoint(path, variant=self.variant or self.stands_in)
            return opened, weights.FOLDER_KEYS[component]
        keys = weights.single_file_keys(self.configs())[component]
        return rearranged(open_checkpoint(path), weights.SINGLE_FILE_CUTS), keys


def find_files(location: Location, variant: str | None = None) -> SVDFiles | None:
    """Find the files of a Stable Video Diffusion at `location`; None if it is another model.

    `variant` is one of several stored precisions; `location` was resolved for it.

    Raises:
        CheckpointError: ``model_index.json`` is not a JSON object, a file is broken, or the folder
            has no weights in that variant.
        InputError: a variant of a single file, which has none.
    """
    found = _find(location)
    if found is None:
        return None
    if variant is not None:
        _check_variant(found, variant, location.path)
        return replace(found, variant=variant)
    stored = next((place.part.variant for place in location.parts), None)
    return replace(found, stands_in=stored)


def _check_variant(files: SVDFiles, variant: str, folder: Path | None) -> None:
    if files.is_single:
        raise InputError(f"variant has no effect on {files.where}: it is one file; leave it out")
    if folder is not None:
        lacking = [each for each in WEIGHTS if not [*(folder / each).glob(f"*.{variant}.*")]]
        if lacking:
            raise CheckpointError(
                f"{files.where} has no weights in the variant {variant!r}: no *.{variant}.* in its "
                f"{', '.join(lacking)}; leave variant out"
            )


def _find(location: Location) -> SVDFiles | None:
    if location.known is not None:
        if location.known.family != "svd":
            return None
        places = {place.part.role: place for place in location.parts}
        sources = {
            name: SVDFiles.source_at(name, places.get(entry.part) or places["model"])
            for name, entry in SVDFiles.table.items()
        }
        return SVDFiles(sources, location.parts[0].part.repo_id, location.known.name)
    if location.path is not None:
        return _at(location.path.name or location.asked, location.path)
    place = location.parts[0]
    if place.folder is None or not place.is_complete:
        return None
    return _at(location.asked, place.files[0] if len(place.files) == 1 else place.folder)


def _at(where: str, path: Path) -> SVDFiles | None:
    if path.is_file():
        single_file.refuse_pickled(path)
        return _in_one_file(where, path) if single_file.is_single_file(path) else None
    index = path / "model_index.json"
    if index.is_file():
        if read_json(index).get("_class_name") != PIPELINE:
            return None
        for name in WEIGHTS:
            refuse_pickled(str(path), name, path / name)
        sources = {name: SVDFiles.source_in(name, where, path) for name in SVDFiles.table}
        return SVDFiles(sources, where)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1 and single_file.is_single_file(files[0]):
        return _in_one_file(where, files[0])
    return None


def _in_one_file(where: str, file: Path) -> SVDFiles:
    sources = {name: ComponentSource(f"{where}/{name}", file) for name in SVDFiles.table}
    return SVDFiles(sources, where)


def _released_configs(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Configs of a released model that is not downloaded yet."""
    configs = {**released(), "unet": {**released()["unet"], "num_frames": _RELEASED_FRAMES[name]}}
    if name.endswith("image-decoder"):
        up = {"up_block_types": ["UpDecoderBlock2D"] * 4}
        configs["vae"] = {**released()["vae"], **up, "_class_name": IMAGE_VAE}
    return configs
