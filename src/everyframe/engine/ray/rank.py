"""One rank on a Ray node: an actor that starts our worker process and sends what it says.

The actor itself computes nothing and imports no torch: its worker's environment names the devices.
Only bytes of `message_bytes` go in and come out, so Ray pickles nothing of ours but this class, by
its name. `group.py` is the other side.
"""

from __future__ import annotations

import logging
import os
import platform
import queue
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from everyframe._version import __version__
from everyframe.core.errors import RunLockedError
from everyframe.core.events import Note
from everyframe.engine.ray.input_transfer import InputFiles
from everyframe.engine.ray.message_bytes import from_bytes, to_bytes
from everyframe.engine.ray.rank_layout import RankJob, RankPlace
from everyframe.engine.ray.run_transfer import (
    RunChanges,
    RunReader,
    with_texts,
    write_changes,
)
from everyframe.engine.workers.error_transfer import error_data
from everyframe.engine.workers.launcher import run_in_workers
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.runs.folder import Lock, RunFolder
from everyframe.runs.resume_hint import without_hint

#: Seconds between looks at the saved state while no event comes.
_PAUSE = 0.5
#: Maximum number of unread messages.
_MOST_WAITING = 8
#: Prefix of the working folders of all ranks.
_PREFIX = "everyframe-ray-"


