"""Find the files of an Open-Sora checkpoint and detect its version, from names and configs only.

Upstream spreads a model over three hub repositories: denoiser, autoencoder, T5. A local folder
may hold all of them (``vae/``, ``text_encoder/``, ``tokenizer/`` beside the denoiser's
``config.json``); the embedded model has this layout. No weights are read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from everyframe.checkpoints.folder import WEIGHT_SUFFIXES
from everyframe.checkpoints.key_map import OLD_VAE_ATTENTION, KeyMap
from everyframe.checkpoints.locate import Location, PartLocation
from everyframe.checkpoints.model_zoo import SUPPORTED_VERSIONS, HubPart, known_models, shared_part
from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.paths import expand_path
from everyframe.families.opensora.options import OpenSoraOptions
from everyframe.families.t5_tokenizer import T5_KEYS
from everyframe.runtime.components.component_files import (
    CheckpointFiles,
    ComponentFiles,
    ComponentSource,
)

#: Ignored: position tables that upstream stores with the weights; computed in float32 here.
STDIT_KEYS = KeyMap(ignore=(r"pos_embed", r"pos_embed_temporal"))
STDIT3_KEYS = KeyMap(ignore=(r"rope\.freqs",))

#: sd-vae-ft-ema predates diffusers' renaming of the autoencoder's attention.
VIDEO_VAE_KEYS = KeyMap(rename=OLD_VAE_ATTENTION)
#: A plain diffusers folder; `ImageVAE` wraps its `AutoencoderKL` one level lower.
IMAGE_VAE_KEYS = KeyMap(rename=(*OLD_VAE_ATTENTION, (r"^", "module.")))


def keys_of(component: str, version: str) -> KeyMap:
    """Key map from a component's checkpoint names to module names."""
    if component == "text_encoder":
        return T5_KEYS
    if component == "denoiser":
        return STDIT_KEYS if version == "1.0" else STDIT3_KEYS
    return IMAGE_VAE_KEYS if version == "1.0" else VIDEO_VAE_KEYS


_VERSION_MARKS = (
    ("2.0", ("double_blocks.", "single_blocks.")),
    ("1.1", ("t_block_temp.", "csize_embedder.")),
    ("1.3", ("x_embedder_cond.", "x_embedder_cond_mask.")),
    ("1.2", ("spatial_blocks.",)),
    ("1.0", ("blocks.0.attn_temp.",)),
)


def version_of(names: Iterable[str]) -> str | None:
    """Open-Sora version whose denoiser has tensors of these names, or None."""
    names = tuple(names)
    for version, marks in _VERSION_MARKS:
        if any(name.startswith(mark) for mark in marks for name in names):
            return version
    return None


#: Keyed by `model_type` or `architectures` (the class), or by `type` in upstream's own configs.
_VERSION_OF_CLASS = {
    "STDiT": "1.0", "STDiT-XL/2": "1.0", "STDiT2": "1.1", "STDiT2-XL/2": "1.1",
    "STDiT3": "1.2", "STDiT3-XL/2": "1.2", "STDiT3-3B/2": "1.2", "MMDiTModel": "2.0", "flux": "2.0",
}  # fmt: skip
_VERSION_OF_KNOWN = {
    "opensora-1.2": "1.2",
    "opensora-1.0-16x256x256": "1.0",
    "opensora-1.0-16x512x512": "1.0",
}
#: Config keys that 1.3 added to the denoiser class it shares with 1.2.
_KEYS_OF_1_3 = ("use_spatial_rope", "kernel_size", "force_pad_h_for_sp_size")


@dataclass(frozen=True)
class OpenSoraFiles(CheckpointFiles):
    """Files of one Open-Sora model, and its version.

    `defaults` is the content of the checkpoint's own everyframe.json.
    """

    version: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    table: ClassVar = {
        "text_encoder": ComponentFiles("text_encoder", part="text_encoder"),
        "denoiser": ComponentFiles("", part="denoiser"),
        "vae": ComponentFiles("vae", part="vae"),
        "tokenizer": ComponentFiles("tokenizer", part="text_encoder"),
    }

    @classmethod
    def source_at(cls, component: str, place: PartLocation) -> ComponentSource:
        """Source in upstream's layout: a repository holds one component, the tokenizer with T5."""
        path = place.folder if place.is_complete else None
        weights = [file for file in place.files if file.suffix in WEIGHT_SUFFIXES]
        # A repository such as 1.0's holds several models; the part's pattern picks one file.
        if path is not None and component == "denoiser" and len(weights) == 1:
            path = weights[0]
        return ComponentSource(place.part.repo_id, path, place)


