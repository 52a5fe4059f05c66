"""What whoever reads a run has had of it, so that ranks that begin anew tell nothing twice.

No torch here. Read next: `launch.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from everyframe.core.events import Event, Frames, Kept, Planned, Ready, VideoDone


class Handed:
    """The events of a run that were handed on; `done` are the seeds of videos that are whole."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self._frames: Counter[int] = Counter()
        self._left_out: Counter[int] = Counter()
        self._is_again = False

    def again(self) -> None:
        """From here on events come of ranks that began anew, from a step before."""
        self._is_again, self._left_out = True, self._frames.copy()

    def new(self, event: Event) -> Event | None:
        """The event, with those of its frames that are new; None if nothing of it is."""
        if self._is_again and isinstance(event, (Planned, Ready, Kept)):
            return None
        if isinstance(event, Frames):
            return self._new_frames(event)
        if isinstance(event, VideoDone):
            self.done.append(event.seed)
        return event

    def _new_frames(self, event: Frames) -> Frames | None:
        seed = event.seed
        known = min(self._left_out[seed], event.num_frames)
        self._left_out[seed] -= known
        if known == event.num_frames:
            return None
        self._frames[seed] += event.num_frames - known
        if not known:
            return event
        return replace(event, num_frames=event.num_frames - known, frames=event.frames[known:])
