"""Model specs and module builders of the families that have stages of their own.

Such a family defines where its files are (`checkpoint.py`), how each component is built
(`components.py`) and how checkpoint keys map to the module's (key maps); the rest is here. Its
stages load one component at a time. Torch is imported only when a component is built. Diffusers
pipelines, which load all components together, have their own in `everyframe.diffusers_pipelines`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from everyframe.checkpoints.cache_file import CacheFile
from everyframe.checkpoints.download import fetch_parts
from everyframe.checkpoints.folder import read_json
from everyframe.checkpoints.hub_part import HubPart
from everyframe.checkpoints.locate import PartLocation
from everyframe.core.errors import CorruptRunError
from everyframe.core.options import FamilyOptions
from everyframe.core.plan import Settings
from everyframe.runtime.interface import DryRunCall, MemorySaving
from everyframe.runtime.patchable import NO_PATCHES, WeightPatches, WeightTable

if TYPE_CHECKING:
    from torch import nn

    from everyframe.checkpoints.key_map import KeyMap
    from everyframe.checkpoints.tensor_file import TensorFile


#: Names of the components that files of LoRAs mean which name none.
DENOISERS = ("denoiser", "unet")


class ModuleBuilder:
    """Base class that builds a model's components from its configs."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the components."""
        raise NotImplementedError

    def build(self, component: str) -> nn.Module:
        """Build one component without weights, on torch's current default device."""
        raise NotImplementedError

    def outputs(self, component: str) -> tuple[str, ...]:
        """Submodules whose results the engine receives, in float32 or wider."""
        raise NotImplementedError

    @cached_property
    def num_elements(self) -> Mapping[str, Mapping[str, int]]:
        """Elements of each tensor of each component.

        Counted once and saved in the cache folder, because building is slow. Each later build is
        checked against the saved counts.
        """
        file = self._count
        saved = _counted(file.read(), self.parts)
        if saved is not None:
            return saved
        from everyframe.runtime.meta_init import count_elements

        found = {name: count_elements(self.empty(name)) for name in self.parts}
        file.write(found)
        return found

    @property
    def _count(self) -> CacheFile:
        return CacheFile("sizes", f"{type(self).__module__}: {self!r}")

    @cached_property
    def _made(self) -> dict[str, nn.Module]:
        return {}

    @cached_property
    def _rehearsed(self) -> set[str]:
        return set()

    def empty(self, component: str) -> nn.Module:
        """One component on meta. Every call returns the same module; do not change it."""
        if component not in self._made:
            self._made[component] = self._built(component)
        return self._made[component]

    def taken(self, component: str) -> nn.Module:
        """One component on meta that the caller owns and may fill and change.

        It reuses the module of `empty` unless a dry run had it, and builds another one then:
        building takes longer than everything else in a plan.
        """
        made = self._made.pop(component, None)  # before the question: a dry run may begin now
        if made is None or component in self._rehearsed:
            return self._built(component)
        return made

    def _built(self, component: str) -> nn.Module:
        from everyframe.runtime.meta_init import build_on_meta, count_elements

        module = build_on_meta(partial(self.build, component))
        counted: Mapping[str, Mapping[str, int]] = vars(self).get("num_elements", {})
        if counted and counted[component] != count_elements(module):
            file = self._count
            file.remove()
            raise CorruptRunError(
                f"{file.path} held other sizes than those of this model's {component}, so its plan "
                "is wrong; the file is removed now, do it again"
            )
        return module

    def _for_dry_runs(self, component: str) -> nn.Module:
        """One component that a dry run may cast and swap layers of; it never gets weights."""
        self._rehearsed.add(component)
        return self.empty(component)

    def rehearsal(
        self,
        stage: str,
        component: str,
        call: Callable[[Any, str], object],
        num_calls: float,
        *told: Hashable,
    ) -> DryRunCall:
        """The dry-run call of a component, which its stage makes `num_calls` times per video.

        `told` is what it depends on besides the components' sizes. See `DryRunCall`.
        """
        return DryRunCall(
            stage,
            component,
            partial(self._for_dry_runs, component),
            call,
            num_calls,
            (repr(self), stage, component, *told),
            self.outputs(component),
        )


def _counted(data: Any, parts: Sequence[str]) -> dict[str, dict[str, int]] | None:
    """Validate cached element counts by component and tensor; None if they do not fit."""
    if not isinstance(data, dict) or list(data) != list(parts):
        return None
    for each in data.values():
        if not isinstance(each, dict):
            return None
        if not all(type(number) is int and number >= 0 for number in each.values()):
            return None
    return data


@dataclass(frozen=True)
class ComponentFiles:
    """Expected contents of a component's files.

    Attributes:
        empty: returns the module on meta.
        weights: a file, a folder or an opened checkpoint.
        keys: maps the checkpoint's keys to the module's.
    """

    empty: Callable[[], nn.Module]
    weights: Path | TensorFile
    keys: KeyMap


