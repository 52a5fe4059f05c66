"""A model whose stages load one component at a time: what the families with their own stages share.

Such a family says where its parts lie (`checkpoint.py`), how each is built (`components.py`) and
how the names in its files become the module's (`weights.py`); the rest follows here. No torch
before a part is asked for. Not here: diffusers pipelines, whose parts are loaded together.
Read next: `family.py` for what a model is asked, `job.py` for how its stages load a component.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from everyframe.core.options import FamilyOptions
from everyframe.core.plan import Plan, Settings
from everyframe.families.empty import Empty
from everyframe.families.family import Saving, Stage

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from everyframe.checkpoints.strict import KeyMap
    from everyframe.checkpoints.tensors import TensorFile
    from everyframe.parallel.team import Teams


@dataclass(frozen=True)
class Contents:
    """What the files of a component must hold.

    `empty` gives its module on meta, `weights` is a file, a folder or what was opened of them, and
    `keys` how the names there become the module's.
    """

    empty: Callable[[], nn.Module]
    weights: Path | TensorFile
    keys: KeyMap


class Files(Protocol):
    """Where a model's parts lie, as a family's `checkpoint.py` finds them."""

    def missing(self) -> tuple[str, ...]:
        """What must be fetched first, a line each."""
        ...


_Options = TypeVar("_Options", bound=FamilyOptions)
_Files = TypeVar("_Files", bound=Files)
_Sizes = TypeVar("_Sizes", bound=Empty)
_Model = TypeVar("_Model", bound="StagedModel")  # type: ignore[type-arg]


@dataclass(frozen=True)
class StagedModel(ABC, Generic[_Options, _Files, _Sizes]):
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
    def savings(self, component: str, settings: Settings) -> Iterator[Saving]:
        """Ways to run a component in less memory."""

    @abstractmethod
    def shared_stages(self, plan: Plan, clip: int, teams: Teams) -> Sequence[Stage]:
        """The stages of one clip for one rank of several."""

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
        from everyframe.checkpoints.tensors import open_checkpoint

        found: dict[str, None] = {}
        for name in self.components_on_disk:
            weights, _ = self.weights(name)
            found |= dict.fromkeys(map(str, open_checkpoint(weights).files))
        return tuple(found)

    def contents(self) -> Iterator[Contents]:
        """What each component's files must hold; asked when nothing is missing any more."""
        for name in self.components_on_disk:
            yield Contents(partial(self.sizes.empty, name), *self.weights(name))

    def stages(self, plan: Plan, clip: int) -> Sequence[Stage]:
        """The stages of one clip where one device does all."""
        from everyframe.parallel.team import ONE

        return self.shared_stages(plan, clip, ONE)
