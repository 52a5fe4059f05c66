"""Checkpoint folders: cache paths, JSON files, weight files, and descriptions for error texts."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from everyframe.checkpoints.config_errors import check_counts, check_kernels
from everyframe.core.errors import CheckpointError
from everyframe.core.paths import expand_path, xdg_folder

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Our cache: ``EVERYFRAME_CACHE``, else ``XDG_CACHE_HOME/everyframe``, else in ``~/.cache``."""
    own = os.environ.get("EVERYFRAME_CACHE")
    if own:
        return expand_path(own, "EVERYFRAME_CACHE")
    return xdg_folder("XDG_CACHE_HOME", ".cache")


def warn_unusable_cache(error: OSError) -> None:
    """Log that our cache can't be read or written, once in a process for each reason."""
    _warn_unusable(cache_folder(), error.strerror or str(error))


@cache
def _warn_unusable(folder: Path, reason: str) -> None:
    _log.warning(
        "the cache in %s can't be used (%s), so each run measures and hashes again; "
        "EVERYFRAME_CACHE names another folder", folder, reason,
    )  # fmt: skip


def hub_cache_folder() -> Path:
    """Hugging Face hub cache, as ``huggingface_hub`` resolves it (``HF_HOME`` …)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def package_folder(relative: str) -> Path:
    """Folder inside this package, such as ``checkpoints/shapes``."""
    return Path(__file__).resolve().parent.parent / relative


@cache
def read_package_data(relative: str) -> Any:
    """Data of a YAML file inside this package, such as ``checkpoints/known_models.yaml``."""
    import yaml  # here: most commands read none

    text = package_folder(relative).read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


PICKLE_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt")
#: Largest config or index in bytes; the index of a large model has some megabytes.
_MOST_JSON = 1 << 28

WEIGHT_SUFFIXES = (".safetensors", *PICKLE_SUFFIXES)


def read_json(path: str | Path) -> dict[str, Any]:
    """Read the JSON object in `path`.

    Raises:
        CheckpointError: there is no such file, it is not UTF-8 JSON, it is not an object, or as a
            config it asks for what would take hours or run code.
    """
    path = Path(path)
    check_plain(path)
    try:
        if path.stat().st_size > _MOST_JSON:
            raise CheckpointError(
                f"{path} is too large for a config: more than {_MOST_JSON:,} bytes"
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(describe_missing(path.parent, [path.name])) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} can't be read as text: {error}") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except RecursionError:
        raise CheckpointError(f"{path} is not usable JSON: it is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise CheckpointError(f"{path} is not usable JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    check_counts(value, str(path))
    check_kernels(value, str(path))
    return value


def is_plain_name(name: str) -> bool:
    """Whether it names a file directly in the folder, without a path."""
    return (
        bool(name) and name not in (".", "..") and PurePath(name).name == name and "\\" not in name
    )


def check_inside(root: Path, paths: Iterable[Path]) -> None:
    """Raise `CheckpointError` for a path that a link leads out of `root`, and for a pipe or device.

    Links from a hub cache's snapshots to its blobs are allowed.
    """
    real = root.resolve()
    allowed = [real]
    for path in paths:
        target = Path(os.path.realpath(path))  # which raises for no link that leads to itself
        check_plain(target)
        if target.is_relative_to(real):
            continue
        if len(allowed) == 1:
            allowed += [hub_cache_folder().resolve(), *_repository_of(real)]
        if not any(target.is_relative_to(place) for place in allowed):
            raise CheckpointError(
                f"{path} is a link out of {root}, to {target}; what a model is made of lies in its "
                "own folder: copy it there, or give the folder that it is in"
            )


def check_plain(path: Path) -> None:
    """Raise `CheckpointError` for a pipe, whose reader waits without end, or a device."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise CheckpointError(f"{path} is a pipe or a device, and no file")


def _repository_of(snapshot: Path) -> list[Path]:
    """Repository folder in the hub cache that contains this snapshot."""
    for place in (snapshot, *snapshot.parents):
        if place.parent.name == "snapshots" and place.parent.parent.name.startswith("models--"):
            return [place.parent.parent]
    return []


def without_notes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Config without its ``_`` names, in which diffusers records who saved it."""
    return {name: value for name, value in config.items() if not name.startswith("_")}


def describe_missing(folder: str | Path, expected: Sequence[str]) -> str:
    """One line: what was looked for in `folder`, and what is there instead.

    Args:
        folder: the given folder; it need not exist.
        expected: file names or patterns of a checkpoint of this kind.
    """
    folder = Path(folder)
    wanted = listing(expected)
    if not folder.exists():
        return f"there is no folder {folder} (looked there for {wanted})"
    if not folder.is_dir():
        return f"{folder} is a file, expected a folder with {wanted}"
    try:
        found = sorted(p.name + ("/" if p.is_dir() else "") for p in folder.iterdir())
    except OSError as error:
        return f"folder {folder} can't be listed: {error.strerror or error}"
    holds = f"it holds {listing(found, limit=6)}" if found else "it is empty"
    return f"{folder} is no checkpoint: looked for {wanted}, but {holds}"


def listing(names: Sequence[str], limit: int = 4) -> str:
    """Join names for a message: ``"a, b, c, d and 3 more"``."""
    shown = ", ".join(names[:limit])
    rest = len(names) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown


def weight_files(folder: str | Path) -> list[Path]:
    """Weight files in `folder` and one level below, sorted by name."""
    folder = Path(folder)
    found = [p for depth in ("*", "*/*") for p in folder.glob(depth)]
    return sorted(p for p in found if p.suffix in WEIGHT_SUFFIXES and p.is_file())
