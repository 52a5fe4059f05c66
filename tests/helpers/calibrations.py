"""Made-up calibrations of the embedded model, for tests of code that uses a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import everyframe
from everyframe.checkpoints.digest import digest
from everyframe.fast_paths.calibrations import (
    LEAST_VIDEOS,
    Calibration,
    Measurement,
    save_calibration,
)
from everyframe.planning.quality import calibration_key, size_of
from everyframe.planning.resolve import prepare

PROMPT = "a red circle moves right"
#: A mild method and a bold one, for a run of 30 steps.
METHODS: Mapping[str, Measurement] = {
    "unipc@12": Measurement(40.0, 0.02, 2.4),
    "taylor1@8": Measurement(35.5, 0.05, 3.6),
}


def plant_calibration(methods: Mapping[str, Measurement] = METHODS, **options: Any) -> str:
    """A calibration in which all videos by a method are alike; its key."""
    prepared = prepare(everyframe.Request(prompt=PROMPT, seed=1, **options))
    digest(prepared.model.weight_files())
    plan = prepared.plan
    key = calibration_key(prepared.model, plan.settings, plan.components, plan.device)
    assert key is not None
    videos = tuple(("", number) for number in range(LEAST_VIDEOS))
    rows = {name: (each,) * LEAST_VIDEOS for name, each in methods.items()}
    save_calibration(Calibration(key, size_of(plan.settings), videos, rows, 60.0, 1.0))
    return key