def software() -> dict[str, str]:
    """Versions that must be the same on all machines of a run."""
    return {
        "everyframe": __version__,
        "torch": _version("torch"),
        "ray": _version("ray"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


class RayRank:
    """Actor of one rank; it serves one job."""

    def __init__(self) -> None:
        _remove_folders_of_the_dead()
        self._folder, self._lock = _make_locked_folder()
        self._messages: queue.Queue[bytes] = queue.Queue(_MOST_WAITING)
        #: The last one, once there is none to come; a message after it, of a log, is dropped.
        self._last: bytes | None = None
        #: Local path of each input file, by its text on the other side.
        self._texts: dict[str, str] = {}
        #: Name in the request for each local path, for messages.
        self._names: dict[str, str] = {}
        # The output of worker and launcher is deleted with this folder, however this process ends.
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._folder)
        _forget_threads_of_ray()

    def hello(self) -> bytes:
        """Where this rank is, and with which software."""
        import ray

        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        ids = context.get_accelerator_ids().get("GPU", [])
        place = RankPlace(
            node=context.get_node_id(),
            address=address,
            host=socket.gethostname(),
            port=_free_port(),
            devices=tuple(ids),
            interface=_interface_of(address),
        )
        return to_bytes("hello", {"place": place, "software": software()})

    def run(self, message: bytes, run: bytes, inputs: bytes) -> Iterator[bytes]:
        """Run a job and yield messages: events, log records and states, then an error or the end.

        Args:
            message: a `RankJob`.
            run: the run folder to resume, as `RunChanges`, or None.
            inputs: `InputFiles` of the request.
        """
        asked: RankJob = from_bytes(message)[1]
        folder = RunFolder(self._folder / asked.name)
        is_lead = asked.job.rank == 0
        try:
            job = self._prepare(asked, folder, from_bytes(run)[1], from_bytes(inputs)[1])
            reader = RunReader(folder, is_lead=is_lead, is_copy=job.run is not None)
        except Exception as error:  # noqa: BLE001 - raised again by the other side
            yield to_bytes("error", {"error": self._their_error(error), "keeps": True})
            return
        threading.Thread(target=self._work, args=(job, folder), daemon=True).start()
        while True:
            try:
                message = self._messages.get(timeout=_PAUSE)
            except queue.Empty:
                message = b""
            # Before the event, so that the consumer of a step has its state.
            changes = reader.changes()
            if changes is not None:
                theirs = {here: there for there, here in self._texts.items()}
                yield to_bytes("state", changes.with_texts(theirs))
            if message:
                yield message
                if message is self._last:
                    return

    def end(self) -> bytes:
        """Remove what is left on this node; the actor is killed next."""
        shutil.rmtree(self._folder, ignore_errors=True)
        return to_bytes("ended")

    def _prepare(
        self, asked: RankJob, folder: RunFolder, run: RunChanges | None, inputs: InputFiles
    ) -> WorkerJob:
        """The job with the paths of this node, after its files were written here."""
        os.environ.update(asked.environment)
        logging.getLogger("everyframe").setLevel(asked.log_level)
        logging.getLogger("everyframe").addHandler(_ToTheOther(self._messages, self._their_words))
        here = self._folder / "inputs"
        texts, self._names = inputs.write(here), inputs.given_names(here)
        self._texts = texts
        job = asked.job
        if job.request is not None:
            job = replace(job, request=with_texts(job.request, texts))
        if job.named:
            job = replace(job, named=with_texts(job.named, texts))
        if run is not None:
            folder.path.mkdir(mode=0o700)
            write_changes(folder, run, self._work_folder(), texts)
            job = replace(job, run=folder.path)
        if job.root is not None:
            job = replace(job, root=self._folder, run_name=asked.name)
        return job

    def _their_error(self, error: Exception) -> dict[str, Any]:
        """The data of an error, which names files as the request does, without a hint to resume.

        The other side knows where the run is.
        """
        data = error_data(error)
        data["text"] = without_hint(data["text"])
        names = ("text", "file")
        return data | {k: self._their_words(data[k]) for k in names if data.get(k) is not None}

    def _their_words(self, text: str) -> str:
        """A message with the request's names in place of the paths of its files on this node."""
        for here, there in self._names.items():
            text = text.replace(here, there)
        return text

    def _work_folder(self) -> Path:
        folder = self._folder / "work"
        folder.mkdir(exist_ok=True)
        return folder

    def _work(self, job: WorkerJob, folder: RunFolder) -> None:
        """Forward the events of the worker process, then its error or the end."""
        try:
            for event in run_in_workers(job, self._work_folder()):
                if isinstance(event, Note):
                    event = replace(event, text=self._their_words(event.text))
                self._messages.put(to_bytes("event", event))
            last = to_bytes("end")
        except Exception as error:  # noqa: BLE001 - raised again by the other side
            is_left = job.rank > 0 or (folder.path / "run.json").is_file()
            last = to_bytes("error", {"error": self._their_error(error), "keeps": is_left})
        self._last = last
        self._messages.put(last)


class _ToTheOther(logging.Handler):
    """Sends log records to the other side."""

    def __init__(self, messages: queue.Queue[bytes], words: Callable[[str], str]) -> None:
        super().__init__()
        self._messages = messages
        self._words = words

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record; a full queue drops it, since events matter more."""
        with suppress(queue.Full):
            entry = [record.name, record.levelno, self._words(self.format(record))]
            self._messages.put_nowait(to_bytes("log", entry))


def _free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _interface_of(address: str) -> str:
    """The network interface that has this address; empty if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return ""


def _forget_threads_of_ray() -> None:
    """Restore ``OMP_NUM_THREADS`` where Ray set it to the actor's CPUs, which are one.

    The plan would take it for a limit that a person set.
    """
    began = Path("/proc/self/environ")
    if began.exists() and b"\0OMP_NUM_THREADS=" not in b"\0" + began.read_bytes():
        os.environ.pop("OMP_NUM_THREADS", None)


def _make_locked_folder() -> tuple[Path, Lock]:
    """A new folder and its lock.

    It has its name only once it is locked: a rank that starts at this moment removes what is not.
    """
    new = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}"))
    lock = Lock(new / "lock")
    return new.rename(new.with_name(new.name.removeprefix("new-"))), lock


def _remove_folders_of_the_dead() -> None:
    """Remove what killed ranks left on this node: their unlocked folders."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            Lock(folder / "lock").release()
        except (OSError, RunLockedError):
            continue
        shutil.rmtree(folder, ignore_errors=True)
