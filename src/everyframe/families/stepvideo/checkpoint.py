"""Find the files of a Step-Video checkpoint: upstream's folder layout, local or on the hub.

``transformer/`` (shards), ``vae/vae_v2.safetensors``, ``step_llm/`` (shards and a tokenizer),
``hunyuan_clip/`` (encoder and tokenizer) and ``scheduler/``. The turbo repository holds only the
denoiser; the other components are the base model's. No weights are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import ClassVar

from everyframe.checkpoints.folder import read_json
from everyframe.checkpoints.key_map import KeyMap
from everyframe.checkpoints.locate import Location, PartLocation
from everyframe.checkpoints.model_zoo import HubPart, shared_part
from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.paths import expand_path
from everyframe.runtime.components.component_files import (
    CheckpointFiles,
    ComponentFiles,
    ComponentSource,
)

PIPELINE, DENOISER = "StepVideoPipeline", "StepVideoModel"
CLIP_ENCODER, CLIP_TOKENIZER = "clip_text_encoder", "tokenizer"


@dataclass(frozen=True)
class StepVideoFiles(CheckpointFiles):
    """Files of one Step-Video model, and whether it is the turbo variant."""

    is_turbo: bool

    table: ClassVar = {
        "denoiser": ComponentFiles("transformer"),
        "step_llm": ComponentFiles("step_llm"),
        "clip": ComponentFiles("hunyuan_clip", f"{CLIP_ENCODER}/config.json", weights=CLIP_ENCODER),
        "vae": ComponentFiles("vae", weights="vae_v2.safetensors"),
    }

    @classmethod
    def source_at(cls, component: str, place: PartLocation) -> ComponentSource:
        """Source in a hub repository, whose scheduler must be upstream's."""
        if place.is_complete and place.folder is not None:
            _check_scheduler(place.folder)
        return super().source_at(component, place)


def find_files(location: Location, base: str | None) -> StepVideoFiles | None:
    """Find the files of a Step-Video at `location`; None if it is another family's.

    `base` holds the components that are not beside the denoiser.

    Raises:
        InputError: `base` is neither a folder nor a hub id.
        CheckpointError: the folder is labelled Step-Video but lacks the denoiser.
    """
    if location.known is not None:
        if location.known.family != "stepvideo":
            return None
        sources = StepVideoFiles.of_parts(location.parts)
        return _complete(sources, location.known.name, base)
    folder = location.path
    if folder is None:
        place = location.parts[0]
        folder = place.folder if place.is_complete else None
    if folder is None or not folder.is_dir() or not _is_ours(folder):
        return None
    return _complete(_beside(folder), location.asked, base)


def _complete(
    sources: Mapping[str, ComponentSource], name: str, base: str | None
) -> StepVideoFiles:
    """Fill in every component: beside the denoiser, else in `base`, else from the hub."""
    others = _of_base(base)
    whole = {part: sources.get(part) or others[part] for part in StepVideoFiles.table}
    if base is not None:
        whole |= {part: source for part, source in others.items() if part != "denoiser"}
    # Both variants have one class, and their configs don't differ.
    return StepVideoFiles(whole, "turbo" in PurePath(name).name.casefold())


def _is_ours(folder: Path) -> bool:
    """Whether the folder's own files name the Step-Video class."""
    for file, name in (("model_index.json", PIPELINE), ("transformer/config.json", DENOISER)):
        if (folder / file).is_file():
            return read_json(folder / file).get("_class_name") == name
    return False


def _beside(folder: Path) -> dict[str, ComponentSource]:
    if not (folder / "transformer").is_dir():
        raise CheckpointError(
            f"{folder} is a Step-Video without its denoiser: it lacks transformer/"
        )
    _check_scheduler(folder)
    return {
        name: StepVideoFiles.source_in(name, folder.name, folder)
        for name, entry in StepVideoFiles.table.items()
        if (folder / entry.folder).is_dir()
    }


def _check_scheduler(folder: Path) -> None:
    """Raise if the scheduler config asks for another sampler than upstream's release."""
    file = folder / "scheduler" / "scheduler_config.json"
    if not file.is_file():
        return
    config = read_json(file)
    for name, expected in (("reverse", False), ("solver", "euler")):
        if config.get(name, expected) != expected:
            raise CheckpointError(
                f"{file} sets {name} to {config[name]!r}; supported: {expected!r}, as upstream "
                "released it"
            )


def _of_base(base: str | None) -> dict[str, ComponentSource]:
    if base is None:
        return {part.role: StepVideoFiles.on_hub(part) for part in _base_parts()}
    path, table = expand_path(base), StepVideoFiles.table
    if path.is_dir():
        lacking = [entry.folder for part, entry in table.items()
                   if part != "denoiser" and not (path / entry.folder).is_dir()]  # fmt: skip
        if lacking:
            raise InputError(f"base: {path} lacks {', '.join(lacking)}")
        return {name: StepVideoFiles.source_in(name, path.name, path) for name in table}
    if base.count("/") != 1 or path.exists():
        raise InputError(f"base must be a folder or a hub id OWNER/NAME, got {base!r}")
    return {part.role: StepVideoFiles.on_hub(replace(part, repo_id=base)) for part in _base_parts()}


def _base_parts() -> list[HubPart]:
    """The parts that both variants share."""
    shared = (name for name in StepVideoFiles.table if name != "denoiser")
    return [shared_part(f"stepvideo-{name}") for name in shared]


#: A plain convolution in the file; a causal one, one level lower, in upstream's module.
VAE_KEYS = KeyMap(rename=((r"^decoder\.conv_out\.(weight|bias)$", r"decoder.conv_out.conv.\1"),))
#: The file also holds CLIP's image half, unused heads, and position ids (as transformers stored
#: them before 4.31). Older BERT checkpoints name the norms' parameters gamma and beta.
CLIP_KEYS = KeyMap(
    rename=(
        (r"^(bert|text_model|text_encoder)\.", ""),
        (r"\.LayerNorm\.gamma$", ".LayerNorm.weight"),
        (r"\.LayerNorm\.beta$", ".LayerNorm.bias"),
    ),
    ignore=(
        r"visual\..*",
        r"logit_scale",
        r"(bert\.)?pooler\..*",
        r"(bert\.)?embeddings\.position_ids",
        r"(text_|visual_)?projection(\.weight)?",
        r"cls\..*",
    ),
)
KEYS = {
    "step_llm": KeyMap(),
    "clip": CLIP_KEYS,
    "denoiser": KeyMap(),
    "vae": VAE_KEYS,
}
