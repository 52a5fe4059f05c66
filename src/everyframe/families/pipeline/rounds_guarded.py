"""What a run does around calls that ranks share out by branches: steps, the guard, kept answers.

All of it is done on every rank alike, once the whole answer is there: so a fault that is in one
rank's branch alone is found, repaired and told by all. Read next: `rounds.py`, `guarded.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from everyframe.families.family import Take
from everyframe.families.pipeline.guarded import Guarded
from everyframe.families.pipeline.rounds import Around, Call
from everyframe.families.pipeline.watching import StepWatch, seen_before


class AroundCalls(Around):
    """For one call of the pipeline; `guarded` is who looks at answers."""

    guarded: Guarded

    def __init__(self, watch: StepWatch, take: Take) -> None:
        self._watch, self._take = watch, take

    @property
    def is_paused(self) -> bool:
        """Whether calls are repeated now, and not to be shared out."""
        return self._watch.is_paused

    def asked(self, call: Call) -> None:
        """See `Around`."""
        seen_before(self._watch, call.name, call.module, call.args, call.kwargs)

    def computing(self, call: Call) -> AbstractContextManager[None]:
        """See `Around`."""
        return self.guarded.computing(call.name)

    def checked(self, call: Call, answer: Any) -> Any:
        """See `Around`."""
        answer = self.guarded.checked(call.name, call.module, call.args, call.kwargs, answer)
        if self._take.answers is not None:
            self._take.answers.keep(answer, self._take.remedies)
        return answer
