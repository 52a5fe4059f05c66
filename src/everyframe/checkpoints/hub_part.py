"""A model in hub repositories, part by part: which files each needs, and how large it is. No data.

Read next: `known`, the models that have a short name; `find`, which looks for their files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Bytes of a parameter in the variant of that name.
_VARIANT_BYTES = {"fp16": 2, "bf16": 2}
_WEIGHTS = ".safetensors"


@dataclass(frozen=True)
class HubPart:
    """One piece of a model in one hub repository.

    Attributes:
        role: ``denoiser``, ``vae``, ``text_encoder``, ``image_encoder``, ``controlnet``, or a name
            of the family's own.
        repo_id: hub id, ``owner/name``.
        needs: groups of file patterns; a file of each group must be there, any one of its
            alternatives will do. All patterns together are what is fetched.
        num_parameters: None where it is not known (a hub id that nobody listed).
        variant: which of several stored precisions of the weights, such as ``fp16``.
        parameter_bytes: of a parameter as it is stored where there is no variant.
    """

    role: str
    repo_id: str
    needs: tuple[tuple[str, ...], ...]
    extras: tuple[str, ...] = ()
    num_parameters: int | None = None
    variant: str | None = None
    parameter_bytes: int = 4

    def as_variant(self, variant: str) -> HubPart:
        """The same part with its weights in that variant: ``*.fp16.safetensors``."""
        needs = tuple(tuple(_as_variant(p, variant) for p in group) for group in self.needs)
        extras = tuple(_as_variant(p, variant) for p in self.extras)
        return replace(self, needs=needs, extras=extras, variant=variant)

    @property
    def patterns(self) -> tuple[str, ...]:
        """Every file pattern to fetch."""
        return tuple(pattern for group in self.needs for pattern in group) + self.extras

    @property
    def num_bytes(self) -> int | None:
        """About what the files take, by the bytes of a parameter. Nothing was asked of the hub."""
        if self.num_parameters is None:
            return None
        return self.num_parameters * _VARIANT_BYTES.get(self.variant or "", self.parameter_bytes)


@dataclass(frozen=True)
class KnownModel:
    """A model with a short name.

    Attributes:
        embedded: folder inside this package that holds the whole model, else None and `parts`.
        licence: of the weights, as far as we know; each repository's own card decides.
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
        """Of all parts together; None where one is not known or the model is embedded."""
        return _sum(tuple(part.num_parameters for part in self.parts))

    @property
    def num_bytes(self) -> int | None:
        """About what all parts take on disk; None where one is not known."""
        return _sum(tuple(part.num_bytes for part in self.parts))


def _as_variant(pattern: str, variant: str) -> str:
    """``model.safetensors`` as ``model.fp16.safetensors``; what holds no weights stays."""
    if not pattern.endswith(_WEIGHTS):
        return pattern
    return f"{pattern.removesuffix(_WEIGHTS)}.{variant}{_WEIGHTS}"


def _sum(values: tuple[int | None, ...]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
