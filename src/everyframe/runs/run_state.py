"""Save and load the state of a run, at a cost of at most 1 % of its time.

The state on disk was valid at some moment, and everything after it is recomputed with the same
bits, so results don't depend on how often it is saved. If the disk is full or gone, that is
reported once; the run continues, and the last complete state remains.
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
from everyframe.runs.checksummed_json import UNREADABLE
from everyframe.runs.folder import Lock, RunFolder
from everyframe.runs.tensor_store import TensorStore, hashes_in
from everyframe.runtime.interface import VideoState
from everyframe.runtime.run_logs import OomEvent


class FileOomLog:
    """Out-of-memory log of one stage of one clip, stored in the run folder.

    `on_failure` is called with the reason if an event can't be saved or earlier ones can't be read.
    """

    def __init__(
        self, folder: RunFolder, clip: int, stage: int, on_failure: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._place = [clip, stage]
        self._on_failure = on_failure

    def known(self) -> tuple[OomEvent, ...]:
        return tuple(
            OomEvent(*of) for clip, stage, of in self._all() if [clip, stage] == self._place
        )

    def keep(self, event: OomEvent) -> None:
        try:
            self._folder.write_oom_events([*self._all(), [*self._place, [*astuple(event)]]])
        except OSError as error:
            self._on_failure(error.strerror or str(error))

    def _all(self) -> list[Any]:
        try:
            return self._folder.oom_events()
        except CorruptRunError as error:
            self._on_failure(str(error))
            return []


#: Seconds to wait after a failed write.
_AFTER_FAILURE = 30.0
#: Saved fields of a `VideoState`.
_VIDEO_FIELDS = ("seed", "text", "conditioning", "latents", "last_frames", "step", "sampler_state",
            "finished_batches", "repairs")  # fmt: skip


@dataclass(frozen=True)
class SaveInterval:
    """How often state is saved: at least `pause` s apart, for at most `share` of the run time."""

    pause: float = 1.0
    share: float = 0.01


#: Save at every step, whatever it costs.
EVERY_STEP = SaveInterval(0.0, math.inf)


@dataclass(frozen=True)
class SaveOptions:
    """How a run is saved.

    Attributes:
        root: folder of runs; None saves nothing.
        output: requested output path.
        as_uint8: save frames as uint8, if nothing finer is needed.
        cleans: delete the folder when the run is done; otherwise the consumer of its events does.
        pace: how often state is saved.
        name: name of the new folder in `root`; None for its start time.
        parts: folder of runs on this machine for the state of other video groups than the first,
            used where this machine can't see the folder of rank 0.
    """

    root: Path | None
    output: str | None = None
    as_uint8: bool = False
    cleans: bool = True
    pace: SaveInterval = SaveInterval()
    name: str | None = None
    parts: Path | None = None


@dataclass
class RunState:
    """Progress of a run: the next stage and clip, and the state of its videos.

    Attributes:
        clip: index of the clip.
        stage: index of the next stage of that clip.
        videos: the videos at that point.
        repairs: precision repairs so far, as the record stores them.
        notes: notes for the record, each with its seed.
        frames: frames of earlier clips in order, each with its stored form.
    """

    clip: int = 0
    stage: int = 0
    videos: Sequence[VideoState] = ()
    repairs: list[dict[str, Any]] = field(default_factory=list)
    notes: list[tuple[int | None, str]] = field(default_factory=list)
    frames: list[tuple[int, int, Any]] = field(default_factory=list)


class RunStateWriter:
    """Save the state of one run while it runs; without a folder, save nothing."""

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
        # Seconds spent on disk since the last write.
        self._spent = 0.0
        self._is_off = False

    @property
    def cleans(self) -> bool:
        """Whether the folder is deleted when the run is done."""
        return self._how.cleans

    def note(self, text: str) -> None:
        self._notes.append(Note(text))

    def notes(self) -> Iterator[Event]:
        """Yield and clear the queued notes."""
        notes, self._notes = self._notes, []
        yield from notes

    def write(self, progress: RunState) -> None:
        """Save the state if it is due."""
        waited = time.monotonic() - self._last
        least = max(self._pause, self._spent / self._how.pace.share)
        if self.folder is None or self._is_off or waited < least:
            return
        began = time.monotonic()
        try:
            self._write(self.folder, progress)
        except OSError as error:
            self._note_failure(f"{error.strerror or error}")
        except NotSerializableError as error:
            self._note_failure(str(error))
            self._is_off = True
        else:
            self._pause = self._how.pace.pause
        self._last = time.monotonic()
        self._spent = self._last - began

    def frames(self, progress: RunState, event: FramesDecoded) -> None:
        """Save frames of a clip that others follow; the saved state can't reproduce them."""
        if self._store is None or self._is_off:
            return
        began = time.monotonic()
        frames = event.frames
        if self._how.as_uint8:
            frames = to_uint8(frames)
        try:
            saved = to_jsonable(frames, self._store.keep)
        except OSError as error:
            self._note_failure(f"{error.strerror or error}")
            # A state without these frames could not be resumed; the last saved one can.
            self._is_off = True
            return
        progress.frames.append((event.seed, event.num_frames, saved))
        self._spent += time.monotonic() - began

    def oom_log(self, clip: int, stage: int) -> FileOomLog | None:
        """Out-of-memory log of that stage; None if nothing is saved."""
        if self.folder is None:
            return None
        return FileOomLog(self.folder, clip, stage, self._not_saved)

    def _not_saved(self, why: str) -> None:
        self.note(
            f"the out-of-memory event can't be saved ({why}); if this run is interrupted and "
            "resumed where there is more memory, its bits may differ"
        )

    def saved_frames(self, progress: RunState) -> Iterator[FramesDecoded]:
        """Yield the saved frames of earlier clips again."""
        for seed, num_frames, saved in progress.frames:
            assert self._store is not None
            yield FramesDecoded(seed, num_frames, from_jsonable(saved, self._store.fetch))

    def read(self, videos: Sequence[VideoState], place: RunFolder) -> RunState:
        """Restore the state of `place` (see `furthest`) into `videos`.

        Frames of earlier clips are copied into this writer's folder, if it has one.

        Raises:
            CorruptRunError: the saved data changed.
        """
        state, store = place.state(), TensorStore(place.tensors)
        if state is None:
            raise CorruptRunError(f"{place.path} has no state")
        try:
            saved = {each["seed"]: each for each in state["takes"]}
            for video in videos:
                for name in _VIDEO_FIELDS:
                    setattr(video, name, from_jsonable(saved[video.seed][name], store.fetch))
            frames = [
                (seed, count, self._brought(mark, store))
                for seed, count, mark in state["frames"]
                if self._store is not None and seed in {video.seed for video in videos}
            ]
            return RunState(
                state["clip"], state["stage"], videos, frames=frames,
                repairs=state["repairs"], notes=[(seed, text) for seed, text in state["notes"]],
            )  # fmt: skip
        except UNREADABLE as error:
            raise CorruptRunError(f"the state of {place.path} can't be read: {error!r}") from error

    def _brought(self, mark: Any, store: TensorStore) -> Any:
        """Copy saved frames from `store` into this writer's store; return their new reference."""
        assert self._store is not None
        if store.folder == self._store.folder:
            return mark
        return to_jsonable(from_jsonable(mark, store.fetch), self._store.keep)

    def finish(self, *, remove: bool) -> None:
        """Release the run; with `remove`, delete everything saved."""
        if self.folder is not None and remove:
            self.folder.remove()
        if self._lock is not None:
            self._lock.release()

    def _write(self, folder: RunFolder, progress: RunState) -> None:
        assert self._store is not None
        store = self._store
        memo: dict[int, Any] = {}

        def plain(value: Any) -> Any:
            # All videos of a run share one text.
            if id(value) not in memo:
                memo[id(value)] = to_jsonable(value, store.keep)
            return memo[id(value)]

        videos = [
            {name: plain(getattr(t, name)) for name in _VIDEO_FIELDS} for t in progress.videos
        ]
        state = {
            "clip": progress.clip,
            "stage": progress.stage,
            "takes": videos,
            "repairs": progress.repairs,
            "notes": progress.notes,
            "frames": progress.frames,
        }
        folder.write_state(state)
        store.sweep(hashes_in(videos) | hashes_in([list(each) for each in progress.frames]))

    def _note_failure(self, why: str) -> None:
        assert self.folder is not None
        if self._pause < _AFTER_FAILURE:
            self.note(
                f"the run state can't be written to {self.folder.path} ({why}); the run continues, "
                "and if it is interrupted it resumes from the last state that was written"
            )
        self._pause = max(self._how.pace.pause, _AFTER_FAILURE)


def furthest(folder: RunFolder, seeds: Sequence[int]) -> RunFolder | None:
    """The state of a run that includes all of these videos and has advanced furthest.

    Any rank may have saved it: any rank can resume from it. None if these videos have not begun. A
    corrupt one is returned if there is no other.
    """
    found: list[tuple[tuple[int, ...], RunFolder]] = []
    for each in folder.parts():
        try:
            state = each.state()
            steps = {video["seed"]: video["step"] for video in (state or {}).get("takes", ())}
            if state is not None and set(seeds) <= steps.keys():
                far = (state["clip"], state["stage"], sum(steps[seed] for seed in seeds))
                found.append((far, each))
        except (CorruptRunError, *UNREADABLE):
            found.append(((-1,), each))
    return max(found, key=lambda one: one[0])[1] if found else None
