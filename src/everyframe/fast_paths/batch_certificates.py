"""Certificates of batches: whether steps of several videos as one call keep their bits, and pay.

They are made while videos are made, of the first batches of a plan: the same calls one by one and
as one, bits and times compared. So there is nothing to prepare, and no batch that was not compared
counts for a video. `everyframe.engine.batched_runs` makes them, plans read them.
"""

from __future__ import annotations

import logging
import statistics
from datetime import date

from everyframe.core.plan import ComponentPlan, Plan
from everyframe.fast_paths.certificates import (
    Certificate,
    Verdict,
    device_key,
    find,
    keep,
    plan_key,
)

_log = logging.getLogger(__name__)

#: Most videos in one step: four were measured to gain nearly all that eight do.
MOST_VIDEOS = 4
#: Compared calls of a trial; the first one also sets up what stays, so its time does not count.
_CALLS = 4
#: Videos a second over one by one from which a batch pays: each of its videos takes longer.
LEAST_GAIN = 1.08

#: Stages in which a component denoises.
_STAGE = "denoise"


def batched_components(plan: Plan) -> tuple[ComponentPlan, ...]:
    """The components whose calls are made as one; none for a plan without a batch.

    Calls meet where modules denoise whole, on one device, and store nothing from step to step.
    Products inside of a compiled block can't be made video by video.
    """
    found = _denoisers(plan)
    method = plan.settings.method
    is_alone = plan.parallel is None and plan.switches is None and plan.infeasible is None
    moves = any(p.block_offload or p.model_offload or p.num_weight_shards > 1 for p in found)
    is_plain = not has_compiled_blocks(plan) and (method is None or not method.is_cache)
    return found if is_alone and not moves and is_plain else ()


def has_compiled_blocks(plan: Plan) -> bool:
    """Whether blocks that denoise are compiled."""
    return any("compile" in (part.fast_paths or ()) for part in _denoisers(plan))


def _denoisers(plan: Plan) -> tuple[ComponentPlan, ...]:
    return tuple(part for part in plan.components if part.stage == _STAGE)


def certificates_of(plan: Plan) -> dict[int, Certificate]:
    """What is known of batches of this plan, by their number of videos."""
    known = find(*_keys(plan))
    names = {number: _name(number) for number in range(2, MOST_VIDEOS + 1)}
    return {number: known[name] for number, name in names.items() if name in known}


def _keys(plan: Plan) -> tuple[str, str]:
    settings, parts = plan.settings, batched_components(plan)
    size = (settings.num_frames, settings.height, settings.width, settings.guidance_scale != 1)
    paths = tuple((part.num_parameters, part.fast_paths, part.repairs) for part in parts)
    run = (plan.family, plan.title, size, paths)
    name = "+".join(part.name for part in parts)
    return device_key(plan.device, plan.num_threads), plan_key(name, parts[0].precision, [run])


def _name(number: int) -> str:
    return f"batch-{number}"


class BatchTrial:
    """The trial of batches of one size, or what a stored certificate says of them."""

    def __init__(self, plan: Plan, num_videos: int) -> None:
        self._device, self._plan = _keys(plan)
        self._component, self._num_videos = batched_components(plan)[0].name, num_videos
        self._gains: list[float] = []
        self._certificate = find(self._device, self._plan).get(_name(num_videos))

    @property
    def is_refused(self) -> bool:
        """Whether calls are made one by one."""
        return self._certificate is not None and self._certificate.verdict == "refused"

    @property
    def is_certified(self) -> bool:
        """Whether calls are made as one without another look at their bits."""
        return self._certificate is not None and self._certificate.verdict == "certified"

    def refuse(self, why: str, *, is_lasting: bool = True) -> None:
        """Make calls one by one from now on; for later runs too if `is_lasting`."""
        _log.info("batches of %d are not used: %s", self._num_videos, why)
        self._decide("refused", why, None, is_lasting=is_lasting)

    def take(self, *, is_equal: bool, seconds_alone: float, seconds_together: float) -> None:
        """Note a comparison; the last one decides."""
        if not is_equal:
            self.refuse("a video of a batch has other bits than by itself")
            return
        if self.is_certified:
            return
        self._gains.append(seconds_alone / max(seconds_together, 1e-9))
        if len(self._gains) < _CALLS:
            return
        gain = statistics.median(self._gains[1:])
        message = f"{gain:.2f} times as many videos a second as one by one, each with its own bits"
        self._decide("certified" if gain >= LEAST_GAIN else "refused", message, gain)

    def _decide(
        self, verdict: Verdict, why: str, gain: float | None, *, is_lasting: bool = True
    ) -> None:
        self._certificate = Certificate(
            what=_name(self._num_videos), component=self._component, device=self._device,
            plan=self._plan, verdict=verdict, reason=why, error=0.0 if gain else None,
            limit=0.0, gain=gain, date=date.today().isoformat(),
        )  # fmt: skip
        if is_lasting:
            keep([self._certificate])
