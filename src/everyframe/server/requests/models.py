"""Models and LoRAs that clients may name, by registered names alone.

A client's name is looked up in a table; it never becomes a path or a hub id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyframe.checkpoints.locate import Location, locate, names_on_disk
from everyframe.core.errors import InputError, closest_names, did_you_mean
from everyframe.core.lora import parse_lora
from everyframe.server.errors import ApiError

#: Ending of the files of LoRAs.
_LORA = ".safetensors"


@dataclass(frozen=True)
class RegisteredModel:
    """A model that clients may request.

    Attributes:
        name: its name in requests.
        target: name, folder or hub id, as the library takes it.
        location: its files on this disk.
    """

    name: str
    target: str
    location: Location

    @property
    def is_embedded(self) -> bool:
        """Whether it is the model of the package, which a request without a model means."""
        return self.location.kind == "embedded"

    @property
    def family(self) -> str | None:
        """Its family; None if it can be found only in its configs."""
        return self.location.known.family if self.location.known else None

    @property
    def title(self) -> str:
        """Title in one line."""
        return self.location.known.title if self.location.known else self.name

    @property
    def licence(self) -> str:
        """Licence of the weights; empty if unknown."""
        return self.location.known.licence if self.location.known else ""


class ModelRegistry:
    """The models of a server, by name; the first is the default."""

    def __init__(self, models: Sequence[str]) -> None:
        """`models` as in `ServerSettings`. Raises `InputError` for one that is not on this disk."""
        found = [_parse_model(each) for each in models or names_on_disk()]
        self._models = {each.name.casefold(): each for each in found}
        if not found:
            raise InputError("no model is on this disk; `everyframe models` lists what to fetch")
        self.default = found[0]

    def __iter__(self) -> Iterator[RegisteredModel]:
        return iter(self._models.values())

    def get(self, name: str) -> RegisteredModel:
        """The model of that name. Raises `ApiError` for any other."""
        found = self._models.get(name.strip().casefold())
        if found is None:
            hint = did_you_mean(name, [each.name for each in self])
            raise ApiError(
                "invalid_value",
                f"model {name[:80]!r} is not served here; served are {self._names()}{hint}",
                "model",
            )
        return found

    def of_request(self, options: Mapping[str, Any]) -> RegisteredModel:
        """The model of an earlier request. Raises `ApiError` if it is not served any more."""
        target = options.get("model")
        for each in self:
            if each.target == target or (target is None and each.is_embedded):
                return each
        raise ApiError(
            "invalid_value",
            "the model of that video is not served here any more; give model, one of "
            f"{self._names()}",
            "model",
        )

    def name_of(self, model: str) -> str:
        """The name by which clients know a model of a plan, which may be a folder."""
        for each in self:
            if model in (each.target, each.location.name, str(each.location.path)):
                return each.name
        return Path(model).name

    def _names(self) -> str:
        return ", ".join([each.name for each in self][:10])


def _parse_model(text: str) -> RegisteredModel:
    name, equals, target = text.partition("=")
    if equals and not (name.strip() and target):
        raise InputError(f"models must be NAME or NAME=FOLDER, got {text!r}")
    location = locate(target if equals else text)
    if not location.is_complete:
        raise InputError(
            f"model {text!r} is not whole on this disk; `everyframe models` says what to fetch"
        )
    own = Path(location.name).name if location.path is not None else location.name
    return RegisteredModel(name if equals else own, target if equals else text, location)


class LoraRegistry:
    """LoRAs in the server's folder, by the names of their files without ending."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        """Names of all LoRAs now in the folder."""
        return sorted(self._files())

    def parse(self, given: Any) -> list[dict[str, Any]]:
        """LoRAs of a request as data: ``NAME[:STRENGTH][@COMPONENT]``, or objects with a name.

        Raises:
            ApiError: an entry has another form, or names no LoRA of the folder.
        """
        listed = given if isinstance(given, list) else [given]
        return [self._parse(each) for each in listed]

    def check_served(self, loras: Iterable[Mapping[str, Any]]) -> None:
        """Raise `ApiError` if a LoRA of an earlier request is not in the folder any more."""
        for file in (Path(each["file"]) for each in loras):
            if file not in self._files().values():
                text = f"the LoRA {file.stem!r} of that video is not served here any more"
                raise ApiError("invalid_value", f"{text}; give loras, or an empty list", "loras")

    def _parse(self, given: Any) -> dict[str, Any]:
        try:
            read = parse_lora(_as_lora(given))
        except InputError as error:
            raise ApiError("invalid_value", str(error), "loras") from None
        files = self._files()
        path = files.get(read.file.removesuffix(_LORA))
        if path is None:
            there = ", ".join(closest_names(read.file, files, 5)) or ", ".join(sorted(files)[:5])
            raise ApiError(
                "invalid_value",
                f"there is no LoRA {read.file[:80]!r}"
                + (f"; there are {there}" if there else "; this server has none"),
                "loras",
            )
        return {"file": str(path), "strength": read.strength, "component": read.component}

    def _files(self) -> Mapping[str, Path]:
        if self._folder is None:
            return {}
        found = (each for each in self._folder.iterdir() if each.suffix == _LORA)
        return {each.stem: each.absolute() for each in found if each.is_file()}


def _as_lora(given: Any) -> Any:
    """Convert another server's object ``{name, scale}`` to ours."""
    if not isinstance(given, Mapping):
        return given
    if "path" in given or "file" in given or "lora_path" in given:
        raise ApiError(
            "not_supported", "clients do not name paths of the server; give a LoRA's name", "loras"
        )
    names = {"name": "file", "lora_name": "file", "scale": "strength", "lora_strength": "strength"}
    return {names.get(str(key), str(key)): value for key, value in given.items()}
