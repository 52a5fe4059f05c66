"""Find the files of an inpainting model: a diffusers folder and its ControlNets.

``model_index.json`` names the pipeline; ``unet``, ``vae`` and ``text_encoder`` hold a config and
weights, ``scheduler`` and ``tokenizer`` their own files. A ControlNet is in ``controlnet`` (several
in ``controlnet_1``, …), in a separate folder, or on the hub. No weights are read here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from everyframe.checkpoints.folder import describe_missing, listing, read_json
from everyframe.checkpoints.key_map import OLD_VAE_ATTENTION, KeyMap
from everyframe.checkpoints.locate import Location
from everyframe.checkpoints.model_zoo import controlnet_part, controlnets
from everyframe.checkpoints.refuse_pickles import refuse_pickled
from everyframe.core.errors import CheckpointError, InputError, did_you_mean
from everyframe.core.paths import expand_path, split_paths
from everyframe.families.clip_encoder import text_model_keys
from everyframe.families.inpaint.components import controlnet_name
from everyframe.families.inpaint.config import INPAINTING_CHANNELS, PLAIN_CHANNELS, released
from everyframe.runtime.components.component_files import (
    CheckpointFiles,
    ComponentFiles,
    ComponentSource,
)

#: Pipelines with the components of ControlNet inpainting, with or without the ControlNet.
PIPELINES = (
    "StableDiffusionControlNetInpaintPipeline",
    "StableDiffusionInpaintPipeline",
    "StableDiffusionControlNetPipeline",
    "StableDiffusionControlNetImg2ImgPipeline",
    "StableDiffusionPipeline",
    "StableDiffusionImg2ImgPipeline",
)
_RELEASED_CHANNELS = {"sd-1.5": PLAIN_CHANNELS, "sd-1.5-inpaint": INPAINTING_CHANNELS}


@dataclass(frozen=True)
class InpaintFiles(CheckpointFiles):
    """Files of one inpainting model: base components, then ControlNets."""

    where: str
    known: str | None = None
    pipeline: str = PIPELINES[0]
    has_safety_checker: bool = False

    table: ClassVar = {
        "unet": ComponentFiles("unet", part="denoiser"),
        "vae": ComponentFiles("vae", part="vae"),
        "text_encoder": ComponentFiles("text_encoder", part="text_encoder"),
        "scheduler": ComponentFiles("scheduler", "scheduler_config.json", part="denoiser"),
        "tokenizer": ComponentFiles("tokenizer", "", part="text_encoder"),
    }

    @classmethod
    def entry(cls, component: str) -> ComponentFiles:
        """A ControlNet is alone in its folder or repository."""
        if component.startswith("controlnet"):
            return ComponentFiles("", part="controlnet")
        return cls.table[component]

    def configs(self) -> Mapping[str, Mapping[str, Any]]:
        """Config of each base component; the released configs before download."""
        if not self.has(*self.table):
            return released(_RELEASED_CHANNELS[self.known or "sd-1.5"])
        return {name: self.config(name) for name, entry in self.table.items() if entry.config}

    @property
    def controlnets(self) -> tuple[str, ...]:
        """Component names of the ControlNets."""
        return tuple(name for name in self.sources if name not in self.table)

    def controlnet_configs(self) -> tuple[tuple[str, Mapping[str, Any] | None], ...]:
        """Source and config of each ControlNet; the config is None before download."""
        return tuple(
            (self.sources[net].where, self.config(net) if self.has(net) else None)
            for net in self.controlnets
        )

    def with_controlnets(self, nets: Iterable[ComponentSource]) -> InpaintFiles:
        """Copy with these ControlNets in place of its own."""
        base = {name: self.sources[name] for name in self.table}
        named = {controlnet_name(number): net for number, net in enumerate(nets)}
        return replace(self, sources={**base, **named})


def find_files(location: Location, controlnet: Any) -> InpaintFiles | None:
    """Find the files of an inpainting model at `location`; None if it is another model.

    `controlnet` is the option of that name; it replaces the model's own. Raises `InputError` for
    one that is not found, `CheckpointError` for a broken ``model_index.json``.
    """
    found = _base(location)
    if found is None or controlnet is None:
        return found
    asked = controlnet if isinstance(controlnet, (list, tuple)) else [controlnet]
    return found.with_controlnets(map(_controlnet, _split(asked)))


def _base(location: Location) -> InpaintFiles | None:
    if location.known is not None:
        if location.known.family != "inpaint":
            return None
        places = {place.part.role: place for place in location.parts}
        names = (*InpaintFiles.table, controlnet_name(0))
        sources = {
            name: InpaintFiles.source_at(name, places[InpaintFiles.entry(name).part])
            for name in names
        }
        return InpaintFiles(sources, places["denoiser"].part.repo_id, location.known.name)
    if location.path is not None:
        return _in_folder(location.path.name or location.asked, location.path)
    place = location.parts[0]
    if place.folder is None or not place.is_complete:
        return None
    return _in_folder(location.asked, place.folder)


def _in_folder(where: str, folder: Path) -> InpaintFiles | None:
    file = folder / "model_index.json"
    index = read_json(file) if file.is_file() else {}
    if index.get("_class_name") not in PIPELINES:
        return None
    # Several ControlNets of one pipeline are saved side by side, with numbers.
    names = ["controlnet", *(f"controlnet_{number}" for number in range(1, 100))]
    present = [name for name in names if (folder / name / "config.json").is_file()]
    nets = [ComponentSource(f"{where}/{name}", folder / name) for name in present]
    checker = index.get("safety_checker")
    judged = isinstance(checker, list) and any(part is not None for part in checker)
    pipeline = str(index["_class_name"])
    _check_parts(folder, pipeline)
    for name in ("unet", "vae", "text_encoder", *present):
        refuse_pickled(str(folder), name, folder / name)
    base = {name: InpaintFiles.source_in(name, where, folder) for name in InpaintFiles.table}
    found = InpaintFiles(base, where, pipeline=pipeline, has_safety_checker=judged)
    return found.with_controlnets(nets)


def _check_parts(folder: Path, pipeline: str) -> None:
    """Raise if a folder lacks components that its pipeline always has (a wrong label)."""
    configs = (f"{e.folder}/{e.config}" for e in InpaintFiles.table.values() if e.config)
    lacking = [config for config in configs if not (folder / config).is_file()]
    if not lacking:
        return
    makes = "an inpainting pipeline"
    if "Inpaint" not in pipeline:
        makes = (
            "a pipeline for single pictures and no video pipeline, which can be used here for "
            "inpainting alone, with a ControlNet"
        )
    raise CheckpointError(
        f"by its model_index.json {folder} is a {pipeline}, {makes}, but it holds no "
        f"{listing(lacking)}; if it was downloaded in part, fetch the rest; if it is another "
        "pipeline, correct _class_name; models that can be used: everyframe models"
    )


def _split(asked: Sequence[Any]) -> list[str]:
    """Split ControlNet names at commas, unless a folder has that whole name."""
    names: list[str] = []
    for each in asked:
        if not isinstance(each, (str, os.PathLike)):
            raise InputError(
                f"controlnet must be a folder, a hub id or a short name, got {type(each).__name__}"
            )
        names += split_paths(os.fspath(each))
    return [name.strip() for name in names]


def _controlnet(name: str) -> ComponentSource:
    """Source of a ControlNet by short name, folder or hub id."""
    path = expand_path(name)
    repo_id = controlnets().get(name.casefold())
    if repo_id is None and path.exists():
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"{name} is no ControlNet as diffusers saves it: "
                f"{describe_missing(path, ['config.json'])}"
            )
        refuse_pickled(name, "ControlNet", path, "ControlNetModel")
        return ComponentSource(path.resolve().name, path)
    if repo_id is None and name.count("/") != 1:
        raise InputError(
            f"controlnet must be a folder, a hub id OWNER/NAME, or one of "
            f"{', '.join(controlnets())}, got {name!r}{did_you_mean(name, controlnets())}"
        )
    return InpaintFiles.on_hub(controlnet_part(repo_id or name))


VAE_KEYS = KeyMap(rename=OLD_VAE_ATTENTION)


def keys_of(component: str, text_names: Iterable[str]) -> KeyMap:
    """Key map from a component's checkpoint names to module names.

    `text_names` are the parameter names of the text encoder as built here.
    """
    if component == "text_encoder":
        return text_model_keys(text_names)
    return VAE_KEYS if component == "vae" else KeyMap()
