"""Models with a short name: their repositories, files and sizes, read from ``known_models.yaml``.

A model that is not listed can still be given as a folder, a file or a hub id. `everyframe models`
lists these, and misspelt names are compared with them. `locate` looks for their files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from everyframe.checkpoints.folder import read_package_data

SUPPORTED_VERSIONS = "1.0, 1.2, 2.0"
"""Versions of Open-Sora that run here."""

#: Bytes of a parameter by variant.
_VARIANT_BYTES = {"fp16": 2, "bf16": 2}
_WEIGHTS = ".safetensors"


@dataclass(frozen=True)
class HubPart:
    """One component of a model in a hub repository.

    Attributes:
        role: ``denoiser``, ``vae``, ``text_encoder``, ``image_encoder``, ``controlnet``, or a name
            of the family's own.
        repo_id: hub id, ``owner/name``.
        needs: groups of alternative file patterns; each group needs one match. All patterns are
            downloaded.
        extras: patterns that are downloaded too but not needed.
        num_parameters: None if unknown (a hub id that is not listed).
        variant: which of several stored precisions of the weights, such as ``fp16``.
        parameter_bytes: bytes of a stored parameter without a variant.
        without: folders of a diffusers pipeline whose weights come from files of their own.
    """

    role: str
    repo_id: str
    needs: tuple[tuple[str, ...], ...]
    extras: tuple[str, ...] = ()
    num_parameters: int | None = None
    variant: str | None = None
    parameter_bytes: int = 4
    without: tuple[str, ...] = ()

    def as_variant(self, variant: str) -> HubPart:
        """Copy with the weight files of that variant: ``*.fp16.safetensors``."""
        needs = tuple(_as_variant(group, variant) for group in self.needs)
        extras = _as_variant(self.extras, variant)
        return replace(self, needs=needs, extras=extras, variant=variant)

    @property
    def patterns(self) -> tuple[str, ...]:
        """All file patterns to download."""
        return tuple(pattern for group in self.needs for pattern in group) + self.extras

    @property
    def num_bytes(self) -> int | None:
        """Approximate size of the files, from the parameter count; does not query the hub."""
        if self.num_parameters is None:
            return None
        return self.num_parameters * _VARIANT_BYTES.get(self.variant or "", self.parameter_bytes)


@dataclass(frozen=True)
class KnownModel:
    """A model with a short name.

    Attributes:
        embedded: folder inside this package that holds the whole model; None for a model of
            `parts`.
        licence: of the weights, to our knowledge; each repository's own card decides.
    """

    name: str
    family: str
    title: str
    licence: str
    parts: tuple[HubPart, ...] = ()
    embedded: str | None = None
    aliases: tuple[str, ...] = ()
    note: str = ""


@cache
def known_models() -> tuple[KnownModel, ...]:
    """All models with a short name."""
    return tuple(_model(**entry) for entry in _data()["models"])


@cache
def shared_part(name: str) -> HubPart:
    """One of the parts that several models share, by its name in the data."""
    return _part(**_data()["parts"][name])


def controlnets() -> Mapping[str, str]:
    """Hub ids of ControlNets by their usual names, for Stable Diffusion 1.5."""
    ids: Mapping[str, str] = _data()["controlnets"]
    return ids


def controlnet_part(repo_id: str) -> HubPart:
    """Repository of a ControlNet in diffusers' format; its size is known if it is listed."""
    part = replace(shared_part("controlnet"), repo_id=repo_id)
    return part if repo_id in controlnets().values() else replace(part, num_parameters=None)


def refused_models() -> Mapping[str, str]:
    """Versions of models that people will try and that can't be run, by hub id or name."""
    versions: Mapping[str, str] = _data()["refused"]
    return versions


def _data() -> Mapping[str, Any]:
    data: Mapping[str, Any] = read_package_data("checkpoints/known_models.yaml")
    return data


def _model(
    *, parts: Sequence[Any] = (), aliases: Sequence[str] = (), repo_id: str = "", **rest: Any
) -> KnownModel:
    """A model of the data; `repo_id` is that of all its parts."""
    own = {"repo_id": repo_id} if repo_id else {}
    made = tuple(_part(**{**part, **own}) for part in parts)
    return KnownModel(parts=made, aliases=tuple(aliases), **rest)


def _part(*, needs: Sequence[Any], extras: Sequence[str] = (), **rest: Any) -> HubPart:
    groups = tuple((each,) if isinstance(each, str) else tuple(each) for each in needs)
    return HubPart(needs=groups, extras=tuple(extras), **rest)


def _as_variant(patterns: Sequence[str], variant: str) -> tuple[str, ...]:
    """``model.safetensors`` as ``model.fp16.safetensors``; other files keep their names.

    Any weights may be shards: ``model.fp16-00001-of-00002.safetensors``.
    """
    found: list[str] = []
    for pattern in patterns:
        stem = pattern.removesuffix(_WEIGHTS)
        found.append(pattern if stem == pattern else f"{stem}.{variant}{_WEIGHTS}")
        if stem == "*":
            found.append(f"*.{variant}-*{_WEIGHTS}")
    return tuple(found)
