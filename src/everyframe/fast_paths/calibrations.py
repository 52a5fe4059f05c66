"""Calibrations: how close lossy sampling methods come to the exact video, measured and stored.

A calibration is of one model, size, precision and device. It holds, for each method and each video
of a set, the smallest PSNR of a frame against the plan's own exact run, the method's own error
estimate, and the time saved. `everyframe.engine.calibration` measures; one JSON file each in the
cache folder, written whole, so that an interrupted calibration resumes.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from everyframe.checkpoints.folder import cache_folder
from everyframe.core.errors import InputError
from everyframe.core.paths import replace_file
from everyframe.core.quality import parse_method

_log = logging.getLogger(__name__)
_SCHEMA = "everyframe.calibrations/1"

#: Decibels beyond these are no measurement.
_MAX_DB = 1000.0

#: What a damaged file may raise.
_UNREADABLE = (
    OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError,
    InputError,
)  # fmt: skip

#: A method is certified by so many videos or more: of few, the worst says little.
LEAST_VIDEOS = 15

#: The worst video of a set is not the worst of all: a method must be better than its budget by it.
#: With 1 dB, 1 of 19 further videos of `shapes` was below 32 dB, by 0.5 dB.
MARGIN_DB = 3.0


@dataclass(frozen=True)
class Measurement:
    """One video by one method.

    Attributes:
        psnr_db: smallest PSNR of its frames against the exact video.
        estimate: the method's accumulated error estimate; None if it makes none.
        gain: denoising time of the exact video over its own.
    """

    psnr_db: float
    estimate: float | None
    gain: float


@dataclass(frozen=True)
class Calibration:
    """All measurements of a key; see `everyframe.planning.quality.calibration_key`.

    Attributes:
        key: digest of what it is valid for, but for the size.
        size: (num_frames, height, width).
        videos: (prompt or empty, seed) of each video.
        measured: by method, one entry a video in their order; methods that fell below the lowest
            budget of interest end early.
        seconds: spent on it so far.
        exact_seconds: time of one exact video, first stage to last.
    """

    key: str
    size: tuple[int, int, int]
    videos: tuple[tuple[str, int], ...]
    measured: Mapping[str, tuple[Measurement, ...]] = field(default_factory=dict)
    seconds: float = 0.0
    exact_seconds: float = 0.0

    def plus(self, method: str, measurement: Measurement) -> Calibration:
        """The calibration with one more video of a method."""
        whole = (*self.measured.get(method, ()), measurement)
        return replace(self, measured={**self.measured, method: whole})

    def is_whole(self, method: str) -> bool:
        """Whether the method has all of the videos, and enough."""
        return len(self.measured.get(method, ())) == len(self.videos) >= LEAST_VIDEOS

    def worst_db(self, method: str) -> float:
        """Smallest PSNR of a frame over all videos of a method."""
        return min(each.psnr_db for each in self.measured[method])

    def median_db(self, method: str) -> float:
        """Median over the videos of their worst frame."""
        return statistics.median(each.psnr_db for each in self.measured[method])

    def gain(self, method: str) -> float:
        """Median of the time saved."""
        return statistics.median(each.gain for each in self.measured[method])

    def fastest(
        self, decibels: float, allowed: Sequence[str], *, can_guide_partly: bool = True
    ) -> str | None:
        """The fastest whole method of the allowed names that holds a budget; None without one.

        A method with products in eight bits needs the names of both to be allowed. What is no
        bolder must hold the budget too (more steps of its kind, and the same with plain products):
        where one does not, it holds by luck.
        """
        held = [
            method
            for method in self.measured
            if self.is_whole(method)
            and parse_method(method).names <= {*allowed}
            and (can_guide_partly or not parse_method(method).has_partial_guidance)
            and self.gain(method) > 1
            and self.worst_db(method) >= decibels + MARGIN_DB
            and all(self.worst_db(each) >= decibels for each in self._milder(method))
        ]
        return max(held, key=lambda each: (self.gain(each), self.worst_db(each)), default=None)

    def _milder(self, method: str) -> list[str]:
        """Measured methods that are no bolder."""
        own = parse_method(method)
        return [each for each in self.measured if parse_method(each).is_no_bolder(own)]

    def limit(self, method: str, decibels: float) -> float | None:
        """Largest error estimate with which a video of a method holds a budget.

        Decibels fall by 20 for each tenfold of the error; the factor between both is that of the
        worst calibrated video. No calibrated video passes it.
        """
        known = [each for each in self.measured[method] if each.estimate]
        if not known:
            return None
        constant = min(each.psnr_db + 20 * math.log10(each.estimate or 1) for each in known)
        largest = max(each.estimate or 0 for each in known)
        return max(largest, 10 ** ((constant - decibels) / 20))


def path_of(key: str, size: Sequence[int]) -> Path:
    """The file of a calibration."""
    return cache_folder() / "calibrations" / key / f"{'x'.join(map(str, size))}.json"


def load_calibration(key: str, size: Sequence[int]) -> Calibration | None:
    """The stored calibration of exactly that size; None if there is none that can be read."""
    found = _read(path_of(key, size))
    return found if found is not None and (found.key, found.size) == (key, tuple(size)) else None


def nearest_calibration(key: str, size: Sequence[int]) -> Calibration | None:
    """The stored calibration of that size, else of the largest video that is not larger."""
    here = load_calibration(key, size)
    if here is not None and any(map(here.is_whole, here.measured)):
        return here
    others = [_read(path) for path in sorted(path_of(key, size).parent.glob("*.json"))]
    fitting = [
        each
        for each in others
        if each is not None
        and each.key == key
        and math.prod(each.size) <= math.prod(size)
        and any(map(each.is_whole, each.measured))
    ]
    return max(fitting, key=lambda each: math.prod(each.size), default=here)


def _read(path: Path) -> Calibration | None:
    try:
        return _of_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except _UNREADABLE as error:
        _log.warning("the calibration in %s can't be read (%s); it is made again", path, error)
        return None


def save_calibration(calibration: Calibration) -> None:
    """Write it, whole or not at all. Raises `OSError`."""
    data = {"schema": _SCHEMA, **asdict(calibration)}
    replace_file(path_of(calibration.key, calibration.size), json.dumps(data, indent=1))


def _of_json(whole: Any) -> Calibration:
    if whole["schema"] != _SCHEMA:
        raise ValueError(f"its schema is {whole['schema']!r}")
    measured = {}
    for method, listed in whole["measured"].items():
        parse_method(method)
        if not listed:
            raise ValueError(f"{method} has no measurement")
        measured[method] = tuple(
            Measurement(
                # Infinite where no frame differs.
                _number(each["psnr_db"], -_MAX_DB, _MAX_DB, may_be_infinite=True),
                None if each["estimate"] is None else _number(each["estimate"]),
                _number(each["gain"], 1e-9),
            )
            for each in listed
        )
    videos = tuple((str(prompt), int(seed)) for prompt, seed in whole["videos"])
    numbers = (_number(whole["seconds"]), _number(whole["exact_seconds"]))
    frames, height, width = (int(_number(each, 1)) for each in whole["size"])
    size = (frames, height, width)
    return Calibration(str(whole["key"]), size, videos, measured, *numbers)


def _number(
    value: Any, low: float = 0.0, high: float = 1e12, *, may_be_infinite: bool = False
) -> float:
    found = float(value)
    if not low <= found <= high and not (may_be_infinite and found == math.inf):
        raise ValueError(f"a number is {found}")
    return found
