"""Download from the Hugging Face hub; the only module here that uses the network.

It queries the hub once, with a short time limit, before a download starts: a machine without a
connection gets its error within seconds. `huggingface_hub` then downloads, resumes and verifies.
`locate` determines what is missing.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from everyframe.checkpoints.folder import WEIGHT_SUFFIXES, listing
from everyframe.checkpoints.locate import Location, PartLocation, find_part, names_on_disk
from everyframe.checkpoints.refuse_pickles import refuse_pickled_files
from everyframe.core.errors import CheckpointError, InputError, first_line

_Answer = TypeVar("_Answer")

#: Files that mark a repository as a diffusers pipeline.
_INDEXES = {"model_index.json", "modular_model_index.json"}

ETAG_TIMEOUT_S = 3.0
FIRST_ANSWER_TIMEOUT_S = 4.0  # all of it: name lookup, connection, answer


@dataclass(frozen=True)
class Wanted:
    """Files of one hub repository: shell patterns of names.

    Of the folders in `without` no weights are wanted.
    """

    repo_id: str
    patterns: tuple[str, ...]
    without: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """Shell command that downloads the same files with the hub's own tool."""
        words = ["hf", "download", self.repo_id]
        for pattern in self.patterns:
            words += ["--include", pattern]
        for folder in self.without:
            words += ["--exclude", f"{folder}/*.safetensors*"]
        return shlex.join(words)


def fetch_missing(location: Location) -> Location:
    """Download what `location` lacks and return its new location; no network if it is complete.

    Raises:
        InputError: see `fetch`; also for a local or embedded model that lacks files.
    """
    if location.is_complete:
        return location
    if location.path is not None:
        raise InputError(
            f"model {location.name!r} lacks {listing(location.missing)} in {location.path}; "
            "install the package again"
        )
    parts = fetch_parts(location.parts, location.hint)
    return Location(location.asked, location.kind, known=location.known, parts=parts)


def fetch_parts(parts: Sequence[PartLocation], hint: str = "") -> tuple[PartLocation, ...]:
    """Download the missing files of these components and return their locations.

    Raises:
        InputError: see `fetch`; without a network the text lists every incomplete component.
    """
    whole = list(parts)
    lacking = [number for number, place in enumerate(whole) if not place.is_complete]
    parts_lacking = [whole[number].part for number in lacking]
    wanted = [Wanted(each.repo_id, each.patterns, without=each.without) for each in parts_lacking]
    for done, number in enumerate(lacking):
        fetch(wanted[done:], hint)
        whole[number] = _fetch(whole[number], hint)
    return tuple(whole)


def fetch(wanted: Sequence[Wanted], hint: str = "") -> Path:
    """Download the first of `wanted`, what is not on disk yet; returns the snapshot's folder.

    `hint` is a clause for the error text, see `locate.Location.hint`.

    Raises:
        InputError: offline (detected within 5 s), no such repository, gated, or the disk is full.
            One line says what is missing, the others of `wanted` too, which command downloads it,
            and what is on disk.
    """
    from huggingface_hub import snapshot_download

    first = wanted[0]
    commit, names = _ask(wanted, hint)
    refuse_pickled_files(first.repo_id, first.patterns, names)
    try:
        # By branch, not commit, so that the cache records what `main` is.
        folder = snapshot_download(
            first.repo_id,
            allow_patterns=list(_of_pipeline(first, names) or first.patterns),
            etag_timeout=ETAG_TIMEOUT_S,
        )
    except _transport_errors() as error:
        what = getattr(error, "strerror", None) or first_line(error)
        raise InputError(
            f"fetching {first.repo_id} (commit {commit[:12]}) stopped: {what}; "
            "run the same command again to continue it"
        ) from error
    return Path(folder)


def _fetch(place: PartLocation, hint: str) -> PartLocation:
    fetched = find_part(place.part)
    if not fetched.is_complete:
        raise CheckpointError(
            f"{place.part.repo_id} holds no {listing(fetched.missing)}; it is not the "
            f"{place.part.role} that was expected{hint}"
        )
    return fetched


