"""The server's folder on disk: the queue, run folders, uploads and finished videos.

- ``jobs.sqlite``: the queue (`store.py`).
- ``lock``: held by the server that uses the folder.
- ``session-key``: signs the page's cookies.
- ``runs/<id>/``: run folders of one job and files of its workers, until its video is complete.
- ``inputs/<sha256>.<ending>``: uploads, named by their content.
- ``videos/<id>/``: the files of a finished job. The folder appears at once, by a rename, so that it
  is complete wherever it exists.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyframe.core.errors import InputError
from everyframe.core.paths import expand_path, replace_file, state_folder
from everyframe.core.request import Request
from everyframe.core.secret_key import read_or_create_key
from everyframe.runs.folder import Lock, RunFolder, all_runs
from everyframe.runs.position import NOWHERE, saved_position

#: Environment variable: the server's folder.
VARIABLE = "EVERYFRAME_SERVER_DIR"
#: File systems whose locks and shared memory SQLite's write-ahead log can't rely on.
NETWORK_FILE_SYSTEMS = frozenset({
    "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "davfs", "fuse.ceph", "fuse.davfs",
    "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "glusterfs", "gpfs", "lustre",
    "ncpfs", "nfs", "nfs4", "smb2", "smb3", "smbfs",
})  # fmt: skip

#: Options that hold a picture or a video: what may be an upload, a data URL or an allowed URL.
MEDIA: Mapping[str, str] = {
    "image": "picture", "last_image": "picture", "extend": "video",
    "source": "picture or video", "mask": "picture or video", "control": "picture or video",
}  # fmt: skip

_ID = re.compile(r"video_[0-9a-f]{32}")
_INPUT = re.compile(r"inputs/[0-9a-f]{64}\.[a-z0-9]{1,8}")
_ENDING = re.compile(r"[a-z0-9]{1,8}")
#: Threads that wait for the disk; they begin with the first finished job.
_FLUSHING = ThreadPoolExecutor(8, "files to disk")
#: Held while the age of an upload is looked at or renewed: one that is sent again stays.
_DELETING = threading.Lock()
_DATABASE = "jobs.sqlite"
_PARTIAL = ".partial"
_FIELDS = "job.json"


def default_folder() -> Path:
    """``EVERYFRAME_SERVER_DIR``, else ``server`` in the state folder."""
    own = os.environ.get(VARIABLE)
    return expand_path(own, VARIABLE) if own else state_folder() / "server"


def is_input(value: Any) -> bool:
    """Whether an option's value is the path of an upload, which no client can send itself."""
    return isinstance(value, str) and value.startswith("inputs/")