def find_files(location: Location, options: OpenSoraOptions) -> OpenSoraFiles | None:
    """Find the files of an Open-Sora model at `location`; None if it is another family's.

    Raises:
        InputError: the Open-Sora version is not supported; names it.
        CheckpointError: the folder holds several models, or a component's path holds none.
    """
    if location.known is not None and location.parts:
        version = _VERSION_OF_KNOWN.get(location.known.name)
        if version is None:
            return None
        roles = OpenSoraFiles.of_parts(location.parts)
        return _complete(version, roles, options)
    if location.path is None:
        return _from_hub_id(location, options)
    return _from_disk(location.asked, location.path, options)


def _from_hub_id(location: Location, options: OpenSoraOptions) -> OpenSoraFiles | None:
    place = location.parts[0]
    if place.folder is None or not place.is_complete:
        return None
    found = _from_disk(location.asked, place.folder, options)
    if found is None:
        return None
    denoiser = replace(found.sources["denoiser"], where=location.asked)
    return replace(found, sources={**found.sources, "denoiser": denoiser})


def _from_disk(asked: str, path: Path, options: OpenSoraOptions) -> OpenSoraFiles | None:
    if (path / "model_index.json").is_file():
        return None  # a diffusers pipeline; what else lies beside that is none of ours
    denoiser = ComponentSource(path.name or asked, _weights_at(path))
    version = _version(asked, denoiser)
    if version in (None, "2.0"):  # that version is a family of its own
        return None
    if version not in SUPPORTED_VERSIONS.split(", "):
        raise InputError(f"{asked}: this is Open-Sora {version}; supported: {SUPPORTED_VERSIONS}")
    folder = path if path.is_dir() else path.parent
    beside = {
        name: OpenSoraFiles.source_in(name, folder.name, folder)
        for name, entry in OpenSoraFiles.table.items()
        if entry.folder and (folder / entry.folder).is_dir()
    }
    files = _complete(version, {**beside, "denoiser": denoiser}, options)
    return replace(files, defaults=denoiser.config("everyframe.json") or {})


def _complete(
    version: str, found: Mapping[str, ComponentSource], options: OpenSoraOptions
) -> OpenSoraFiles:
    """Fill in every component: from the options, else as found, else upstream's repository."""
    standard = next(
        model for model in known_models() if _VERSION_OF_KNOWN.get(model.name) == version
    )
    standard_vae = next(part for part in standard.parts if part.role == "vae")
    vae = (
        _option_source(options.vae, "vae") or found.get("vae") or OpenSoraFiles.on_hub(standard_vae)
    )
    text = _option_source(options.text_encoder, "text_encoder") or found.get("text_encoder")
    text = text or OpenSoraFiles.on_hub(shared_part("t5-xxl"))
    # The tokenizer is in T5's own folder (upstream's layout) or in one beside it.
    tokenizer = found.get("tokenizer", text) if options.text_encoder is None else text
    sources = {
        "text_encoder": text, "denoiser": found["denoiser"], "vae": vae, "tokenizer": tokenizer,
    }  # fmt: skip
    return OpenSoraFiles(sources, version)


def _option_source(name: str | None, role: str) -> ComponentSource | None:
    """Source that an option names (folder, file or hub id); None without the option."""
    if name is None:
        return None
    path = expand_path(name, role)
    if path.exists():
        return ComponentSource(path.name, path)
    if name.count("/") != 1:
        raise InputError(f"{role} must be a folder, a file or a hub id OWNER/NAME, got {name!r}")
    weights = tuple(f"*{suffix}" for suffix in WEIGHT_SUFFIXES)
    extras = ("*.json", "spiece.model")
    return OpenSoraFiles.on_hub(
        HubPart(role=role, repo_id=name, needs=(("config.json",), weights), extras=extras)
    )


def _weights_at(path: Path) -> Path:
    """Path of the denoiser's weights: the folder if it has a config.json, else its single file."""
    if path.is_file() or (path / "config.json").is_file():
        return path
    files = sorted(file for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path} holds several checkpoints ({names}); give one of the files")
    return files[0] if files else path


def _version(asked: str, denoiser: ComponentSource) -> str | None:
    config = denoiser.config()
    if config is None:
        if denoiser.path is None or not denoiser.path.is_file():
            return None
        return _version_of_file(denoiser.path)
    classes = [config.get("model_type"), *(config.get("architectures") or ()), config.get("type")]
    versions = [_VERSION_OF_CLASS[name] for name in classes if name in _VERSION_OF_CLASS]
    version = versions[0] if versions else None
    if version is None and not any((*classes, config.get("_class_name"))):
        # Sizes without a class name: the tensors identify the component.
        assert denoiser.path is not None
        version = _version_of_file(denoiser.path)
    if version == "1.2" and any(key in config for key in _KEYS_OF_1_3):
        return "1.3"
    return version


def _version_of_file(path: Path) -> str | None:
    # Late import: brings torch, which reading a pickle's names needs.
    from everyframe.checkpoints.tensor_file import open_checkpoint

    return version_of(open_checkpoint(path).names())
