"""Find the files of an Open-Sora 2.0 checkpoint, and recognise its components by tensor names.

Upstream keeps everything in one folder: ``Open_Sora_v2.safetensors``, ``hunyuan_vae.safetensors``
(or the DC-AE's two files), ``google/t5-v1_1-xxl/``, ``openai/clip-vit-large-patch14/`` and, for a
first picture, ``flux1-dev.safetensors`` and ``flux1-dev-ae.safetensors``, all without configs. In a
local folder these files may have any name. No weights are read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from everyframe.checkpoints.folder import WEIGHT_SUFFIXES, describe_missing, read_json
from everyframe.checkpoints.key_map import KeyMap
from everyframe.checkpoints.locate import Location, PartLocation, find_part
from everyframe.checkpoints.model_zoo import HubPart, known_models, shared_part
from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.paths import expand_path
from everyframe.families.clip_encoder import text_model_keys
from everyframe.families.opensora2.first_picture_keys import FLUX_KEYS, FLUX_VAE_KEYS
from everyframe.families.opensora2.options import OpenSora2Options
from everyframe.families.opensora_parts import (
    DEEP_PART,
    FLUX_PART,
    FLUX_VAE_PART,
    HUNYUAN_PART,
    VIDEO_PART,
    part_of,
)
from everyframe.families.t5_tokenizer import T5_KEYS
from everyframe.runtime.components.component_files import (
    CheckpointFiles,
    ComponentFiles,
    ComponentSource,
)

DENOISER, DEEP_DENOISER = "Open_Sora_v2.safetensors", "Open_Sora_v2_Video_DC_AE.safetensors"
HUNYUAN_VAE, DEEP_VAE = "hunyuan_vae.safetensors", "F32T4C128_AE.safetensors"
T5, CLIP = "google/t5-v1_1-xxl", "openai/clip-vit-large-patch14"
FLUX, FLUX_VAE = "flux1-dev.safetensors", "flux1-dev-ae.safetensors"
#: Folders of a FLUX.1 in diffusers' layout, and the class in the denoiser's config.
_FLUX_FOLDERS = {"first_denoiser": "transformer", "first_vae": "vae"}
_FLUX_CLASS = "FluxTransformer2DModel"

#: What CLIP's file holds beside the text model.
_CLIP_IGNORED = (
    r"vision_model\..*", r"visual_projection\..*", r"text_projection\..*", r"logit_scale",
)  # fmt: skip


def keys_of(component: str, text_names: Iterable[str]) -> KeyMap:
    """Key map from a component's checkpoint names to module names."""
    if component == "text_encoder":
        return T5_KEYS
    if component == "clip":
        return text_model_keys(text_names, _CLIP_IGNORED)
    return {"first_denoiser": FLUX_KEYS, "first_vae": FLUX_VAE_KEYS}.get(component, KeyMap())


@dataclass(frozen=True)
class OpenSora2Files(CheckpointFiles):
    """Files of one Open-Sora 2.0, with those of FLUX if a first picture is requested."""

    table: ClassVar = {
        "text_encoder": ComponentFiles(T5),
        "clip": ComponentFiles(CLIP),
        "denoiser": ComponentFiles("", weights=DENOISER),
        "vae": ComponentFiles("", weights=HUNYUAN_VAE),
        "first_denoiser": ComponentFiles("", weights=FLUX),
        "first_vae": ComponentFiles("", weights=FLUX_VAE),
    }

    @classmethod
    def source_at(cls, component: str, place: PartLocation) -> ComponentSource:
        """Source in a hub repository: a single file, a folder of shards, or an encoder's folder."""
        found = super().source_at(component, place)
        weights = [file for file in place.files if file.suffix in WEIGHT_SUFFIXES]
        if place.is_complete and not cls.entry(component).folder and weights:
            return replace(found, path=weights[0] if len(weights) == 1 else weights[0].parent)
        if place.is_complete and found.path is not None and not found.path.is_dir():
            return replace(found, path=place.folder)  # an encoder's own repository
        return found

    def weights_path(self, component: str) -> Path:
        """File that holds a component's weights, or the folder of its shards."""
        named = super().weights_path(component)
        return named if named.exists() else self.path(component)


def find_files(location: Location, options: OpenSora2Options) -> OpenSora2Files | None:
    """Find the files of an Open-Sora 2.0 at `location`; None if it is another family's.

    Raises:
        InputError: the file is FLUX.1 and not a video model, or an option names no component.
        CheckpointError: the folder holds several denoisers or autoencoders.
    """
    if location.known is not None and location.parts:
        if location.known.family != "opensora2":
            return None
        found = OpenSora2Files.of_parts(location.parts)
        return _complete(found, options)
    folder = location.path
    if folder is None:
        place = location.parts[0]
        folder = place.folder if place.is_complete else None
    if folder is None or (folder / "model_index.json").is_file():
        return None
    there = _parts_in(folder if folder.is_dir() else folder.parent)
    if folder.is_file():
        part = part_of(folder)
        if part == FLUX_PART:
            raise InputError(
                f"{location.asked}: this is FLUX.1, which draws pictures; give Open-Sora 2.0's "
                "denoiser, and FLUX with --first-frame flux --flux FOLDER"
            )
        if part != VIDEO_PART:
            return None
        there[VIDEO_PART] = [folder]
    elif VIDEO_PART not in there:
        return None
    return _complete(_sources(folder if folder.is_dir() else folder.parent, there), options)


