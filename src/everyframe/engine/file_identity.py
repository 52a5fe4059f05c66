"""What was given, as a record knows it: files by name and hash, models by name, words as words.

No folder of this machine and no name of its user gets into a record. Read next: `provenance.py`.
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
from everyframe.media.frame_source import picture_files
from everyframe.media.video import Video

_CHUNK_BYTES = 1 << 22


def public_name(path_or_name: str) -> str:
    """What exists on this disk without the folders above it, everything else as it is."""
    path = os.path.expanduser(path_or_name)
    return Path(path).resolve().name if os.path.exists(path) else path_or_name


def model_names(value: Any) -> Any:
    """Models and their parts without folders; several may be given, in a list or with commas."""
    if isinstance(value, (list, tuple)):
        return [model_names(each) for each in value]
    if not isinstance(value, (str, Path)):
        return plain(value)
    text = os.fspath(value)
    is_one = os.path.exists(os.path.expanduser(text))
    return public_name(text) if is_one else ",".join(map(public_name, text.split(",")))


def plain(value: Any) -> Any:
    """An option's value as JSON can hold it; a text is a text, whatever lies in this folder."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Path):
        return public_name(os.fspath(value))
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    # An object given in Python; a picture is one whichever file it was read from.
    kind = Image.Image if isinstance(value, Image.Image) else type(value)
    return f"<{kind.__name__}>"


def _is_file(value: Any, key: str = "") -> bool:
    """Whether that is a file or folder here, by the name of what it is given for: prompts are
    words, also where something is called so."""
    is_path = isinstance(value, Path) or (isinstance(value, str) and "prompt" not in key)
    return is_path and os.path.exists(value)


def file_identities(value: Any) -> Any:
    """What was given as a picture or video: by name and hash; words that are no files as they are.

    Several may be given, in a list or with commas, or by name among other values.
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
    """A value in which files may be named, however deep; whatever else it holds as it is."""
    if "prompt" in key or key == "generator":
        return plain(value)  # words, in whatever form, and seeds
    if isinstance(value, Mapping):
        return {str(name): _with_files(each, str(name)) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_files(each, key) for each in value]
    return identity(value) if _is_file(value, key) else plain(value)


def identity(source: Any) -> Any:
    """A file by its name and hash; what was given in Python by its hash; a list of either."""
    if isinstance(source, (list, tuple)):
        return [identity(each) for each in source]
    if isinstance(source, (str, Path)):
        path = Path(source)
        return {"file": path.name, "sha256": content_hash(path)}
    return {"sha256": hashlib.sha256(as_bytes(source)).hexdigest()}


def content_hash(path: Path) -> str:
    """sha256 of a file; of a folder, that of the names and hashes of its pictures."""
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
    """The values of a tensor, an array or a video, for a hash."""
    if isinstance(value, torch.Tensor):
        # NumPy has no bfloat16 and sees no other device's memory.
        value = value.detach().to("cpu", torch.float32)
    if isinstance(value, Video):
        value = value.frames
    return np.ascontiguousarray(np.asarray(value)).tobytes()


def find_files(name: str, given: Any) -> Any:
    """Files by their recorded names in the working folder; anything else as it is."""
    if isinstance(given, list):
        return [find_files(name, each) for each in given]
    if isinstance(given, dict) and "sha256" not in given:
        return {key: find_files(name, each) for key, each in given.items()}
    return _find_given(name, given) if isinstance(given, dict) else given


def _find_given(name: str, identity: Mapping[str, str]) -> str:
    file = identity.get("file")
    flag = f"--{name.replace('_', '-')}"
    if file is None:
        raise InputError(f"the video was made from {name} given in Python; give it again ({name}=)")
    path = Path(file)
    if not path.exists():
        raise InputError(f"the video was made from the file {file!r}; give it again by {flag} FILE")
    if content_hash(path) != identity.get("sha256"):
        raise InputError(
            f"{file!r} in this folder is not the file that the video was made from "
            f"(its hash differs); give the right one by {flag} FILE"
        )
    return str(path)
