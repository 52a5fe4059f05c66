"""Writes how far a run came, so often that it costs a hundredth of the run at most, and reads it.

The state on the disk is always one that was true at some moment, and all that follows from it is
computed again with the same bits; so nothing depends on how often it is written. A disk that is
full or gone is told once: the run goes on, and the state stays the last one that was whole.
Read next: `folder.py`, `tensor_store.py`; `everyframe.engine.run`, which tells what happens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from everyframe.core.errors import CorruptRunError, NotSerializableError
from everyframe.core.events import Event, FramesDecoded, Note
from everyframe.core.serialization import from_jsonable, to_jsonable
from everyframe.media.pixels import to_uint8
from everyframe.runs.atomic_write import UNREADABLE
from everyframe.runs.folder import Lock, RunFolder
from everyframe.runs.tensor_store import TensorStore, hashes_in
from everyframe.runtime.interface import VideoState
from everyframe.runtime.run_logs import OomEvent


class FileOomLog:
    """Those of one stage of one clip, in that run's folder.

    `failed` is told why one can't be kept, or those of before can't be read.
    """

    def __init__(
        self, folder: RunFolder, clip: int, stage: int, failed: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._place = [clip, stage]
        self._failed = failed

    def known(self) -> tuple[OomEvent, ...]:
        """See `everyframe.runtime.oom_fallback.OomLog`."""
        return tuple(
            OomEvent(*of) for clip, stage, of in self._all() if [clip, stage] == self._place
        )

    def keep(self, shortage: OomEvent) -> None:
        """See `everyframe.runtime.oom_fallback.OomLog`."""
        try:
            self._folder.write_shortages([*self._all(), [*self._place, [*astuple(shortage)]]])
        except OSError as error:
            self._failed(error.strerror or str(error))

    def _all(self) -> list[Any]:
        try:
            return self._folder.shortages()
        except CorruptRunError as error:
            self._failed(str(error))
            return []


#: Seconds that go by after a write that failed.
_AFTER_FAILURE = 30.0
#: What is kept of a take.
_OF_TAKE = ("seed", "text", "known", "latents", "tail", "step", "memory", "finished",
            "remedies")  # fmt: skip


@dataclass(frozen=True)
class SaveInterval:
    """How often the state is written: `pause` seconds apart at least, and so seldom that it takes
    no more than that `share` of the run."""

    pause: float = 1.0
    share: float = 0.01


#: At every step, whatever it costs.
EVERY_STEP = SaveInterval(0.0, math.inf)


@dataclass(frozen=True)
class SaveOptions:
    """How a run is kept: below `root`, a folder of runs, or not at all.

    `output` is what its videos are to be called; frames are kept `as_uint8` where nobody wants them
    finer. `cleans` removes the folder when the run is over; else whoever reads its events does.
    """

    root: Path | None
    output: str | None = None
    as_uint8: bool = False
    cleans: bool = True
    pace: SaveInterval = SaveInterval()


@dataclass
class RunState:
    """How far a run came: which stage of which clip comes next, with takes as they were then.

    `frames` are those of the clips before, in order, with what they were kept as; `notes` what
    was said that stands in the record, each with the seed that it is of; `repairs` what was raised
    in precision so far, as the record holds it.
    """

    clip: int = 0
    stage: int = 0
    takes: Sequence[VideoState] = ()
    repairs: list[dict[str, Any]] = field(default_factory=list)
    notes: list[tuple[int | None, str]] = field(default_factory=list)
    frames: list[tuple[int, int, Any]] = field(default_factory=list)


class RunStateWriter:
    """The state of one run, while it runs. Without a folder nothing is kept."""

    def __init__(
        self, folder: RunFolder | None, how: SaveOptions, lock: Lock | None = None
    ) -> None:
        self.folder = folder
        self._how = how
        self._lock = lock
        self._store = None if folder is None else TensorStore(folder.tensors)
        self._notes: list[Event] = []
        self._last = time.monotonic()
        self._pause = how.pace.pause
        # Seconds that were spent on the disk since the last write.
        self._spent = 0.0
        self._is_off = False

    @property
    def cleans(self) -> bool:
        """Whether the folder is removed when the run is over."""
        return self._how.cleans

    def note(self, text: str) -> None:
        """Something that has to be told."""
        self._notes.append(Note(text))

    def notes(self) -> Iterator[Event]:
        """What has to be told since this was last asked."""
        notes, self._notes = self._notes, []
        yield from notes

    def write(self, progress: RunState) -> None:
        """Write the state if it is due."""
        waited = time.monotonic() - self._last
        least = max(self._pause, self._spent / self._how.pace.share)
        if self.folder is None or self._is_off or waited < least:
            return
        began = time.monotonic()
        try:
            self._write(self.folder, progress)
        except OSError as error:
            self._failed(f"{error.strerror or error}")
        except NotSerializableError as error:
            self._failed(str(error))
            self._is_off = True
        else:
            self._pause = self._how.pace.pause
        self._last = time.monotonic()
        self._spent = self._last - began

    def frames(self, progress: RunState, event: FramesDecoded) -> None:
        """Keep frames of a clip that others follow: they can't be made again from what is kept."""
        if self._store is None or self._is_off:
            return
        began = time.monotonic()
        frames = event.frames
        if self._how.as_uint8:
            frames = to_uint8(frames)
        try:
            kept = to_jsonable(frames, self._store.keep)
        except OSError as error:
            self._failed(f"{error.strerror or error}")
            # A state without these frames would be none to go on from; the last one still is.
            self._is_off = True
            return
        progress.frames.append((event.seed, event.num_frames, kept))
        self._spent += time.monotonic() - began

    def shortages(self, clip: int, stage: int) -> FileOomLog | None:
        """Where that stage's shortages of memory are kept; None where nothing is."""
        if self.folder is None:
            return None
        return FileOomLog(self.folder, clip, stage, self._not_kept)

    def _not_kept(self, why: str) -> None:
        self.note(
            f"that memory ran out can't be kept ({why}); if this run is broken off and gone on "
            "with where there is more memory, its bits may be others"
        )

    def kept_frames(self, progress: RunState) -> Iterator[FramesDecoded]:
        """The frames of the clips before, again."""
        for seed, num_frames, kept in progress.frames:
            assert self._store is not None
            yield FramesDecoded(seed, num_frames, from_jsonable(kept, self._store.fetch))

    def read(self, takes: Sequence[VideoState], place: RunFolder) -> RunState:
        """How far the run came by `place` (see `furthest`), with `takes` as they were then.

        Frames of clips before come to this keeper, if it keeps any.

        Raises:
            DamagedError: what was kept is not as it was written.
        """
        state, store = place.state(), TensorStore(place.tensors)
        if state is None:
            raise CorruptRunError(f"{place.path} has no state")
        try:
            kept = {each["seed"]: each for each in state["takes"]}
            for take in takes:
                for name in _OF_TAKE:
                    setattr(take, name, from_jsonable(kept[take.seed][name], store.fetch))
            frames = [
                (seed, count, self._brought(mark, store))
                for seed, count, mark in state["frames"]
                if self._store is not None and seed in {take.seed for take in takes}
            ]
            return RunState(
                state["clip"], state["stage"], takes, frames=frames,
                repairs=state["repairs"], notes=[(seed, text) for seed, text in state["notes"]],
            )  # fmt: skip
        except UNREADABLE as error:
            raise CorruptRunError(f"the state of {place.path} can't be read: {error!r}") from error

    def _brought(self, mark: Any, store: TensorStore) -> Any:
        """What stands for kept frames here, where they were kept in `store`."""
        assert self._store is not None
        if store.folder == self._store.folder:
            return mark
        return to_jsonable(from_jsonable(mark, store.fetch), self._store.keep)

    def finish(self, *, remove: bool) -> None:
        """Let go of the run, and with `remove` of all that was kept."""
        if self.folder is not None and remove:
            self.folder.remove()
        if self._lock is not None:
            self._lock.release()

    def _write(self, folder: RunFolder, progress: RunState) -> None:
        assert self._store is not None
        store = self._store
        memo: dict[int, Any] = {}

        def plain(value: Any) -> Any:
            # All takes of a run share one text.
            if id(value) not in memo:
                memo[id(value)] = to_jsonable(value, store.keep)
            return memo[id(value)]

        takes = [{name: plain(getattr(t, name)) for name in _OF_TAKE} for t in progress.takes]
        state = {
            "clip": progress.clip,
            "stage": progress.stage,
            "takes": takes,
            "repairs": progress.repairs,
            "notes": progress.notes,
            "frames": progress.frames,
        }
        folder.write_state(state)
        store.sweep(hashes_in(takes) | hashes_in([list(each) for each in progress.frames]))

    def _failed(self, why: str) -> None:
        assert self.folder is not None
        if self._pause < _AFTER_FAILURE:
            self.note(
                f"how far this run came can't be written to {self.folder.path} ({why}); it goes "
                "on, and if it is broken off it begins again where it was written last"
            )
        self._pause = max(self._how.pace.pause, _AFTER_FAILURE)


def furthest(folder: RunFolder, seeds: Sequence[int]) -> RunFolder | None:
    """The part of a run whose state has all of these videos, and has them furthest.

    Which ranks kept it does not matter: a state is true for whoever goes on from it. None where
    these videos are at their beginning; one that is damaged is given where there is no other.
    """
    found: list[tuple[tuple[int, ...], RunFolder]] = []
    for each in folder.parts():
        try:
            state = each.state()
            steps = {take["seed"]: take["step"] for take in (state or {}).get("takes", ())}
            if state is not None and set(seeds) <= steps.keys():
                far = (state["clip"], state["stage"], sum(steps[seed] for seed in seeds))
                found.append((far, each))
        except (CorruptRunError, *UNREADABLE):
            found.append(((-1,), each))
    return max(found, key=lambda one: one[0])[1] if found else None
