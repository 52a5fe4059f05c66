"""Models whose weights can be patched as they are loaded, and the patches of a request. No torch.

`everyframe.adapters` makes the patches of LoRAs; a spec carries them to where its tensors are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from everyframe.checkpoints.digest import known_digest
from everyframe.core.errors import CheckpointError
from everyframe.core.plan import LoraPlan

if TYPE_CHECKING:
    from torch import nn

    from everyframe.checkpoints.patched_file import Patches
    from everyframe.checkpoints.tensor_file import TensorFile

LoraIdentity = tuple[str, float, str]
"""Hash of a LoRA's file, its strength and the component that was asked for."""


@dataclass(frozen=True)
class WeightTable:
    """Parameters of one component.

    Attributes:
        class_name: class of its module.
        shapes: shape of each parameter by name.
        is_denoiser: whether files without a component's name mean it.
        tied: groups of names that share one parameter.
    """

    class_name: str
    shapes: Mapping[str, tuple[int, ...]]
    is_denoiser: bool = False
    tied: tuple[tuple[str, ...], ...] = ()


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class WeightPatches:
    """Patches of a model's parameters.

    Attributes:
        patches: patches of each component by parameter.
        loras: the LoRAs that they come from, for the plan.
        notes: messages for the user.
        check: reads all values once; raises `CheckpointError` for what is not finite.
        known: identities of the LoRAs if their files were hashed before; None otherwise.
    """

    patches: Mapping[str, Patches] = field(default_factory=dict)
    loras: tuple[LoraPlan, ...] = ()
    notes: tuple[str, ...] = ()
    check: Callable[[], None] = _nothing
    known: Callable[[], Sequence[LoraIdentity] | None] = tuple


NO_PATCHES = WeightPatches()


@runtime_checkable
class PatchableSpec(Protocol):
    """A model whose weights can be patched."""

    @property
    def patched(self) -> WeightPatches:
        """The patches that it loads with."""
        ...

    def weight_tables(self) -> Mapping[str, WeightTable]:
        """Parameters of each component; no file's tensors are read."""
        ...

    def with_patches(self: Any, patched: WeightPatches) -> Any:
        """The same model, which loads with these patches."""
        ...


@dataclass(frozen=True)
class ReplacedComponents:
    """Files of single components.

    Attributes:
        tensors: of each component, by the names of its module.
        notes: messages for the user.
    """

    tensors: Mapping[str, TensorFile] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


NOTHING_REPLACED = ReplacedComponents()


@runtime_checkable
class ComponentSpec(Protocol):
    """A model of which single components can come from files of their own."""

    @property
    def component_names(self) -> Sequence[str]:
        """The components with weights."""
        ...

    @property
    def replaced(self) -> ReplacedComponents:
        """The files of single components that it loads from."""
        ...

    def component_table(self, component: str) -> WeightTable:
        """Parameters and persistent buffers of a component's module, built from its config."""
        ...

    def component_keys(self, component: str) -> Callable[[str], str | None]:
        """Names of the module by those in the model's own files."""
        ...

    def with_components(self: Any, replaced: ReplacedComponents) -> Any:
        """The same model, which loads these components from these files."""
        ...


def table_of_module(module: nn.Module) -> WeightTable:
    """Parameters and persistent buffers of a module, which may be on meta."""
    groups: dict[int, list[str]] = {}
    tensors = module.state_dict(keep_vars=True)
    for name, each in tensors.items():
        groups.setdefault(id(each), []).append(name)
    return WeightTable(
        type(module).__name__,
        {name: tuple(each.shape) for name, each in tensors.items()},
        tied=tuple(tuple(group) for group in groups.values() if len(group) > 1),
    )


def patches_of(model: object) -> WeightPatches:
    """The patches of a spec; none for one that can't have any."""
    return model.patched if isinstance(model, PatchableSpec) else NO_PATCHES


@runtime_checkable
class RestoredSpec(Protocol):
    """A model in memory whose patched weights are saved meanwhile, and put back."""

    @property
    def saved_bytes(self) -> int:
        """Bytes of the weights that are saved in host memory."""
        ...


def saved_bytes_of(model: object) -> int:
    """Host memory for weights that are put back after the run; 0 for models that are loaded."""
    return model.saved_bytes if isinstance(model, RestoredSpec) else 0


def notes_of(model: object) -> tuple[str, ...]:
    """Messages for the user on the component files and patches of a spec."""
    replaced = model.replaced if isinstance(model, ComponentSpec) else NOTHING_REPLACED
    return (*replaced.notes, *patches_of(model).notes)


def digest_with_loras(sha256: str, loras: Sequence[LoraIdentity]) -> str:
    """Hash of weights together with the LoRAs merged into them; `sha256` itself without any."""
    if not loras:
        return sha256
    return hashlib.sha256(json.dumps([sha256, [list(each) for each in loras]]).encode()).hexdigest()


def known_digest_with_loras(model: Any) -> str | None:
    """`digest_with_loras` of a spec whose files were all hashed before; None otherwise."""
    if model.missing():
        return None
    try:
        files = model.weight_files()
    except CheckpointError:  # missing weights; loading reports them
        return None
    sha256, loras = known_digest(files) if files else None, patches_of(model).known()
    return None if sha256 is None or loras is None else digest_with_loras(sha256, loras)