def is_video_id(text: str) -> bool:
    """Whether the text is a video id of this server; no other text becomes part of a path."""
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True)
class DataFolder:
    """The server's folder; `open_folder` creates, checks and locks it."""

    path: Path
    lock: Lock

    @property
    def database(self) -> Path:
        """The file of the queue."""
        return self.path / _DATABASE

    @property
    def runs(self) -> Path:
        """Run folders, in one folder for each job."""
        return self.path / "runs"

    @property
    def inputs(self) -> Path:
        """Uploads, named by their content."""
        return self.path / "inputs"

    @property
    def videos(self) -> Path:
        """Files of finished jobs, in one folder for each job."""
        return self.path / "videos"

    def session_key(self) -> bytes:
        """Key that signs the page's cookies; a new one where none can be stored."""
        return read_or_create_key(self.path / "session-key") or secrets.token_bytes(32)

    def has_jobs(self) -> bool:
        """Whether it holds files of any job."""
        return any(any(folder.iterdir()) for folder in (self.videos, self.runs))

    def runs_of(self, id: str) -> Path:  # noqa: A002 - the field's name
        """Folder that holds the run folders of one job; absent if there are none."""
        return self.runs / _checked(id)

    def new_runs_of(self, id: str) -> Path:  # noqa: A002
        """Create `runs_of` a job if it is absent."""
        return _made(self.runs_of(id))

    def video(self, id: str) -> Path:  # noqa: A002
        """Folder with the files of a finished job; it is complete if it exists."""
        return self.videos / _checked(id)

    def saved_run(self, id: str) -> RunFolder | None:  # noqa: A002
        """The run that a job would resume: the last run with a saved state, else the last run."""
        readable = [run for run in all_runs(self.runs_of(id)) if run.is_readable()]
        begun = [run for run in readable if saved_position(run) > NOWHERE]
        return next(reversed(begun or readable), None)

    def saved_run_path(self, id: str) -> str | None:  # noqa: A002
        """Path of `saved_run` relative to the folder, as a job's row stores it."""
        run = self.saved_run(id)
        return None if run is None else str(run.path.relative_to(self.path))

    def new_video(self, id: str) -> Path:  # noqa: A002
        """Create an empty folder for the files of a job; `publish` renames it to `video`."""
        self.discard(id)
        return _made(self.videos / f"{_checked(id)}{_PARTIAL}")

    def publish(self, id: str, fields: Mapping[str, Any]) -> Path:  # noqa: A002
        """Rename the folder of `new_video` to `video`, durably. Raises `OSError`.

        `fields` of the finished job are stored in it as JSON; `published` reads them.
        """
        partial, whole = self.videos / f"{_checked(id)}{_PARTIAL}", self.video(id)
        (partial / _FIELDS).write_text(json.dumps(fields, allow_nan=False))
        # At once: the disk then writes them together.
        [*_FLUSHING.map(_to_disk, [*partial.iterdir(), partial])]
        shutil.rmtree(whole, ignore_errors=True)
        os.rename(partial, whole)
        _to_disk(self.videos)
        return whole

    def has_frames(self, id: str) -> bool:  # noqa: A002
        """Whether a job has unfinished output files."""
        folder = self.videos / f"{_checked(id)}{_PARTIAL}"
        return folder.is_dir() and any(folder.iterdir())

    def discard(self, id: str) -> None:  # noqa: A002
        """Delete the unfinished files of a job."""
        shutil.rmtree(self.videos / f"{_checked(id)}{_PARTIAL}", ignore_errors=True)

    def published(self, id: str) -> dict[str, Any] | None:  # noqa: A002
        """The fields that `publish` stored; None for an unfinished job."""
        place = self.video(id) / _FIELDS
        return dict(json.loads(place.read_text())) if place.exists() else None

    def sweep(self, ids: Collection[str], completed: Collection[str]) -> None:
        """Delete files of jobs that are not among `ids`, and run folders of `completed` jobs."""
        for folder in (*self.videos.iterdir(), *self.runs.iterdir()):
            id = folder.name  # noqa: A001
            is_run = folder.parent == self.runs
            if id not in ids or (is_run and id in completed):
                shutil.rmtree(folder, ignore_errors=True)

    def remove_runs(self, id: str) -> None:  # noqa: A002
        """Delete the run folders of a job."""
        shutil.rmtree(self.runs_of(id), ignore_errors=True)

    def remove_inputs(self, used: Collection[str], before: float) -> None:
        """Delete uploads that are not among `used` and were last uploaded before that time."""
        for place in self.inputs.iterdir():
            if f"{self.inputs.name}/{place.name}" in used:
                continue
            # An archive that was sent is deleted with that.
            with _DELETING, suppress(FileNotFoundError):
                if place.stat().st_mtime < before:
                    place.unlink()

    def remove(self, id: str) -> None:  # noqa: A002
        """Delete all files of a job: videos, unfinished videos and run folders."""
        self.discard(id)
        self.remove_runs(id)
        shutil.rmtree(self.video(id), ignore_errors=True)

    def add_input(self, data: bytes, ending: str) -> str:
        """Store an upload durably; returns ``inputs/<sha256>.<ending>``, relative to the folder.

        `request_of` turns it back into a real path. Raises `OSError`.
        """
        if not _ENDING.fullmatch(ending):
            raise InputError(f"an input's ending must be letters and digits, got {ending!r}")
        name = f"{hashlib.sha256(data).hexdigest()}.{ending}"
        place = self.inputs / name
        with _DELETING:
            is_new = not place.exists()
            if not is_new:
                os.utime(place)  # its age counts from its last use
        if is_new:
            replace_file(place, data, is_durable=True)
        return f"{self.inputs.name}/{name}"

    def request_of(self, options: Mapping[str, Any]) -> Request:
        """The request of a job's options, with the real paths of its uploads.

        A prompt that looks like such a path stays as it is.
        """
        uploads = {
            name: str(self.path / value)
            for name, value in options.items()
            if name in MEDIA and isinstance(value, str) and _INPUT.fullmatch(value)
        }
        return Request(**{**options, **uploads})

    def without_place(self, text: str) -> str:
        """A message for clients, who learn no path of this machine: ``DATA`` is the folder."""
        return text.replace(str(self.path), "DATA")

    def free_bytes(self) -> int:
        """Room on the disk of the folder, in bytes."""
        return shutil.disk_usage(self.path).free

    def close(self) -> None:
        """Release the folder for another server."""
        self.lock.release()


