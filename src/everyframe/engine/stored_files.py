"""What Everyframe and the hub's client keep on this disk, by kind: list it, and remove it.

Frames that were decoded from input files are cached in memory only (`media/decode_cache.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from everyframe.checkpoints.folder import cache_folder, hub_cache_folder
from everyframe.checkpoints.model_zoo import known_models
from everyframe.core.bytes import format_bytes
from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.paths import size_of
from everyframe.runs.folder import RunFolder, all_runs, runs_folder


@dataclass(frozen=True)
class StoredEntry:
    """One thing on disk.

    Attributes:
        kind: name of its kind.
        name: its name within the kind.
        paths: files and folders that it consists of.
        num_bytes: its size on disk.
        about: what it is, in a few words.
        is_busy: whether a process works on it, so that it can't be removed.
    """

    kind: str
    name: str
    paths: tuple[Path, ...]
    num_bytes: int
    about: str = ""
    is_busy: bool = False


@dataclass(frozen=True)
class StoredKind:
    """A kind of stored files.

    Attributes:
        name: its name.
        title: what it is.
        loss: what has to be done again once it is removed.
        folder: where it is; None if nothing is saved.
        entries: lists it.
    """

    name: str
    title: str
    loss: str
    folder: Callable[[], Path | None]
    entries: Callable[[StoredKind], Iterator[StoredEntry]]


def _repositories(kind: StoredKind) -> Iterator[StoredEntry]:
    """Repositories in the hub's cache; other programs use it too."""
    root = kind.folder()
    assert root is not None
    names: dict[str, list[str]] = {}
    for model in known_models():
        for part in model.parts:
            names.setdefault(part.repo_id, []).append(model.name)
    for path in sorted(filter(Path.is_dir, root.glob("models--*"))):
        repo = path.name.removeprefix("models--").replace("--", "/")
        about = ", ".join(dict.fromkeys(names.get(repo, ())))
        locks = root / ".locks" / path.name
        places = (path, locks) if locks.is_dir() else (path,)
        yield StoredEntry(kind.name, repo, places, sum(map(size_of, places)), about)


def _runs(kind: StoredKind) -> Iterator[StoredEntry]:
    for run in all_runs(kind.folder()):
        is_busy = run.is_busy()
        about = "in use" if is_busy else "interrupted"
        yield StoredEntry(kind.name, run.name, (run.path,), run.num_bytes(), about, is_busy)


def _folder_entries(kind: StoredKind) -> Iterator[StoredEntry]:
    """Files and folders in the kind's own folder."""
    root = kind.folder()
    assert root is not None
    for path in sorted(root.iterdir()):
        if path.name not in _OF_OTHERS.get(kind.name, ()):
            yield StoredEntry(kind.name, path.name, (path,), size_of(path))


#: Folders within a kind's folder that are a kind of their own.
_OF_OTHERS = {"certificates": ("compiled",)}

#: What plans cache, beside certificates.
_OF_PLANS = (
    "dry_runs", "pipeline_dry_runs", "fast_path_places", "sizes", "rates", "computing_times",
    "digests.json",
)  # fmt: skip


def _plans(kind: StoredKind) -> Iterator[StoredEntry]:
    """Results that only make plans faster: one entry for each sort."""
    root = cache_folder()
    for name in _OF_PLANS:
        if (root / name).exists():
            yield StoredEntry(kind.name, name, (root / name,), size_of(root / name))


def _in_cache(*names: str) -> Callable[[], Path]:
    return lambda: cache_folder().joinpath(*names)


#: Every kind, in the order of the list.
KINDS = (
    StoredKind("models", "repositories in the hub's cache", "download again",
               hub_cache_folder, _repositories),
    StoredKind("runs", "interrupted runs", "they can't be resumed", runs_folder, _runs),
    StoredKind("calibrations", "measured losses of fast sampling", "everyframe calibrate again",
               _in_cache("calibrations"), _folder_entries),
    StoredKind("certificates", "trials of fast paths", "they are tried again",
               _in_cache("certificates"), _folder_entries),
    StoredKind("compiled", "compiled blocks", "everyframe compile again",
               _in_cache("certificates", "compiled"), _folder_entries),
    StoredKind("compiler", "torch's compile cache", "compiling takes longer",
               _in_cache("inductor"), _folder_entries),
    StoredKind("native", "native CPU kernels", "they are compiled again, in seconds",
               _in_cache("native"), _folder_entries),
    StoredKind("repairs", "precision that runs had to raise", "the next run finds it again",
               _in_cache("repairs"), _folder_entries),
    StoredKind("colors", "colours of latents, for previews", "a run fits them again",
               _in_cache("latent_colors"), _folder_entries),
    StoredKind("plans", "dry runs, rates and digests", "the next plan takes seconds longer",
               cache_folder, _plans),
)  # fmt: skip


def stored_entries(kinds: Iterable[StoredKind] = KINDS) -> Iterator[StoredEntry]:
    """All that is on disk, kind by kind."""
    for kind in kinds:
        folder = kind.folder()
        if folder is not None and folder.is_dir():
            yield from kind.entries(kind)


def find_kind(name: str) -> StoredKind:
    """The kind of that name.

    Raises:
        InputError: there is none; the text names the nearest.
    """
    names = [kind.name for kind in KINDS]
    if name not in names:
        raise InputError(
            f"the kind must be one of {', '.join(names)}, got {name!r}{did_you_mean(name, names)}"
        )
    return KINDS[names.index(name)]


def select_entries(kind: StoredKind, name: str | None) -> list[StoredEntry]:
    """Entries of a kind that can be removed: one by name, or all of them.

    Raises:
        InputError: there is no such entry, or the one is in use.
    """
    found = list(stored_entries([kind]))
    if name is None:
        return [entry for entry in found if not entry.is_busy]
    for entry in found:
        if entry.name == name:
            if entry.is_busy:
                raise InputError(f"{kind.name}: {name} is in use; wait for it, or stop it first")
            return [entry]
    names = [entry.name for entry in found]
    raise InputError(f"{kind.name}: there is no {name!r} on this disk{did_you_mean(name, names)}")


def remove_entry(entry: StoredEntry) -> None:
    """Delete an entry. A link is deleted, and not what it leads to.

    Raises:
        OSError: something can't be deleted.
    """
    for path in entry.paths:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)  # another process may have removed it
        elif entry.kind == "runs":
            RunFolder(path).remove()
        else:
            shutil.rmtree(path)


def describe_removal(entries: Iterable[StoredEntry], kind: StoredKind) -> str:
    """What a removal would delete, in words."""
    listed = list(entries)
    size = format_bytes(sum(entry.num_bytes for entry in listed))
    what = listed[0].name if len(listed) == 1 else f"{len(listed)} entries"
    return f"{kind.name}: {what}, {size} ({kind.loss})"
