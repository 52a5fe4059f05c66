"""A model whose stages load one component at a time: what the families with their own stages share.

Such a family says where its parts lie (`checkpoint.py`), how each is built (`components.py`) and
how the names in its files become the module's (`weights.py`); the rest follows here. No torch
before a part is asked for. Not here: diffusers pipelines, whose parts are loaded together.
Read next: `interface.py` for what a model is asked, `stages.py` for how its stages load a
component.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from everyframe.checkpoints.key_map import KeyMap
    from everyframe.checkpoints.tensor_file import TensorFile


class ModuleBuilder:
    """Base of what makes a model's parts from its configs."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The components' names."""
        raise NotImplementedError

    def build(self, component: str) -> nn.Module:
        """One part, without weights, wherever torch makes tensors now."""
        raise NotImplementedError

    def outputs(self, component: str) -> tuple[str, ...]:
        """Which of its submodules' results leave for the engine, in float32 at least."""
        raise NotImplementedError

    @cached_property
    def num_elements(self) -> Mapping[str, Mapping[str, int]]:
        """Elements of each tensor of each component.

        Counted once and saved in the cache folder, for building takes a while. Whoever builds a
        part holds it against what was counted.
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
        """One part on meta, the same object at every call, to be looked at and not changed."""
        if component not in self._made:
            self._made[component] = self._built(component)
        return self._made[component]

    def taken(self, component: str) -> nn.Module:
        """One part on meta that is the caller's own, to be filled and changed.

        It is the one that was counted, if no dry run has had it, and built anew else: building
        takes longer than all that a plan asks of it.
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
        """One part that a dry run casts, and may swap layers of; none of it ever gets weights."""
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
        """A call of a component that a stage makes so often for one video; see `DryRunCall`.

        `told` is what it depends on beside the sizes of the parts.
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
    """Elements by component and tensor, if that is what was read."""
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
    """What the files of a component must hold.

    `empty` gives its module on meta, `weights` is a file, a folder or what was opened of them, and
    `keys` how the names there become the module's.
    """

    empty: Callable[[], nn.Module]
    weights: Path | TensorFile
    keys: KeyMap


class SpecFiles(Protocol):
    """Where a model's parts lie, as a family's `checkpoint.py` finds them."""

    def missing(self) -> tuple[str, ...]:
        """What must be fetched first, a line each."""
        ...


_Options = TypeVar("_Options", bound=FamilyOptions)
_Files = TypeVar("_Files", bound=SpecFiles)
_Sizes = TypeVar("_Sizes", bound=ModuleBuilder)
_Model = TypeVar("_Model", bound="NativeModelSpec")  # type: ignore[type-arg]


@dataclass(frozen=True)
class NativeModelSpec(ABC, Generic[_Options, _Files, _Sizes]):
    """One checkpoint, its configs read and its weights not."""

    name: str
    options: _Options
    files: _Files
    sizes: _Sizes

    @abstractmethod
    def weights(self, component: str) -> tuple[Path | TensorFile, KeyMap]:
        """Where a component's weights are, and how their names become the module's."""

    @abstractmethod
    def fetched(self: _Model) -> _Model:
        """The same model with all of its files on this disk, of which some are missing now."""

    @abstractmethod
    def savings(self, component: str, settings: Settings) -> Iterator[MemorySaving]:
        """Ways to run a component in less memory."""

    @property
    def components_on_disk(self) -> tuple[str, ...]:
        """The components in the order in which their files make up the model's digest."""
        return self.sizes.parts

    def missing(self) -> tuple[str, ...]:
        """What must be fetched first."""
        return self.files.missing()

    def fetch(self: _Model) -> _Model:
        """The same model with all of its files on this disk."""
        return self.fetched() if self.missing() else self

    def weight_files(self) -> tuple[str, ...]:
        """Every file that holds weights, each once."""
        from everyframe.checkpoints.tensor_file import open_checkpoint

        found: dict[str, None] = {}
        for name in self.components_on_disk:
            weights, _ = self.weights(name)
            found |= dict.fromkeys(map(str, open_checkpoint(weights).files))
        return tuple(found)

    def contents(self) -> Iterator[ComponentFiles]:
        """What each component's files must hold; asked when nothing is missing any more."""
        for name in self.components_on_disk:
            yield ComponentFiles(partial(self.sizes.empty, name), *self.weights(name))


_Key = TypeVar("_Key")


@dataclass(frozen=True)
class ComponentSource:
    """Where one part of a model is read from: a place on this disk, or a hub repository.

    `path` is None until the part is fetched. `where` is for people and for records.
    """

    where: str
    path: Path | None
    part: PartLocation | None = None

    def missing(self) -> tuple[str, ...]:
        """What must be fetched, a line each."""
        return () if self.part is None else self.part.to_fetch()

    def config(self, name: str = "config.json") -> dict[str, Any] | None:
        """The JSON file of that name beside the weights, None if it is not there."""
        if self.path is None:
            return None
        folder = self.path if self.path.is_dir() else self.path.parent
        return read_json(folder / name) if (folder / name).is_file() else None


def missing(sources: Iterable[ComponentSource]) -> tuple[str, ...]:
    """What must be fetched of these parts, a line each."""
    return tuple(line for source in sources for line in source.missing())


def downloaded(
    sources: Mapping[_Key, ComponentSource], of_part: Callable[[HubPart], ComponentSource]
) -> dict[_Key, ComponentSource]:
    """The same parts with all files on this disk; ``of_part(part)`` is the source of one there."""
    places = {place.part.part: place.part for place in sources.values() if place.part is not None}
    # All at once, so that somebody without a network is told of all that is missing.
    found = {place.part: of_part(place.part) for place in fetch_parts([*places.values()])}
    return {
        name: source if source.part is None else found[source.part.part]
        for name, source in sources.items()
    }
