"""Base of the registry's entries of families with stages of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from everyframe.checkpoints.locate import Location
from everyframe.core.options import FamilyOptions
from everyframe.runtime.components.component_files import CheckpointFiles
from everyframe.runtime.model_spec import NativeModelSpec

_Options = TypeVar("_Options", bound=FamilyOptions)
_Files = TypeVar("_Files", bound=CheckpointFiles)


class NativeFamily(ABC, Generic[_Options, _Files]):
    """Registry entry of a family with its own stages; see `Family`."""

    name: str
    title: str
    options: type[FamilyOptions]
    spec: type[NativeModelSpec[Any, Any, Any]]

    @abstractmethod
    def find_files(self, location: Location, options: _Options) -> _Files | None:
        """Files of the model at that location; None if it is another family's."""

    def variant(self, files: _Files) -> str:
        """Name of the model's variant in its title."""
        return self.title

    def title_of(self, location: Location, files: _Files) -> str:
        """Display name of a model: the known one, else its variant and the name as given."""
        return location.title(self.variant(files))

    def recognise(self, location: Location, options: FamilyOptions) -> Any:
        """The model at that location if its configs are of this family; reads no weights."""
        assert isinstance(options, self.options)
        files = self.find_files(location, options)  # type: ignore[arg-type]
        if files is None:
            return None
        return self.spec.read(location.name, self.title_of(location, files), files, options)
