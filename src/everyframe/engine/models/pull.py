"""Fetch and verify what a request's model needs, and nothing else; nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everyframe.checkpoints.folder import WEIGHT_SUFFIXES
from everyframe.checkpoints.hub_digest import verify_file
from everyframe.core.request import Request
from everyframe.planning.find_model import find_model
from everyframe.runtime.components.patchable import patches_of
from everyframe.runtime.loading import check_contents


@dataclass(frozen=True)
class PulledModel:
    """A model that is whole on this disk.

    Attributes:
        name: its name.
        files: files that were looked at.
        num_bytes: their size.
        num_verified: how many have the hub's digest; the others are no files of the hub's cache.
        fetched: what was downloaded, a line for each repository.
    """

    name: str
    files: tuple[str, ...]
    num_bytes: int
    num_verified: int
    fetched: tuple[str, ...]


def pull(request: Request, on_progress: Callable[[str], None]) -> PulledModel:
    """Download what the model of a request lacks, and verify all of its files.

    Bytes are compared with the hub's digests, and the tensors of our own families with their
    components. LoRAs and component files of the request are checked likewise.

    Args:
        request: the model, and options that decide which files it needs, such as ``variant``.
        on_progress: called with a line before each download.

    Raises:
        InputError: an unknown model, no network, or no room; see `everyframe.checkpoints.download`.
        CheckpointError: a file is damaged or is none of this model.
    """
    model, _ = find_model(request, may_fetch=True)
    fetched = model.missing()
    for line in fetched:
        on_progress(f"fetching {line}")
    model = model.fetch()
    files = _files_of(model.weight_files())
    num_verified = sum(map(verify_file, files))
    check_contents(model)
    patches_of(model).check()
    return PulledModel(
        name=model.name,
        files=tuple(map(str, files)),
        num_bytes=sum(file.stat().st_size for file in files),
        num_verified=num_verified,
        fetched=fetched,
    )


def _files_of(weights: tuple[str, ...]) -> list[Path]:
    """The weights, and the configs and tokenizers of the hub's snapshots that hold them."""
    found = dict.fromkeys(map(Path, weights))
    for snapshot in {_snapshot_of(path) for path in found} - {None}:
        assert snapshot is not None
        for path in sorted(snapshot.rglob("*")):
            if path.is_file() and path.suffix not in WEIGHT_SUFFIXES:
                found[path] = None
    return list(found)


def _snapshot_of(path: Path) -> Path | None:
    return next((each for each in path.parents if each.parent.name == "snapshots"), None)
