"""Find the files of a Stable Video Diffusion checkpoint: a folder or a single file, local or hub.

In diffusers' folder layout ``model_index.json`` names the pipeline; ``unet``, ``vae`` and
``image_encoder`` hold a config and weights, ``scheduler`` and ``feature_extractor`` a config each.
A single file holds all weights (`single_file.py`). No weights are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everyframe.checkpoints.download import fetch_missing
from everyframe.checkpoints.folder import read_json
from everyframe.checkpoints.locate import Location
from everyframe.checkpoints.refuse_pickles import refuse_pickled
from everyframe.core.errors import CheckpointError, InputError
from everyframe.families.svd import single_file
from everyframe.families.svd.config import IMAGE_VAE, RELEASED

if TYPE_CHECKING:
    from everyframe.checkpoints.key_map import KeyMap
    from everyframe.checkpoints.tensor_file import TensorFile

PIPELINE = "StableVideoDiffusionPipeline"
#: Components with weights, in execution order.
WEIGHTS = ("image_encoder", "vae", "unet")

_CONFIGS = {
    "unet": "config.json",
    "vae": "config.json",
    "image_encoder": "config.json",
    "scheduler": "scheduler_config.json",
    "feature_extractor": "preprocessor_config.json",
}
#: Training frames of the released models, for plans made before download.
_RELEASED_FRAMES = {
    "svd": 14,
    "svd-xt": 25,
    "svd-xt-1.1": 25,
    "svd-image-decoder": 14,
    "svd-xt-image-decoder": 25,
}


@dataclass(frozen=True)
class SVDFiles:
    """Files of one Stable Video Diffusion model.

    Attributes:
        where: name for people and records.
        path: a folder or one file; None until it is downloaded.
        location: what the model's name resolved to.
        variant: stored precision of the weights that was requested.
    """

    where: str
    path: Path | None
    location: Location
    variant: str | None = None

    @property
    def known(self) -> str | None:
        """Short name of a released model, or None."""
        return self.location.known.name if self.location.known else None

    @property
    def is_single(self) -> bool:
        """Whether all weights are in one file, without configs."""
        return self.path is not None and self.path.is_file()

    @property
    def stands_in(self) -> str | None:
        """Variant used because only it is on this disk and none was requested; else None."""
        found = next((place.part.variant for place in self.location.parts), None)
        return found if self.variant is None else None

    @property
    def assumed_frames(self) -> int | None:
        """Assumed training frames, where only the file's name indicates them; else None."""
        if self.known is not None or not self.is_single or self.path is None:
            return None
        return single_file.frames_by_name(self.path.stem)

    def missing(self) -> tuple[str, ...]:
        """Downloads still needed, one line each."""
        return tuple(line for place in self.location.parts for line in place.to_fetch())

    def fetched(self) -> SVDFiles:
        """Download missing files; return a copy with all files on disk."""
        location = fetch_missing(self.location)
        return replace(self, path=_path_of_parts(location), location=location)

    def configs(self) -> Mapping[str, Mapping[str, Any]]:
        """Config of each component by its folder; the released configs before download."""
        if self.path is None:
            return _released(self.known or "svd")
        if not self.path.is_file():
            return {name: read_json(self.path / name / file) for name, file in _CONFIGS.items()}
        configs = single_file.read_configs(self.path)
        if self.known is None:
            return configs
        frames = _RELEASED_FRAMES[self.known]
        return {**configs, "unet": {**configs["unet"], "num_frames": frames}}

    def weights(self, component: str) -> tuple[TensorFile, KeyMap]:
        """Files of a component's weights, and their key map."""
        from everyframe.checkpoints.reshape import rearranged
        from everyframe.checkpoints.tensor_file import open_checkpoint
        from everyframe.families.svd import weights

        assert self.path is not None, "asked before it was fetched"
        if not self.path.is_file():
            variant = self.variant or self.stands_in
            opened = open_checkpoint(self.path / component, variant=variant)
            return opened, weights.FOLDER_KEYS[component]
        keys = weights.single_file_keys(self.configs())[component]
        return rearranged(open_checkpoint(self.path), weights.SINGLE_FILE_CUTS), keys


def find_files(location: Location, variant: str | None = None) -> SVDFiles | None:
    """Find the files of a Stable Video Diffusion at `location`; None if it is another model.

    `variant` is one of several stored precisions; `location` was resolved for it.

    Raises:
        CheckpointError: ``model_index.json`` is not a JSON object, a file is broken, or the folder
            has no weights in that variant.
        InputError: a variant of a single file, which has none.
    """
    found = _find(location)
    if found is not None and variant is not None:
        _check_variant(found, variant)
    return found and replace(found, variant=variant)


def _check_variant(files: SVDFiles, variant: str) -> None:
    if files.is_single:
        raise InputError(f"variant has no effect on {files.where}: it is one file; leave it out")
    folder = files.location.path
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
        where = location.parts[0].part.repo_id
        return SVDFiles(where, _path_of_parts(location), location)
    if location.path is not None:
        return _at(location.path.name or location.asked, location.path, location)
    folder = _path_of_parts(location)
    return None if folder is None else _at(location.asked, folder, location)


def _path_of_parts(location: Location) -> Path | None:
    """The folder, or the file if the model is a single file."""
    if not location.complete:
        return None
    place = location.parts[0]
    if len(location.parts) == 1 and len(place.files) == 1:
        return place.files[0]
    return place.folder


def _at(where: str, path: Path, location: Location) -> SVDFiles | None:
    if path.is_file():
        single_file.refuse_pickled(path)
        return SVDFiles(where, path, location) if single_file.is_single_file(path) else None
    index = path / "model_index.json"
    if index.is_file():
        if read_json(index).get("_class_name") != PIPELINE:
            return None
        for name in WEIGHTS:
            refuse_pickled(str(path), name, path / name)
        return SVDFiles(where, path, location)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1 and single_file.is_single_file(files[0]):
        return SVDFiles(where, files[0], location)
    return None


def _released(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Configs of a released model that is not downloaded yet."""
    configs = {**RELEASED, "unet": {**RELEASED["unet"], "num_frames": _RELEASED_FRAMES[name]}}
    if name.endswith("image-decoder"):
        up = {"up_block_types": ["UpDecoderBlock2D"] * 4}
        configs["vae"] = {**RELEASED["vae"], **up, "_class_name": IMAGE_VAE}
    return configs
