"""Identify the inputs of a run for its record: files by name and hash, models by name, text as is.

A record contains no folder of this machine and no user name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from everyframe.core.errors import InputError
from everyframe.core.options import flag_of
from everyframe.core.paths import split_paths
from everyframe.media.frame_source import picture_files
from everyframe.media.video import Video

_CHUNK_BYTES = 1 << 22


def public_name(path_or_name: str) -> str:
    """Strip the parent folders of a path that exists on this disk; keep other text unchanged."""
    path = os.path.expanduser(path_or_name)
    return Path(path).resolve().name if os.path.exists(path) else path_or_name


def model_names(value: Any) -> Any:
    """Strip folders from the names of models and components (one, a list, or comma-separated)."""
    if isinstance(value, (list, tuple)):
        return [model_names(each) for each in value]
    if not isinstance(value, (str, Path)):
        return plain(value)
    return ",".join(map(public_name, split_paths(os.fspath(value))))


def plain(value: Any) -> Any:
    """Convert an option's value to JSON types; text stays text even if such a file exists."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Path):
        return public_name(os.fspath(value))
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    # An object given in Python; a picture counts as one, whichever file it was read from.
    kind = Image.Image if isinstance(value, Image.Image) else type(value)
    return f"<{kind.__name__}>"


def _is_file(value: Any, key: str = "") -> bool:
    """Whether the value of option `key` names a file or folder here. Prompts never do."""
    is_path = isinstance(value, Path) or (isinstance(value, str) and "prompt" not in key)
    return is_path and os.path.exists(value)


def file_identities(value: Any) -> Any:
    """Replace paths of images and videos by name and hash; other text is returned unchanged.

    Accepts one value, a list, a comma-separated list or a mapping.
    """
    if isinstance(value, Mapping):
        return _with_files(value, "")
    if isinstance(value, (list, tuple)) and not all(isinstance(v, (int, float)) for v in value):
        return [file_identities(each) for each in value]
    if isinstance(value, (str, Path)):
        if _is_file(value):
            return identity(value)
        parts = [part.strip() for part in os.fspath(value).split(",")]
        return file_identities(parts) if any(map(_is_file, parts)) else os.fspath(value)
    return list(value) if isinstance(value, (list, tuple)) else identity(value)


def _with_files(value: Any, key: str) -> Any:
    """Replace file names at any depth of a value; everything else is unchanged."""
    if "prompt" in key or key == "generator":
        return plain(value)  # words, in whatever form, and seeds
    if isinstance(value, Mapping):
        return {str(name): _with_files(each, str(name)) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_files(each, key) for each in value]
    return identity(value) if _is_file(value, key) else plain(value)


def identity(source: Any) -> Any:
    """Identify an input: a file by name and hash, a Python object by hash, a list item by item."""
    if isinstance(source, (list, tuple)):
        return [identity(each) for each in source]
    if isinstance(source, (str, Path)):
        path = Path(source)
        return {"file": path.name, "sha256": content_hash(path)}
    return {"sha256": hashlib.sha256(as_bytes(source)).hexdigest()}


def content_hash(path: Path) -> str:
    """sha256 of a file, or of the names and hashes of the images in a folder."""
    hasher = hashlib.sha256()
    if path.is_file():
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
        return hasher.hexdigest()
    for picture in picture_files(path):
        hasher.update(os.fsencode(f"{picture.name}\n{content_hash(picture)}\n"))
    return hasher.hexdigest()


def as_bytes(value: Any) -> bytes:
    """Values of a tensor, array or video as bytes, for hashing."""
    if isinstance(value, torch.Tensor):
        # NumPy has no bfloat16 and reads no device memory.
        value = value.detach().to("cpu", torch.float32)
    if isinstance(value, Video):
        value = value.frames
    return np.ascontiguousarray(np.asarray(value)).tobytes()


def find_files(name: str, given: Any, parameter: str | None = None) -> Any:
    """Find recorded files by name in the working folder; return anything else unchanged.

    `parameter`: that of a pipeline which has them, for messages.
    """
    if isinstance(given, list):
        return [find_files(name, each, parameter) for each in given]
    if isinstance(given, dict) and "sha256" not in given:
        return {key: find_files(name, each, parameter or key) for key, each in given.items()}
    return _find_given(name, given, parameter) if isinstance(given, dict) else given


def _find_given(name: str, identity: Mapping[str, str], parameter: str | None) -> str:
    file = identity.get("file")
    is_own = name == "option" and parameter is not None
    flag = f"{flag_of(name)} {parameter}=FILE" if is_own else f"{flag_of(name)} FILE"
    if file is None:
        raise InputError(f"the video was made from {name} given in Python; give it again ({name}=)")
    path = Path(file)
    if not path.exists():
        raise InputError(f"the video was made from the file {file!r}; give it again by {flag}")
    if content_hash(path) != identity.get("sha256"):
        raise InputError(
            f"{file!r} in this folder is not the file that the video was made from "
            f"(its hash differs); give the right one by {flag}"
        )
    return str(path)