class SpecFiles(Protocol):
    """Locations of a model's components, as a family's `checkpoint.py` finds them."""

    def missing(self) -> tuple[str, ...]:
        """Files to download first, one line each."""
        ...


_Options = TypeVar("_Options", bound=FamilyOptions)
_Files = TypeVar("_Files", bound=SpecFiles)
_Sizes = TypeVar("_Sizes", bound=ModuleBuilder)
_Model = TypeVar("_Model", bound="NativeModelSpec")  # type: ignore[type-arg]


@dataclass(frozen=True)
class NativeModelSpec(ABC, Generic[_Options, _Files, _Sizes]):
    """One checkpoint of a family with its own stages: configs read, weights not."""

    name: str
    options: _Options
    files: _Files
    sizes: _Sizes
    patched: WeightPatches = field(default=NO_PATCHES, kw_only=True, compare=False, repr=False)

    @abstractmethod
    def weights(self, component: str) -> tuple[Path | TensorFile, KeyMap]:
        """Location of a component's weights, and the key map from their names to the module's."""

    @abstractmethod
    def fetched(self: _Model) -> _Model:
        """The same model after downloading all of its files, some of which are missing now."""

    @abstractmethod
    def savings(self, component: str, settings: Settings) -> Iterator[MemorySaving]:
        """Memory savings for a component; see `DryRunSpec.savings`."""

    @property
    def components_on_disk(self) -> tuple[str, ...]:
        """The components, in the order in which their files enter the model's digest."""
        return self.sizes.parts

    def missing(self) -> tuple[str, ...]:
        """Files to download first, one line each."""
        return self.files.missing()

    def fetch(self: _Model) -> _Model:
        """The same model with all of its files on this disk, downloaded if missing."""
        return self.fetched().with_patches(self.patched) if self.missing() else self

    def weight_tables(self) -> Mapping[str, WeightTable]:
        """Parameters of each component."""
        return {
            name: WeightTable(
                type(module := self.sizes.empty(name)).__name__,
                {key: tuple(each.shape) for key, each in module.named_parameters()},
                name in DENOISERS,
            )
            for name in self.components_on_disk
        }

    def with_patches(self: _Model, patched: WeightPatches) -> _Model:
        """The same model, which loads with these patches."""
        return replace(self, patched=patched)

    def patched_weights(self, component: str) -> tuple[TensorFile, KeyMap]:
        """`weights`, opened, with the patches of LoRAs."""
        from everyframe.checkpoints.patched_file import patched
        from everyframe.checkpoints.tensor_file import open_checkpoint

        weights, keys = self.weights(component)
        patches = self.patched.patches.get(component, {})
        return patched(open_checkpoint(weights), keys, patches), keys

    def weight_files(self) -> tuple[str, ...]:
        """All weight files, without duplicates."""
        from everyframe.checkpoints.tensor_file import open_checkpoint

        found: dict[str, None] = {}
        for name in self.components_on_disk:
            weights, _ = self.weights(name)
            found |= dict.fromkeys(map(str, open_checkpoint(weights).files))
        return tuple(found)

    def contents(self) -> Iterator[ComponentFiles]:
        """Expected contents of each component's files. Call only when no file is missing."""
        for name in self.components_on_disk:
            yield ComponentFiles(partial(self.sizes.empty, name), *self.weights(name))


_Key = TypeVar("_Key")


@dataclass(frozen=True)
class ComponentSource:
    """Source of one component: a path on this disk or a hub repository.

    `path` is None until it is downloaded. `where` is its name in messages and records.
    """

    where: str
    path: Path | None
    part: PartLocation | None = None

    def missing(self) -> tuple[str, ...]:
        """Files to download, one line each."""
        return () if self.part is None else self.part.to_fetch()

    def config(self, name: str = "config.json") -> dict[str, Any] | None:
        """The parsed JSON file beside the weights, or None if there is none."""
        if self.path is None:
            return None
        folder = self.path if self.path.is_dir() else self.path.parent
        return read_json(folder / name) if (folder / name).is_file() else None


def missing(sources: Iterable[ComponentSource]) -> tuple[str, ...]:
    """Files to download for these components, one line each."""
    return tuple(line for source in sources for line in source.missing())


def downloaded(
    sources: Mapping[_Key, ComponentSource], of_part: Callable[[HubPart], ComponentSource]
) -> dict[_Key, ComponentSource]:
    """Download all files of these components; ``of_part(part)`` makes the source of a local one."""
    places = {place.part.part: place.part for place in sources.values() if place.part is not None}
    # All at once, so that somebody without a network is told of all that is missing.
    found = {place.part: of_part(place.part) for place in fetch_parts([*places.values()])}
    return {
        name: source if source.part is None else found[source.part.part]
        for name, source in sources.items()
    }
