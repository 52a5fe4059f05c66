"""Hooks around calls that are split across CFG groups: step tracking, guard, saved answers.

They run on every rank alike, after the whole answer has been exchanged. So all ranks find, repair
and report a fault that occurs in one rank's branch only.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from everyframe.diffusers_pipelines.calls.step_tracking import StepTracker, notify_step_tracker
from everyframe.diffusers_pipelines.guard import PipelineGuard
from everyframe.diffusers_pipelines.parallel.cfg_parallel import CallHooks, DenoiserCall
from everyframe.runtime.interface import VideoState


class GuardedCallHooks(CallHooks):
    """Hooks for one pipeline call; `guarded` checks the answers."""

    guarded: PipelineGuard

    def __init__(self, watch: StepTracker, video: VideoState) -> None:
        self._watch, self._video = watch, video

    @property
    def is_paused(self) -> bool:
        """Whether a call is being repeated, and so is not split."""
        return self._watch.is_paused

    def asked(self, call: DenoiserCall) -> None:
        """See `CallHooks`."""
        call.repairs = self._video.repairs
        notify_step_tracker(self._watch, call.name, call.module, call.args, call.kwargs)

    def computing(self, call: DenoiserCall) -> AbstractContextManager[None]:
        """See `CallHooks`."""
        return self.guarded.computing(call.name)

    def checked(self, call: DenoiserCall, answer: Any) -> Any:
        """See `CallHooks`."""
        made = (call.name, call.module, call.args, call.kwargs)
        if call.repairs != self._video.repairs:
            # An answer of the same exchange was repaired: one device computes this one after that.
            answer = self.guarded.repeated(*made)
        answer = self.guarded.checked(*made, answer)
        if self._video.replay_log is not None:
            self._video.replay_log.keep(answer, self._video.repairs)
        return answer
