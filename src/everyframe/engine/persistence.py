"""Create the folder of a run when it begins, and remove or keep it when it ends.

`resumption/resume.py` reads the folder; `everyframe.runs.run_state` writes progress into it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from everyframe.core.errors import EveryframeError, NotSerializableError
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.core.serialization import to_jsonable
from everyframe.engine.distributed import RankContext
from everyframe.planning.resolve import LoadedModel
from everyframe.runs.folder import RunFolder, new_run
from everyframe.runs.replay_log import FileReplayLog
from everyframe.runs.resume_hint import resume_hint
from everyframe.runs.retention import days_of_runs, describe, remove_old_runs
from everyframe.runs.run_state import RunStateWriter, SaveOptions
from everyframe.runs.tensor_store import TensorStore
from everyframe.runtime.interface import VideoState


def create_run(
    how: SaveOptions,
    request: Request,
    plan: Plan,
    record: dict[str, Any],
    given: LoadedModel | None = None,
) -> RunStateWriter:
    """Create a run folder with request, plan and record, and the digests of an in-memory model.

    If the folder can't be written, the run continues unsaved and the writer holds a note.
    """
    if how.root is None:
        return RunStateWriter(None, how)
    days_of_runs()  # a wrong one is refused before there is a run
    folder: RunFolder | None = None
    lock = None
    try:
        folder = new_run(how.root, how.name)
        lock = folder.lock()
        entries = {
            "began": time.time(),
            "place": os.getcwd(),
            "output": how.output,
            "as_uint8": how.as_uint8,
            "given": None if given is None else dict(given.digests()),
        }
        write(folder, entries, request, plan, record)
    except (OSError, NotSerializableError) as error:
        if folder is not None:
            folder.remove()
        if lock is not None:
            lock.release()
        why, elsewhere = f" ({error})", ""
        if isinstance(error, OSError):
            why = f" in {how.root} ({error.strerror or error})"
            elsewhere = "; EVERYFRAME_RUNS names another folder"
        writer = RunStateWriter(None, how)
        writer.note(
            f"this run can't be saved{why}, so it cannot be resumed if it is interrupted{elsewhere}"
        )
        return writer
    writer = RunStateWriter(folder, how, lock)
    _remove_old_runs(how.root, writer)
    return writer


def _remove_old_runs(root: Path, writer: RunStateWriter) -> None:
    """Delete old runs to bound the size of the runs folder; each deletion is a note."""
    try:
        for removed in remove_old_runs(root):
            writer.note(describe(removed))
    except OSError as error:
        writer.note(f"old runs in {root} can't be removed ({error.strerror or error})")


def write(
    folder: RunFolder,
    entries: Mapping[str, Any],
    request: Request,
    plan: Plan,
    record: Mapping[str, Any],
    *,
    is_own: bool = True,
) -> None:
    """Write request and plan over those in `entries`; signed if `is_own`. Raises `OSError`."""
    keep = TensorStore(folder.given).keep
    folder.write_run(
        {
            **entries,
            "request": to_jsonable(request, keep),
            "plan": to_jsonable(plan, keep),
            "record": record,
        },
        is_own=is_own,
    )


def writer_for_rank(here: RankContext, how: SaveOptions, begun: RunStateWriter) -> RunStateWriter:
    """The state writer of this rank for a run that rank 0 has `begun`.

    The first rank of each video group saves the state of its own videos in the same folder, if this
    machine can see it.
    """
    division, world = here.plan.parallel, here.parallel.world
    if division is None or len(division.videos_per_group) == 1 or not here.videos:
        return begun
    mine = "" if begun.folder is None else str(begun.folder.path)
    path = world.broadcast_object(mine, 0, "where the run is kept")
    if not here.parallel.video_group.is_lead or begun.folder is not None or not path:
        return begun
    folder = RunFolder(Path(path), here.group)
    if not folder.path.is_dir() and how.parts is not None:
        folder = replace(folder, path=how.parts / folder.name)
        folder.path.mkdir(parents=True, mode=0o700)
    if folder.path.is_dir():
        return RunStateWriter(folder, how)
    writer = RunStateWriter(None, how)
    writer.note(
        f"{path} is not on this machine too; its videos begin again if the run is interrupted"
    )
    return writer


@contextmanager
def saved_run(
    writer: RunStateWriter, videos: Sequence[VideoState], *, is_in_memory: bool = False
) -> Iterator[None]:
    """Context: this process owns the run, and answers of a pipeline's components are saved.

    On exit the folder is removed if the run is done or can't be done at all. Otherwise it stays,
    and an error says how to resume: a pipeline `is_in_memory` has to be given again.
    """
    folder = writer.folder
    for video in videos if folder is not None else ():
        assert folder is not None
        video.replay_log = FileReplayLog(folder.answers / str(video.seed), writer.note)
    remove = False
    try:
        yield
        remove = writer.cleans
    except EveryframeError as error:
        remove = error.repeats
        hint = resume_hint(folder, is_in_memory=is_in_memory)
        if remove or not hint:
            raise
        raise error.reworded(f"{error}; {hint}") from error.__cause__
    finally:
        # Other video groups may still be running.
        writer.finish(remove=remove and (folder is None or folder.part == 0))
