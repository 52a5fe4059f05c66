"""When memory ran out in a run: a small file, written whole before the run goes on in less.

Not in the state, which is written when it is due, and is of a moment when a stage began or a step
was done. Read next: `everyframe.families.shortages`, `keeper.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from everyframe.core.errors import DamagedError
from everyframe.families.shortages import Shortage
from everyframe.runs.folder import RunFolder


class KeptShortages:
    """Those of one stage of one clip, in that run's folder.

    `failed` is told why one can't be kept, or those of before can't be read.
    """

    def __init__(
        self, folder: RunFolder, clip: int, stage: int, failed: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._place = [clip, stage]
        self._failed = failed

    def known(self) -> tuple[Shortage, ...]:
        """See `everyframe.families.shortages.Shortages`."""
        return tuple(
            Shortage(*of) for clip, stage, of in self._all() if [clip, stage] == self._place
        )

    def keep(self, shortage: Shortage) -> None:
        """See `everyframe.families.shortages.Shortages`."""
        try:
            self._folder.write_shortages([*self._all(), [*self._place, [*astuple(shortage)]]])
        except OSError as error:
            self._failed(error.strerror or str(error))

    def _all(self) -> list[Any]:
        try:
            return self._folder.shortages()
        except DamagedError as error:
            self._failed(str(error))
            return []
