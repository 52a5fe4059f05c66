"""Plans for tests: changed by hand, run stage by stage, and with certificates planted for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from everyframe.core.events import FramesDecoded
from everyframe.core.plan import Plan
from everyframe.families.registry import stages_of
from everyframe.fast_paths.certificates import Certificate, Verdict
from everyframe.planning.resolve import PreparedPlan
from everyframe.runtime.interface import VideoState


def frames_of(prepared: PreparedPlan, change: Callable[[Plan], Plan], **given: Any) -> np.ndarray:
    """Frames (T, H, W, 3) of the plan as `change` makes it; `given` are the take's."""
    plan = change(prepared.plan)
    video = VideoState(plan.settings.seed, **given)
    frames = []
    with torch.inference_mode():
        for stage in stages_of(prepared.model, plan, 0):
            frames += [
                event.frames for event in stage.run([video]) if isinstance(event, FramesDecoded)
            ]
    return np.concatenate(frames)


def unchanged(plan: Plan) -> Plan:
    """The plan itself."""
    return plan


def saving(name: str, value: int) -> Callable[[Plan], Plan]:
    """The plan with one more saving."""
    return lambda plan: replace(plan, settings=plan.settings.with_saving(name, value))


def with_components(**changes: Any) -> Callable[[Plan], Plan]:
    """The plan with all of its components changed alike."""
    return lambda plan: replace(
        plan, components=tuple(replace(part, **changes) for part in plan.components)
    )


def certificates_of(
    prepared: PreparedPlan, verdict: Verdict, path: str = "attention-flash"
) -> list[Certificate]:
    """One for that path of each component of that plan."""
    certificates = prepared.chooser.certificates
    assert certificates is not None
    made = []
    for part in prepared.plan.components:
        runs = [run for run in prepared.fitted.runs if run.stage_call.component == part.name]
        subject = certificates.subject(part.name, part.precision, runs)
        made.append(
            Certificate(
                path, part.name, subject.device_key, subject.plan_key, verdict, "planted", 1e-7,
                1e-5, 3.0, "2026-11-22",
            )
        )  # fmt: skip
    return made
