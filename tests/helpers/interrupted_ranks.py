"""Runs of several ranks that are interrupted and resumed, for tests of any family.

Every rank interrupts a run by closing its event iterator, which leaves the run folder as a kill
does: the state is written at every step, and nothing on exit.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from everyframe.core.errors import OutOfMemoryInfo
from everyframe.core.events import Event, Note, Repaired, Step, VideoDone
from everyframe.core.request import Request
from everyframe.engine.distributed import Rendezvous
from everyframe.engine.resumption.resume import resume_run
from everyframe.engine.run import stream
from everyframe.parallel.communicator import Communicator
from everyframe.runs.folder import RunFolder
from everyframe.runs.run_state import EVERY_STEP, SaveOptions
from helpers.events import frames_by_seed

#: float32, relative to the largest value: what another number of ranks may change.
ROUNDING = 1e-5


def summarize(events: list[Event], *, speaks: bool) -> dict[str, Any]:
    """What came of a rank's events: frames by seed, steps that were done, notes."""
    return {
        "frames": frames_by_seed(events) if speaks else {},
        "steps": [(e.seed, e.step) for e in events if isinstance(e, Step) and is_of_denoising(e)],
        "notes": [event.text for event in events if isinstance(event, Note)],
        "repairs": [event.to for event in events if isinstance(event, Repaired)],
        "record": [event.record for event in events if isinstance(event, VideoDone)][-1:],
    }


def is_of_denoising(event: Event) -> bool:
    """Whether it is a step of a sampler; a pipeline's are all that it tells of."""
    return isinstance(event, Step) and event.stage in ("denoise", "pipeline")


def begun(
    group: Communicator, root: Path, asked: dict[str, Any], steps: int, local: Any = None
) -> dict[str, Any]:
    """One rank's run, let go after so many steps of denoising; 0 lets it come to its end."""
    request = Request(**{"num_devices": group.size, **asked})
    keep = SaveOptions(root if group.rank == 0 else None, pace=EVERY_STEP)
    events: list[Event] = []
    join = Rendezvous(group.rank, lambda _: group, local)
    with closing(stream(request, keep=keep, num_threads=1, join=join)) as coming:
        for event in coming:
            events.append(event)
            if steps and sum(map(is_of_denoising, events)) == steps:
                break
    return summarize(events, speaks=local is None or group.rank == 0)


def resume_there(
    group: Communicator,
    path: Path,
    devices: dict[str, Any] | None,
    skip: tuple[int, ...] = (),
    out_of_memory: OutOfMemoryInfo | None = None,
) -> dict[str, Any]:
    """One rank resumes the run there."""
    join = Rendezvous(group.rank, lambda _: group)
    events = resume_run(
        RunFolder(path), skip=skip, join=join, ranks=devices, pace=EVERY_STEP, cleans=False,
        out_of_memory=out_of_memory,
    )  # fmt: skip
    return summarize(list(events), speaks=True)


def videos(found: list[dict[str, Any]]) -> dict[int, Any]:
    """The videos of the first rank that has each; all ranks of a group decode for it."""
    made: dict[int, Any] = {}
    for each in found:
        made = {**each["frames"], **made}
    return made


def check_close(found: dict[int, Any], wanted: dict[int, Any]) -> None:
    """The same videos but for rounding."""
    assert found.keys() == wanted.keys()
    for seed, frames in wanted.items():
        assert np.abs(found[seed] - frames).max() <= ROUNDING * np.abs(frames).max()


def copied(path: Path, to: Path) -> Path:
    """A copy of a run, called as it is."""
    return Path(shutil.copytree(path, to / path.name))
