"""Input files of a request, sent to a machine that does not have them. Imports no torch.

Images and videos are sent. Models, LoRAs and components are too large for that: they have to be at
the same place on each machine, and relative names become absolute ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from everyframe.checkpoints.locate import is_listed
from everyframe.core.paths import replace_file, split_paths
from everyframe.core.request import Request
from everyframe.engine.records.record_schema import GIVEN, option_facts


@dataclass(frozen=True)
class InputFiles:
    """Input files as they travel.

    Attributes:
        names: for each text of the request that names files or folders, the names in the copy.
        contents: contents of the files by name in the copy, as uint8 (n,).
    """

    names: Mapping[str, tuple[str, ...]]
    contents: Mapping[str, Any]

    def write(self, folder: Path) -> dict[str, str]:
        """Write the files into `folder`; return the new path for each text of the request."""
        for name, content in self.contents.items():
            path = folder / name
            assert path.resolve().is_relative_to(folder.resolve()), name
            replace_file(path, bytes(content))
        return {
            text: ",".join(str(folder / name) for name in names)
            for text, names in self.names.items()
        }

    def given_names(self, folder: Path) -> dict[str, str]:
        """For each file or folder that `write` makes in `folder`, its name in the request."""
        return {
            str(folder / name): part
            for text, names in self.names.items()
            for part, name in zip(text.split(",") if len(names) > 1 else [text], names, strict=True)
        }


def read_inputs(
    request: Request | None, place: Path, named: Mapping[str, Any] | None = None
) -> InputFiles:
    """Read the images, videos and folders of frames that a request names, seen from `place`.

    `named` are options besides, by name; models among them stay where they are.

    Raises:
        OSError: one can't be read.
    """
    names: dict[str, tuple[str, ...]] = {}
    contents: dict[str, Any] = {}
    others = {name: value for name, value in (named or {}).items() if not _names_model(name)}
    for text in _texts([[] if request is None else _values(request), others]):
        paths = [place / os.path.expanduser(each) for each in split_paths(text, place)]
        if text in names or not all(map(_exists, paths)):
            continue
        # The name itself stays: it is in the record.
        names[text] = tuple(f"{len(names)}/{at}/{path.name}" for at, path in enumerate(paths))
        for name, path in zip(names[text], paths, strict=True):
            inside = sorted(path.rglob("*")) if path.is_dir() else [path]
            for each in filter(Path.is_file, inside):
                content = np.frombuffer(each.read_bytes(), np.uint8)
                contents[str(Path(name, each.relative_to(path)))] = content
    return InputFiles(names, contents)


def absolute_models(request: Request, place: Path) -> dict[str, str]:
    """The absolute path for each model, LoRA and component that a request names by its place."""
    given = [request.model, request.preview_decoder, *request.components.values()]
    own = {k: v for k, v in request.family_options.items() if _names_model(k)}
    found = {lora.file: lora.path for lora in request.loras} | _models_in([given, own])
    whole = {text: place / path for text, path in found.items()}
    return {text: str(path) for text, path in whole.items() if _exists(path) and str(path) != text}


def _models_in(value: Any) -> dict[str, Path]:
    """The path for each text that names a model by its place."""
    texts = [part.strip() for text in _texts(value) for part in text.split(",")]
    return {text: Path(os.path.expanduser(text)) for text in texts if not is_listed(text)}


def _names_model(name: str) -> bool:
    """Whether that option names what is too large to be sent."""
    is_besides = name in ("loras", "components", "preview_decoder")
    return is_besides or bool(option_facts(name).get("names_model"))


def _values(request: Request) -> list[Any]:
    """Values of all options that may name images or videos."""
    own = request.family_options
    return [
        *(getattr(request, name) for name in GIVEN),
        *(value for name, value in own.items() if option_facts(name).get("names_files")),
    ]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, (str, Path)):
        yield str(value)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from () if "prompt" in str(name) else _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with a NUL: no name of a file
        return False
