"""Resolve a model's name and find its files on disk. Uses no network and loads nothing.

A name is, in this order: a short name or alias of `model_zoo`, an existing folder or file, or a hub
id (``owner/name``). Any other name is an error with the closest matches. Missing files are fetched
by `download` and read by `tensor_file`; each family decides which files of a folder form a model.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Literal

from everyframe.checkpoints.folder import (
    WEIGHT_SUFFIXES,
    check_inside,
    describe_missing,
    hub_cache_folder,
    package_folder,
    weight_files,
)
from everyframe.checkpoints.missing_files import folders_without_weights, missing_shards
from everyframe.checkpoints.model_zoo import (
    SUPPORTED_VERSIONS,
    HubPart,
    KnownModel,
    controlnets,
    known_models,
    refused_models,
)
from everyframe.core.errors import CheckpointError, InputError, closest_names, did_you_mean
from everyframe.core.paths import expand_path

Kind = Literal["embedded", "known", "folder", "file", "hub"]

# Memory estimate and files to fetch of an unlisted hub id.
_ANY_WEIGHTS = tuple(f"*{suffix}" for suffix in WEIGHT_SUFFIXES if suffix != ".ckpt")
_WHOLE_MODEL = "model"
_ANY_EXTRAS = ("*.json", "*.model", "*.txt", "*.jinja")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")


@dataclass(frozen=True)
class PartLocation:
    """One component of a model and its files on disk.

    Attributes:
        folder: snapshot folder in the hub cache, if there is one.
        files: files on disk that belong to the component.
        missing: patterns or file names without any match; empty means complete.
        bytes_to_fetch: approximate; 0 if complete, None if unknown.
    """

    part: HubPart
    folder: Path | None
    files: tuple[Path, ...]
    missing: tuple[str, ...]
    bytes_on_disk: int
    bytes_to_fetch: int | None

    @property
    def is_complete(self) -> bool:
        """Whether all files of the component are on disk."""
        return not self.missing

    def to_fetch(self) -> tuple[str, ...]:
        """Lines for the user that list what has to be downloaded; none if complete."""
        if self.is_complete:
            return ()
        about = f", about {self.bytes_to_fetch / 1e9:.1f} GB" if self.bytes_to_fetch else ""
        return (f"{self.part.repo_id}: {', '.join(self.missing)}{about}",)


@dataclass(frozen=True)
class Location:
    """Meaning of a model's name. Exactly one of `path` (local) and `parts` (hub) is set.

    Attributes:
        asked: the name as given.
        known: the row of `model_zoo`, also for an alias or a component's hub id.
        path: the embedded model's folder, or the local folder or file.
        missing: what a local model lacks; for hub models see each component.
        hint: a clause such as ``"; did you mean 'opensora-1.2'?"`` for an unlisted hub id.
        components: those whose weights come from files of their own, so it may lack them.
    """

    asked: str
    kind: Kind
    known: KnownModel | None = None
    path: Path | None = None
    parts: tuple[PartLocation, ...] = ()
    missing: tuple[str, ...] = ()
    hint: str = ""
    components: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Short name if there is one, else the given name."""
        return self.known.name if self.known else self.asked

    def title(self, kind: str) -> str:
        """Display name: that of a known model, else `kind` and the last part of the name."""
        if self.known:
            return self.known.title
        # That of "." is empty.
        name = PurePath(self.name).name or (self.path.resolve().name if self.path else "")
        return f"{kind} ({name})"

    @property
    def is_complete(self) -> bool:
        """Whether all files are on disk, so that it runs without a network."""
        return not self.missing and all(part.is_complete for part in self.parts)

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of the weight files (local) or of all files of the components (hub)."""
        if self.path is None:
            return sum(part.bytes_on_disk for part in self.parts)
        files = [self.path] if self.path.is_file() else weight_files(self.path)
        return sum(file.stat().st_size for file in files)

    @property
    def bytes_to_fetch(self) -> int | None:
        """Approximate bytes to download; None if unknown for a component."""
        total = 0
        for part in self.parts:
            if part.bytes_to_fetch is None:
                return None
            total += part.bytes_to_fetch
        return total


def locate(
    name: str,
    *,
    variant: str | None = None,
    without: tuple[str, ...] = (),
) -> Location:
    """Resolve `name` and list its files on disk. Takes milliseconds and no network.

    Args:
        name: short name, alias, folder, file, or hub id.
        variant: of a hub model, which of several stored precisions, such as ``fp16``. Default:
            float32, or fp16 if only that is on disk.
        without: components of a hub id whose weights are not needed.

    Raises:
        InputError: an unknown name (closest names given), or a model that is not supported.
        CheckpointError: a path without anything that looks like a checkpoint.
    """
    given = name.strip()
    if not given:
        raise InputError(f"the model's name is empty; known are {_names()}")
    known = _by_name(given)
    if known is not None:
        return _locate_known(given, known, variant)
    path = expand_path(given, "model")
    if path.exists():
        return _locate_path(given, path)
    _refuse_by_name(given)
    if _HUB_ID.fullmatch(given) and path.suffix not in WEIGHT_SUFFIXES:
        return _locate_hub(given, variant, without)
    raise InputError(_unknown(given, path))


def is_listed(name: str) -> bool:
    """Whether our tables list this short name or hub id, as a model or a component of one."""
    parts = {part.repo_id for model in known_models() for part in model.parts}
    ids = {each.casefold() for each in (*parts, *controlnets(), *controlnets().values())}
    given = name.strip()
    return _by_name(given) is not None or given.casefold() in ids


def overview() -> tuple[Location, ...]:
    """Location of each known model, in the order of the table."""
    return tuple(_locate_known(model.name, model) for model in known_models())


def names_on_disk() -> tuple[str, ...]:
    """Short names of the known models that are completely on disk."""
    return tuple(place.name for place in overview() if place.is_complete)


def find_part(part: HubPart) -> PartLocation:
    """Find the files of one hub component in the hub cache."""
    folder = _snapshot(part.repo_id)
    files = _files(folder) if folder is not None else {}
    mine = {name: path for name, path in files.items() if _matches(name, part.patterns)}
    missing = [
        " or ".join(group)
        for group in part.needs
        if not any(_matches(name, group) for name in mine)
    ]
    # Of a variant the other index is there too, whose shards are not wanted.
    missing += [name for name in missing_shards(mine) if _matches(name, part.patterns)]
    if part.role == _WHOLE_MODEL and folder is not None:
        missing += folders_without_weights(folder, part.without)
    on_disk = sum(path.stat().st_size for path in mine.values())
    to_fetch = part.num_bytes
    if not missing:
        to_fetch = 0
    elif to_fetch is not None:
        to_fetch = max(0, to_fetch - on_disk)
    return PartLocation(part, folder, tuple(mine.values()), tuple(missing), on_disk, to_fetch)


def _by_name(given: str) -> KnownModel | None:
    folded = given.casefold()
    for model in known_models():
        if folded in (each.casefold() for each in (model.name, *model.aliases)):
            return model
    # A hub id that holds a known model's denoiser stands for that model.
    held = [model for model, part in _holders(folded) if part.role == "denoiser"]
    return held[0] if len({model.name for model in held}) == 1 else None


def _holders(folded: str) -> list[tuple[KnownModel, HubPart]]:
    return [
        (model, part)
        for model in known_models()
        for part in model.parts
        if part.repo_id.casefold() == folded
    ]


def _refuse_by_name(given: str) -> None:
    """Raise `InputError` for names of models that cannot run here."""
    folded = given.casefold()
    for name, version in refused_models().items():
        if name.casefold() == folded:
            raise InputError(f"{given}: this is {version}; supported: {SUPPORTED_VERSIONS}")
    holders = _holders(folded)
    if holders:
        names = " or ".join(model.name for model, _ in holders)
        role = holders[0][1].role.replace("_", " ")
        raise InputError(
            f"{given} holds the {role} of more than one model, or only a part of one; "
            f"ask for the model: {names}"
        )


def _locate_known(asked: str, model: KnownModel, variant: str | None = None) -> Location:
    if model.embedded is not None:
        folder = package_folder(model.embedded)
        missing = () if folder.is_dir() and weight_files(folder) else ("its weights",)
        return Location(asked, "embedded", known=model, path=folder, missing=missing)
    found = {
        name: tuple(
            find_part(part if name is None else part.as_variant(name)) for part in model.parts
        )
        for name in ((None, "fp16") if variant is None else (variant,))
    }
    whole = (parts for parts in found.values() if all(part.is_complete for part in parts))
    return Location(asked, "known", known=model, parts=next(whole, found[variant]))


def _locate_path(asked: str, path: Path) -> Location:
    if path.is_file():
        if path.suffix not in WEIGHT_SUFFIXES and not path.name.endswith(".index.json"):
            raise CheckpointError(
                f"{path} is no checkpoint: its name ends in {path.suffix!r}, "
                f"allowed are {', '.join(WEIGHT_SUFFIXES)} and .index.json"
            )
        return Location(asked, "file", path=path)
    weights = weight_files(path)
    check_inside(path, [*weights, *path.glob("*.json"), *path.glob("*/*.json")])
    if not weights:
        expected = ["config.json", *(f"*{suffix}" for suffix in WEIGHT_SUFFIXES[:2])]
        raise CheckpointError(describe_missing(path, expected))
    return Location(asked, "folder", path=path)


def _locate_hub(asked: str, variant: str | None, without: tuple[str, ...]) -> Location:
    part = HubPart(_WHOLE_MODEL, asked, needs=(_ANY_WEIGHTS,), extras=_ANY_EXTRAS, without=without)
    if variant is not None:
        part = replace(part, needs=(("*.safetensors",),)).as_variant(variant)
    place = find_part(part)
    hint = "" if place.is_complete else did_you_mean(asked, _all_names())
    return Location(asked, "hub", parts=(place,), hint=hint)


def _all_names() -> list[str]:
    names = [name for model in known_models() for name in (model.name, *model.aliases)]
    return names + sorted({part.repo_id for model in known_models() for part in model.parts})


def _names() -> str:
    return ", ".join(model.name for model in known_models())


def _unknown(given: str, path: Path) -> str:
    looks_like_path = path.suffix in WEIGHT_SUFFIXES or given.startswith((".", "/", "~", "\\"))
    if looks_like_path or given.count("/") > 1:
        there = f"; {path.parent} does not exist either" if not os.path.exists(path.parent) else ""
        return f"there is no folder or file {given}{there}; known models: {_names()}"
    close = closest_names(given, _all_names(), count=2)
    meant = f"; did you mean {' or '.join(map(repr, close))}? Known" if close else "; known"
    return (
        f"unknown model {given!r}{meant} models: {_names()}; "
        "a folder, a file or a hub id OWNER/NAME will do too"
    )


def _snapshot(repo_id: str) -> Path | None:
    """Hub cache folder of the default revision of `repo_id`, complete or not."""
    cache = hub_cache_folder()
    if not (cache / f"models--{repo_id.replace('/', '--')}").is_dir():
        return None  # spares the import of the hub's client where nothing was ever fetched
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id, cache_dir=cache, local_files_only=True))
    except LocalEntryNotFoundError as error:
        # An interrupted or partial snapshot; later checks name the missing files.
        partial = getattr(error, "snapshot_path", None)
        return Path(partial) if partial else None
    except HFValidationError as error:
        raise InputError(f"{repo_id!r} is not a hub id: {error}") from error


def _files(folder: Path) -> dict[str, Path]:
    """Relative name -> path of every existing file (no dangling links)."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
