"""What a run does around calls that ranks share out by branches: steps, the guard, kept answers.

All of it is done on every rank alike, once the whole answer is there: so a fault that is in one
rank's branch alone is found, repaired and told by all. Read next: `cfg_parallel.py`, `guard.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from everyframe.diffusers_pipelines.cfg_parallel import CallHooks, DenoiserCall
from everyframe.diffusers_pipelines.guard import PipelineGuard
from everyframe.diffusers_pipelines.step_tracking import StepTracker, notify_step_tracker
from everyframe.runtime.interface import VideoState


class GuardedCallHooks(CallHooks):
    """For one call of the pipeline; `guarded` is who looks at answers."""

    guarded: PipelineGuard

    def __init__(self, watch: StepTracker, take: VideoState) -> None:
        self._watch, self._take = watch, take

    @property
    def is_paused(self) -> bool:
        """Whether calls are repeated now, and not to be shared out."""
        return self._watch.is_paused

    def asked(self, call: DenoiserCall) -> None:
        """See `CallHooks`."""
        notify_step_tracker(self._watch, call.name, call.module, call.args, call.kwargs)

    def computing(self, call: DenoiserCall) -> AbstractContextManager[None]:
        """See `CallHooks`."""
        return self.guarded.computing(call.name)

    def checked(self, call: DenoiserCall, answer: Any) -> Any:
        """See `CallHooks`."""
        answer = self.guarded.checked(call.name, call.module, call.args, call.kwargs, answer)
        if self._take.answers is not None:
            self._take.answers.keep(answer, self._take.remedies)
        return answer
