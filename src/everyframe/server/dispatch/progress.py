"""Progress of a job over all of its stages, weighted by the plan's forecast; it never falls.

A plain ``step / num_steps`` would fall with each stage, since steps of each stage begin at 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from everyframe.core.events import Event, StageDone, StageStarted, Step
from everyframe.core.plan import Plan

#: Percent until the files of the video are on disk.
MOST = 99
#: Part of the whole that an attempt has to do before its own speed is believed.
_ENOUGH = 0.02


class ProgressMeter:
    """Progress of one attempt of a job.

    Attributes:
        percent: 0 to `MOST`; at least that of earlier attempts.
        phase: the current stage; None before the first.
        step: finished steps of that stage, of `total_steps`.
        stage_durations: seconds of each finished stage, over all clips.
    """

    def __init__(
        self, plan: Plan, at_least: int = 0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._weights = stage_weights(plan)
        self._num_videos = plan.settings.num_videos
        self._forecast = plan.seconds
        self._now = now
        self._first: float | None = None
        self._began = 0.0
        self._base = self._fraction = 0.0
        self._share = 0.0
        self.percent = min(at_least, MOST)
        self.phase: str | None = None
        self.step = self.total_steps = 0
        self.stage_durations: dict[str, float] = {}

    def take(self, event: Event) -> None:
        """Advance by an event of the run."""
        if isinstance(event, StageStarted):
            self._begin(event)
        elif isinstance(event, Step) and event.stage == self.phase:
            self.step, self.total_steps = event.step, event.num_steps
            each = self._share / max(event.num_steps, 1)
            if self._first is None:  # a resumed run begins with what was done before
                self._first = self._base + each * (event.step - 1)
                self._began = self._now() - event.seconds
            self._advance(self._base + each * event.step)
        elif isinstance(event, StageDone):
            before = self.stage_durations.get(event.stage, 0.0)
            self.stage_durations[event.stage] = before + event.seconds
            self._advance(self._base + self._share)

    @property
    def eta_s(self) -> float | None:
        """Remaining seconds, from this attempt's speed; at first from the plan's forecast."""
        first = self._fraction if self._first is None else self._first
        done = self._fraction - first
        if done >= _ENOUGH:
            return (self._now() - self._began) / done * (1 - self._fraction)
        if self._forecast is None:
            return None
        return self._forecast * self._num_videos * (1 - self._fraction)

    def fields(self) -> dict[str, Any]:
        """The fields of a job's row."""
        eta = self.eta_s
        return {
            "progress": self.percent, "phase": self.phase, "step": self.step,
            "total_steps": self.total_steps, "eta_s": None if eta is None else round(eta, 2),
        }  # fmt: skip

    def _begin(self, event: StageStarted) -> None:
        names = list(self._weights)
        self._share, self._base = 0.0, self._fraction
        if event.stage in names:
            before = sum(self._weights[name] for name in names[: names.index(event.stage)])
            self._share = self._weights[event.stage] / event.num_clips
            self._base = (event.clip + before) / event.num_clips
        self.phase, self.step, self.total_steps = event.stage, 0, event.num_steps
        self._advance(self._base)

    def _advance(self, fraction: float) -> None:
        self._fraction = min(max(fraction, self._fraction), 1.0)
        self.percent = max(self.percent, min(int(100 * self._fraction), MOST))


def stage_weights(plan: Plan) -> dict[str, float]:
    """Share of each stage in the time of a clip: by forecast seconds, else operations, else equal.

    The shares add up to 1.
    """
    found: dict[str, list[tuple[float | None, float]]] = {}
    for stage in plan.stages:
        found.setdefault(stage.name, []).append((stage.seconds, stage.operations))
    if all(seconds is not None for each in found.values() for seconds, _ in each):
        weights = {name: sum(s or 0.0 for s, _ in each) for name, each in found.items()}
    else:
        weights = {name: sum(work for _, work in each) for name, each in found.items()}
    total = sum(weights.values())
    if not total:
        return {name: 1 / len(found) for name in found}
    return {name: weight / total for name, weight in weights.items()}
