"""Frames, steps and alarms of a run, collected from its events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from everyframe.core.events import Event, FramesDecoded, Note, Repaired, Step


def frames_of(events: Iterable[Event]) -> np.ndarray[Any, Any]:
    """All frames, in the order in which they came."""
    return np.concatenate([event.frames for event in events if isinstance(event, FramesDecoded)])


def frames_by_seed(events: Iterable[Event]) -> dict[int, np.ndarray[Any, Any]]:
    """The frames of each video."""
    found: dict[int, list[Any]] = {}
    for event in events:
        if isinstance(event, FramesDecoded):
            found.setdefault(event.seed, []).append(event.frames)
    return {seed: np.concatenate(frames) for seed, frames in found.items()}


def steps(events: Iterable[Event]) -> list[int]:
    """The steps of denoising that were done."""
    return [each.step for each in events if isinstance(each, Step) and each.stage == "denoise"]


def alarms(events: Sequence[Event]) -> list[Event]:
    """Repairs, and notes that name a step."""
    notes = [event for event in events if isinstance(event, Note) and "step " in event.text]
    return [*(event for event in events if isinstance(event, Repaired)), *notes]