def _of_pipeline(wanted: Wanted, names: Sequence[str]) -> tuple[str, ...]:
    """Files among `names` that a diffusers pipeline loads; none if it is no pipeline.

    Repositories often hold the same weights twice: pickled, or in one file at the top for other
    programs. Used only if weights of any name are wanted.
    """
    patterns = wanted.patterns
    is_any = any(each.startswith("*") and each.endswith(".safetensors") for each in patterns)
    if not is_any or not _INDEXES & set(names):
        return ()
    safe = {name.rpartition("/")[0] for name in names if name.endswith(".safetensors")}

    def is_needed(name: str) -> bool:
        folder = name.rpartition("/")[0]
        bare = name.partition(".index.")[0]
        if bare.endswith(WEIGHT_SUFFIXES):
            is_read = bare.endswith(".safetensors") or folder not in safe
            if not folder or not is_read or folder in wanted.without:
                return False
        # Code is fetched to be read; it runs only if that is allowed.
        return any(fnmatch.fnmatchcase(name, each) for each in (*patterns, "*.py"))

    return tuple(name for name in names if is_needed(name))


def _ask(wanted: Sequence[Wanted], hint: str) -> tuple[str, tuple[str, ...]]:
    """Commit of the first one's main branch, and the names of its files.

    Raises an error for the user.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    repo_id = wanted[0].repo_id

    def ask() -> tuple[str, tuple[str, ...]]:
        info = HfApi().model_info(repo_id, timeout=ETAG_TIMEOUT_S)
        return info.sha or "", tuple(each.rfilename for each in info.siblings or ())

    try:
        return _within(FIRST_ANSWER_TIMEOUT_S, ask)
    except HFValidationError as error:
        raise InputError(f"{repo_id!r} is not a hub id: {first_line(error)}") from error
    except GatedRepoError as error:
        raise InputError(
            f"{repo_id} asks you to accept its terms on the hub's page first; "
            "then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"the hub knows no model {repo_id!r} "
            f"(a private one needs `hf auth login`); {_on_disk()}{hint}"
        ) from error
    except ValueError as error:  # the address of a proxy in the environment
        raise InputError(
            f"the hub can't be asked: {first_line(error)}; are HTTPS_PROXY and ALL_PROXY addresses?"
        ) from error
    except OfflineModeIsEnabled as error:
        reason = "HF_HUB_OFFLINE forbids asking the hub"
        raise InputError(_offline(wanted, reason, hint)) from error
    except _transport_errors() as error:
        reason = f"the hub does not answer ({first_line(error)})"
        raise InputError(_offline(wanted, reason, hint)) from error


def _offline(wanted: Sequence[Wanted], reason: str, hint: str) -> str:
    what = "; ".join(f"{each.repo_id} ({listing(each.patterns)})" for each in wanted)
    commands = " && ".join(each.command for each in wanted)
    return (
        f"not on this disk: {what}; and {reason}; get it where there is a network with "
        f"`{commands}`; {_on_disk()}{hint}"
    )


def _on_disk() -> str:
    names = names_on_disk()
    return f"models on this disk: {', '.join(names)}" if names else "no known model is on this disk"


def _transport_errors() -> tuple[type[Exception], ...]:
    """Errors that the hub's client raises for a broken or absent connection, or a full disk."""
    from huggingface_hub import errors

    # `HTTPError` is the root of whichever HTTP client this version of the hub's library uses.
    found = [getattr(errors, name, None) for name in ("HTTPError", "XetDownloadError")]
    return (OSError, *(error for error in found if error is not None))


def _within(seconds: float, ask: Callable[[], _Answer]) -> _Answer:
    """Call `ask` in a thread, and abandon the thread on timeout.

    A name lookup has no timeout of its own and can hang for half a minute.
    """
    answers: list[_Answer] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # noqa: BLE001 - raised again in the caller's thread, below
            errors.append(error)

    thread = threading.Thread(target=work, name="everyframe-hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        host = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        raise TimeoutError(f"{host} gave no answer in {seconds:g} s")
    if errors:
        raise errors[0]
    return answers[0]