def _parts_in(folder: Path) -> dict[str, list[Path]]:
    """The folder's safetensors files by the component that they hold."""
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = part_of(file)
        if part is not None:
            found.setdefault(part, []).append(file)
    return found


def _sources(folder: Path, there: Mapping[str, list[Path]]) -> dict[str, ComponentSource]:
    roles = (
        ("denoiser", (VIDEO_PART,)),
        ("vae", (HUNYUAN_PART, DEEP_PART)),
        ("first_denoiser", (FLUX_PART,)),
        ("first_vae", (FLUX_VAE_PART,)),
    )  # fmt: skip
    found: dict[str, ComponentSource] = {}
    for role, parts in roles:
        files = [file for part in parts for file in there.get(part, ())]
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            how = {"denoiser": "give one of the files", "vae": "say which with --vae"}.get(
                role, "keep one, or say which with --flux FOLDER"
            )
            raise CheckpointError(f"{folder} holds several of {parts[0]} ({names}); {how}")
        if files:
            found[role] = ComponentSource(f"{folder.name}/{files[0].name}", files[0])
    for role in ("text_encoder", "clip"):
        if (folder / OpenSora2Files.entry(role).folder).is_dir():
            found[role] = OpenSora2Files.source_in(role, folder.name, folder)
    return found


def _complete(found: Mapping[str, ComponentSource], options: OpenSora2Options) -> OpenSora2Files:
    """Fill in every component: from the options, else the folder, else upstream's repository."""
    standard = next(model for model in known_models() if model.name == "opensora-2.0")
    hub = {part.role: part for part in standard.parts}
    given = {"vae": options.vae, "text_encoder": options.text_encoder, "clip": options.clip}
    sources: dict[str, ComponentSource] = {}
    for role in ("text_encoder", "clip", "denoiser", "vae"):
        asked = _option_source(given.get(role), role)
        sources[role] = asked or found.get(role) or OpenSora2Files.on_hub(hub[role])
    if options.first_frame:
        flux = _flux(options.flux)
        for role in ("first_denoiser", "first_vae"):
            named = f"opensora2-{role}"
            sources[role] = (
                flux.get(role) or found.get(role) or OpenSora2Files.on_hub(shared_part(named))
            )
    return OpenSora2Files(sources)


def _option_source(name: str | None, role: str) -> ComponentSource | None:
    """Source that an option names (folder, file or hub id); None without the option."""
    if name is None:
        return None
    path = expand_path(name, role)
    if path.is_dir() and role == "vae":
        there = _parts_in(path)
        path = next(iter(there.get(HUNYUAN_PART, []) + there.get(DEEP_PART, [])), path)
    if path.exists():
        return ComponentSource(path.name, path)
    if name.count("/") != 1 or role == "vae":
        wanted = "a folder or a file" if role == "vae" else "a folder or a hub id OWNER/NAME"
        raise InputError(f"{role} must be {wanted}, got {name!r}, which is not there")
    weights = tuple(f"*{suffix}" for suffix in WEIGHT_SUFFIXES)
    extras = ("*.json", "spiece.model", "vocab.json", "merges.txt")
    return OpenSora2Files.on_hub(
        HubPart(role=role, repo_id=name, needs=(("config.json",), weights), extras=extras)
    )


def _flux(name: str | None) -> dict[str, ComponentSource]:
    """FLUX and its autoencoder, from the folder or hub id that an option names."""
    if name is None:
        return {}
    path = expand_path(name, "flux")
    if path.is_dir():
        is_diffusers = (path / "transformer").is_dir()
        found = _diffusers_flux(path) if is_diffusers else _sources(path, _parts_in(path))
        lacking = [role for role in _FLUX_FOLDERS if role not in found]
        if lacking:
            files = {"first_denoiser": FLUX, "first_vae": FLUX_VAE}
            names = _FLUX_FOLDERS if is_diffusers else files
            raise InputError(f"flux: {describe_missing(path, [names[role] for role in lacking])}")
        return found
    if name.count("/") != 1 or path.exists():
        raise InputError(f"flux must be a folder or a hub id OWNER/NAME, got {name!r}")
    return {role: _flux_on_hub(role, name) for role in _FLUX_FOLDERS}


def _diffusers_flux(folder: Path) -> dict[str, ComponentSource]:
    config = folder / "transformer" / "config.json"
    kind = read_json(config).get("_class_name") if config.is_file() else None
    if kind != _FLUX_CLASS:
        held = f"of {kind}" if kind else "missing or of no class"
        raise InputError(f"flux: {config} must be of {_FLUX_CLASS}, and it is {held}")
    return {
        role: ComponentSource(f"{folder.name}/{name}", folder / name)
        for role, name in _FLUX_FOLDERS.items()
        if (folder / name).is_dir()
    }


def _flux_on_hub(role: str, repo_id: str) -> ComponentSource:
    """FLUX in a hub repository, in upstream's layout if it is on disk, else in diffusers'."""
    part = replace(shared_part(f"opensora2-{role}"), repo_id=repo_id)
    folder = _FLUX_FOLDERS[role]
    needs = ((f"{folder}/config.json",), (f"{folder}/*.safetensors",))
    if repo_id != shared_part(f"opensora2-{role}").repo_id and not find_part(part).is_complete:
        part = replace(part, needs=needs, extras=(f"{folder}/*.index.json",))
    return OpenSora2Files.on_hub(part)
