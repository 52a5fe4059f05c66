"""Models in hub repositories: the files and size of each component. Types only.

`model_zoo` holds the models with a short name; `locate` looks for their files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    """

    role: str
    repo_id: str
    needs: tuple[tuple[str, ...], ...]
    extras: tuple[str, ...] = ()
    num_parameters: int | None = None
    variant: str | None = None
    parameter_bytes: int = 4

    def as_variant(self, variant: str) -> HubPart:
        """Copy with the weight files of that variant: ``*.fp16.safetensors``."""
        needs = tuple(tuple(_as_variant(p, variant) for p in group) for group in self.needs)
        extras = tuple(_as_variant(p, variant) for p in self.extras)
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

    @property
    def num_parameters(self) -> int | None:
        """Parameters of all components; None if one is unknown or the model is embedded."""
        return _sum(tuple(part.num_parameters for part in self.parts))

    @property
    def num_bytes(self) -> int | None:
        """Approximate size of all components on disk; None if one is unknown."""
        return _sum(tuple(part.num_bytes for part in self.parts))


def _as_variant(pattern: str, variant: str) -> str:
    """``model.safetensors`` as ``model.fp16.safetensors``; other files keep their names."""
    if not pattern.endswith(_WEIGHTS):
        return pattern
    return f"{pattern.removesuffix(_WEIGHTS)}.{variant}{_WEIGHTS}"


def _sum(values: tuple[int | None, ...]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
