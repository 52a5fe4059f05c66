"""One LoRA of a request: its file, strength and component. Plain data.

`everyframe.adapters` reads the file; this module only parses how a person names it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Any

from everyframe.core.errors import InputError
from everyframe.core.options import shown
from everyframe.core.paths import expand_path

#: What the text of a LoRA looks like, for messages.
FORM = "FILE[:STRENGTH][@COMPONENT]"

#: Environment variable of a folder whose LoRAs can be given by their names, for servers.
FOLDER = "EVERYFRAME_LORAS"
_SUFFIXES = (".safetensors",)

#: Largest strength by magnitude; beyond it a strength is a slip.
MAX_STRENGTH = 100.0

_COMPONENT = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Lora:
    """A LoRA as the request names it.

    Attributes:
        file: path of the file.
        strength: factor of the whole change; 0 changes nothing.
        component: name of the component that it changes, or ``high``, ``low`` or ``both`` of a
            model with two denoisers; empty if the file or the model leaves no choice.
        sha256: hash that the file must have; None for any.
    """

    file: str
    strength: float = 1.0
    component: str = ""
    sha256: str | None = None

    def __post_init__(self) -> None:
        if not self.file:
            raise InputError(f"loras must be {FORM}, got no file name")
        if not math.isfinite(self.strength) or abs(self.strength) > MAX_STRENGTH:
            raise InputError(
                f"loras: the strength of {self.name} must be a number between {-MAX_STRENGTH:g} "
                f"and {MAX_STRENGTH:g}, got {self.strength}"
            )
        if self.component and not _COMPONENT.fullmatch(self.component):
            raise InputError(
                f"loras: {shown(self.component)} is no name of a component, such as transformer_2"
            )

    @property
    def path(self) -> Path:
        """Path of the file; a bare name may be one of the folder in `FOLDER`.

        Raises:
            InputError: no file can have this name.
        """
        given = expand_path(self.file, "loras")
        folder = os.environ.get(FOLDER)
        if folder and given.name == self.file and not given.exists():
            for name in (self.file, *(f"{self.file}{suffix}" for suffix in _SUFFIXES)):
                registered = expand_path(folder, FOLDER) / name
                if registered.is_file():
                    return registered
        return given

    @property
    def name(self) -> str:
        """The file's name without its folders."""
        return self.path.name

    def __str__(self) -> str:
        at = f"@{self.component}" if self.component else ""
        return f"{self.name}:{self.strength:g}{at}"


def parse_loras(given: Any) -> tuple[Lora, ...]:
    """The LoRAs of an option's value: one or a list of texts, paths, pairs, mappings or `Lora`.

    Raises:
        InputError: an entry is none of these.
    """
    is_one = isinstance(given, (str, os.PathLike, Lora, Mapping)) or _is_pair(given)
    listed = [given] if is_one else given
    if not isinstance(listed, (list, tuple)):
        raise InputError(f"loras must be a list of {FORM}, got {shown(given)}")
    return tuple(parse_lora(each) for each in listed)


def parse_lora(given: Any) -> Lora:
    """One LoRA: ``"style.safetensors:0.8"``, a path, ``(path, 0.8)``, or a mapping of the fields.

    Raises:
        InputError: none of these.
    """
    if isinstance(given, Lora):
        return given
    if isinstance(given, str):
        return _of_text(given)
    if isinstance(given, os.PathLike):
        return Lora(os.fspath(given))
    if _is_pair(given):
        return Lora(os.fspath(given[0]), _number(given[1]))
    if isinstance(given, Mapping) and _is_mapping_of_lora(given):
        return Lora(**{**given, "file": os.fspath(given["file"]),
                       "strength": _number(given.get("strength", 1.0))})  # fmt: skip
    raise InputError(f"loras must be {FORM}, got {shown(given)}")


_FIELDS: Mapping[str, Any] = {
    "file": (str, os.PathLike), "strength": Real, "component": str,
    "sha256": (str, NoneType),
}  # fmt: skip


def _is_mapping_of_lora(given: Mapping[Any, Any]) -> bool:
    """Whether the keys are those of a `Lora`, and their values of its types."""
    return "file" in given and all(
        isinstance(value, _FIELDS.get(key, ())) and not isinstance(value, bool)
        for key, value in given.items()
    )


def _number(strength: float) -> float:
    """The strength; infinity for a whole number beyond float."""
    try:
        return float(strength)
    except OverflowError:
        return math.inf


def _is_pair(given: Any) -> bool:
    return (
        isinstance(given, (tuple, list))
        and len(given) == 2
        and isinstance(given[0], (str, os.PathLike))
        and isinstance(given[1], Real)
        and not isinstance(given[1], bool)
    )


def _of_text(text: str) -> Lora:
    file, at, component = text.rpartition("@")
    if not at or not _COMPONENT.fullmatch(component):
        file, component = text, ""
    path, colon, strength = file.rpartition(":")
    try:
        return Lora(path, float(strength), component) if colon else Lora(file, 1.0, component)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        return Lora(file, 1.0, component)  # the colon is one of the path
