"""When memory ran out in a stage, so that a run that is gone on with does in less what was in less.

What is done in less memory may have other bits, and by the time that a run is gone on with there
may be more of it. So each shortage is kept at once, before anything is computed in less, with the
call that it was in, and done again at that call. What several ranks compute together none of them
can do in less: that is an error, by which they are started again (`everyframe.engine.launch`). Not
here: what is done (`reliefs.py` and `pipeline/reliefs.py`), and where it is kept
(`everyframe.runs.shortages`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from everyframe.core.errors import ScarceError, Scarcity

if TYPE_CHECKING:
    from everyframe.families.family import Take


@dataclass(frozen=True)
class Shortage:
    """That memory ran out in the video of `seed`, when `step` of its steps were done.

    `call` counts the calls of the stage since then, from 0; `at` is the component of a pipeline.
    """

    seed: int | None
    step: int = 0
    call: int = 0
    at: str = ""


class Shortages(Protocol):
    """Those of one stage, kept over the end of a process."""

    def known(self) -> tuple[Shortage, ...]:
        """Those of before, in their order."""
        ...

    def keep(self, shortage: Shortage) -> None:
        """Keep one more, and come back when it is kept."""
        ...


class Moments:
    """The calls of a stage, told apart in a way that holds for a run that is gone on with, too."""

    def __init__(self) -> None:
        self._take: Take | None = None
        self._left: list[Shortage] | None = None
        self._first: dict[tuple[int | None, int], int] = {}

    def of(self, take: Take) -> None:
        """From here on this video is worked on."""
        self._take = take
        if self._left is None:
            self._left = [] if take.shortages is None else [*take.shortages.known()]

    def now(self, number: int) -> Shortage:
        """A shortage in the call of that number, by which the stage counts."""
        seed, step = (None, 0) if self._take is None else (self._take.seed, self._take.step)
        # Where other videos were done before the run was broken off, numbers are others.
        return Shortage(seed, step, number - self._first.setdefault((seed, step), number))

    def keep(self, shortage: Shortage) -> None:
        """Keep it, where the video's are kept."""
        if self._take is not None and self._take.shortages is not None:
            self._take.shortages.keep(shortage)

    def due(self, number: int) -> Iterator[bool]:
        """For each shortage of before that was up to this call: whether it was in this very one."""
        now = self.now(number)
        while self._left and (self._left[0] == now or self._is_past(self._left[0], now)):
            yield self._left.pop(0) == now

    def _is_past(self, shortage: Shortage, now: Shortage) -> bool:
        """Whether it was in a step, or a video, that is not computed again."""
        if shortage.seed == now.seed:
            return shortage.step < now.step
        # Videos come in the order of their seeds, but where each lot of frames goes through all.
        seen = {seed for seed, _ in self._first}
        return shortage.seed not in seen and (shortage.seed or 0) < (now.seed or 0)


def together(
    stage: str, step: int, components: Iterable[str], where: str, said: str
) -> ScarceError:
    """The error of a rank that lacks memory while others wait for it; see `Scarcity`."""
    return ScarceError(
        f"{where}: out of memory in the middle of what several devices compute together, where "
        "none can do with less by itself; more devices or --shard-weights may go on from the last "
        f"step (everyframe resume), and a smaller size or num_frames does ({said})",
        Scarcity(stage, step, tuple(components), where, said),
    )