def open_folder(path: str | Path | None = None) -> DataFolder:
    """Create the server's folder if needed, check it, and lock it for this process.

    Without `path` it is `default_folder`. Only this user can read what is in it. A folder that held
    other things before keeps its mode.

    Raises:
        InputError: it can't be written, is shared, or lies on a network file system.
        RunLockedError: another server uses it.
    """
    folder = default_folder() if path is None else expand_path(path, "the data folder")
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_file_system(folder)
        if not any(folder.iterdir()):
            with suppress(PermissionError):  # somebody else's folder that we may write to
                folder.chmod(0o700)
        elif _is_shared(folder):
            raise InputError(
                f"the data folder {str(folder)!r} is for files of everybody; give a folder in it "
                f"with --data-dir or {VARIABLE}"
            )
        for name in ("runs", "inputs", "videos"):
            (folder / name).mkdir(exist_ok=True, mode=0o700)
        (folder / _DATABASE).touch(mode=0o600)
        lock = Lock(folder / "lock", f"the data folder {str(folder)!r}")
    except OSError as error:
        raise InputError(
            f"the data folder {str(folder)!r} can't be written ({error.strerror or error}); give "
            f"another with --data-dir or {VARIABLE}"
        ) from error
    return DataFolder(folder, lock)


def _is_shared(folder: Path) -> bool:
    """Whether it is a folder such as /tmp. All are open to everybody on drives of Windows."""
    return folder.stat().st_mode & (shared := stat.S_IWOTH | stat.S_ISVTX) == shared


def _check_file_system(folder: Path) -> None:
    kind = file_system_of(folder)
    if kind in NETWORK_FILE_SYSTEMS:
        raise InputError(
            f"the data folder {str(folder)!r} is on a network file system ({kind}), where the "
            f"queue could be damaged; give a folder on a local disk with --data-dir or {VARIABLE}"
        )


def file_system_of(folder: Path) -> str:
    """Name of the file system that holds the folder, such as ``ext4``; empty if unknown."""
    import psutil

    real, kind, longest = folder.resolve(), "", -1
    for each in psutil.disk_partitions(all=True):
        place = Path(each.mountpoint)
        if len(place.parts) >= longest and (place == real or place in real.parents):
            kind, longest = each.fstype, len(place.parts)
    return kind


def _checked(id: str) -> str:  # noqa: A002
    assert is_video_id(id), id
    return id


def _made(folder: Path) -> Path:
    """The folder of one job; also the one around it, which somebody may have deleted for room."""
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
