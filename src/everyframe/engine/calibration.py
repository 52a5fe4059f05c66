"""Calibrate: measure how close each lossy method comes to the exact video, on this machine.

Each video of a set of prompts and seeds is made once by exact steps and once by each method that
has held the lowest budget so far; with products in eight bits, in a second pass. Results are saved
after each video, so that an interrupted calibration resumes. `calibration_methods.py` has the
methods; `everyframe.planning.quality` chooses from what is measured here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from everyframe.adapters.lora_file import lora_digest
from everyframe.checkpoints.digest import digest
from everyframe.checkpoints.shapes_prompts import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    SHAPES,
    Scene,
    read_prompt,
)
from everyframe.core.errors import CannotRunError, InputError
from everyframe.core.events import DENOISING_STAGES, ErrorEstimated, FramesDecoded, StageDone, Step
from everyframe.core.options import shown
from everyframe.core.quality import EXACT, LossyMethod, parse_method
from everyframe.core.request import Request
from everyframe.engine.calibration_methods import candidates, combinations, why_not_certified
from everyframe.engine.run import stream
from everyframe.fast_paths.calibrations import (
    LEAST_VIDEOS,
    MARGIN_DB,
    Calibration,
    Measurement,
    load_calibration,
    save_calibration,
)
from everyframe.numerics.psnr import frame_psnr
from everyframe.planning.quality import calibration_key, products_of, size_of
from everyframe.planning.resolve import check_feasible, prepare
from everyframe.runs.run_state import SaveOptions

#: Prompts of the videos if the request gives none.
PROMPTS = (
    "a dog runs through shallow water at the beach",
    "waves break on black rocks at sunset",
    "a woman in a red coat walks down a rainy street at night",
    "steam rises from a cup of coffee on a wooden table",
    "a train crosses a stone bridge in the mountains",
    "close-up of a bee on a yellow flower",
    "an old man laughs in his workshop",
    "aerial view of a river through autumn forest",
    "a cat jumps from a sofa",
    "city traffic in time lapse, long exposure",
    "a hot air balloon drifts over fields in the morning",
    "children fly a kite on a hill",
    "molten glass is turned on a rod",
    "snow falls on a quiet village",
    "a robot arm paints a blue line",
    "a sailing boat heels in strong wind",
)


_MOST_VIDEOS = 1000

#: Options of a request that differ from video to video, or are measured.
_NOT_MEASURED = ("quality", "method", "num_videos")


@dataclass(frozen=True)
class CalibrationProgress:
    """What a calibration reports after each video: a line, and its state so far."""

    text: str
    calibration: Calibration


@dataclass(frozen=True)
class _Made:
    """A video as measured: frames (T, H, W, 3), seconds and error estimate."""

    frames: Any
    denoise_seconds: float
    seconds: float
    estimate: float | None


def calibrate(
    request: Request,
    *,
    prompts: Sequence[str] = (),
    num_videos: int = LEAST_VIDEOS + 1,
    methods: Sequence[str] = (),
    lowest_db: float = 30.0,
) -> Iterator[CalibrationProgress]:
    """Measure methods for a request's model, size and options; what is measured already is kept.

    `prompts` are used in turn, each video with a seed of its own. `methods` are names, or whole
    methods such as ``ab2@8``; the usual ones by default. A method that falls below `lowest_db`, and
    the bolder ones of the same name, are measured no further. Products in eight bits that are not
    certified here are left out, with a line that says why.

    Raises:
        InputError: an option is invalid, or the model has no lossy methods.
        CannotRunError: the plan can't run here.
    """
    if not isinstance(request, Request):
        raise InputError(
            f"calibrate takes a request, got {shown(request)}; give everyframe.Request(...)"
        )
    for name, several in (("prompts", prompts), ("methods", methods)):
        if isinstance(several, str):
            raise InputError(f"{name} must be a list of texts, got {shown(several)}")
    if not LEAST_VIDEOS <= num_videos <= _MOST_VIDEOS:
        raise InputError(f"videos must be {LEAST_VIDEOS} to {_MOST_VIDEOS}, got {num_videos}")
    if request.num_ranks > 1:
        raise InputError("calibrate works on one device; leave out the others")
    found, names, products = _begun(request, prompts, num_videos, methods)
    request = _without(request, *_NOT_MEASURED)
    tried = {
        kind: why_not_certified(kind, _request_for(request, *found.videos[0])) for kind in products
    }
    for kind, why_not in tried.items():
        if why_not is not None:
            yield CalibrationProgress(f"{kind} is not measured: {why_not}", found)
    names = tuple(each for each in names if tried.get(each.products) is None)
    found = yield from _measure(request, found, names, lowest_db)
    for kind, why_not in tried.items():
        if why_not is None and (not methods or kind in methods):
            combined = combinations(found, kind, request)
            found = yield from _measure(request, found, combined, lowest_db)


def calibration_of(request: Request, num_videos: int = LEAST_VIDEOS + 1) -> Calibration:
    """What is measured already for a request with its usual prompts; empty if nothing is."""
    return _begun(request, (), num_videos, ())[0]


def _begun(
    request: Request, prompts: Sequence[str], num_videos: int, methods: Sequence[str]
) -> tuple[Calibration, tuple[LossyMethod, ...], tuple[str, ...]]:
    """The calibration so far, the methods to measure, and the products to try."""
    request = _without(request, *_NOT_MEASURED)
    prompts = _prompts(request, prompts)
    first = 0 if request.seed is None else request.seed
    videos = tuple(
        (prompts[number % len(prompts)] if prompts else "", first + number)
        for number in range(num_videos)
    )
    prepared = prepare(_request_for(request, *videos[0]), may_fetch=True, will_run=True)
    check_feasible(prepared.plan)
    model, settings = prepared.model.fetch(), prepared.plan.settings
    products = products_of(request, prepared.plan.components, prepared.plan.device)
    names = candidates(request, model, settings, methods, products)
    wanted = {*methods, *(each.products for each in names)}
    digest(model.weight_files())
    for lora in request.loras:
        lora_digest(lora.path)
    key = calibration_key(model, settings, prepared.plan.components, prepared.plan.device)
    assert key is not None, "its weights are hashed"
    found = load_calibration(key, size_of(settings))
    if found is None or found.videos != videos:
        found = Calibration(key, size_of(settings), videos)
    return found, names, tuple(kind for kind in products if not methods or kind in wanted)


def _measure(
    request: Request,
    found: Calibration,
    methods: Sequence[LossyMethod],
    lowest_db: float,
) -> Generator[CalibrationProgress, None, Calibration]:
    for number, (prompt, seed) in enumerate(found.videos):
        left = [
            method
            for method in methods
            if len(found.measured.get(str(method), ())) == number
            and not _is_out(method, methods, found, lowest_db)
        ]
        if not left:
            continue
        one, began = _request_for(request, prompt, seed), time.perf_counter()
        exact = _make(one)
        found = replace(found, exact_seconds=exact.seconds)
        for method in left:
            # An earlier method of this video may have ruled it out.
            if _is_out(method, methods, found, lowest_db):
                continue
            found = found.plus(str(method), _compare(one, method, exact))
        found = replace(found, seconds=found.seconds + time.perf_counter() - began)
        save_calibration(found)
        yield CalibrationProgress(_line(number, found, methods, lowest_db), found)
    return found


def _is_out(
    method: LossyMethod,
    methods: Sequence[LossyMethod],
    found: Calibration,
    lowest_db: float,
) -> bool:
    """Whether it, or one that is no bolder, fell below the lowest budget."""
    return any(
        each.is_no_bolder(method)
        and str(each) in found.measured
        and found.worst_db(str(each)) < lowest_db
        for each in methods
    )


def _line(number: int, found: Calibration, methods: Sequence[LossyMethod], lowest_db: float) -> str:
    left = [each for each in methods if not _is_out(each, methods, found, lowest_db)]
    share = 1 + sum(1 / found.gain(str(each)) for each in left if str(each) in found.measured)
    seconds = (len(found.videos) - number - 1) * found.exact_seconds * share
    return (
        f"video {number + 1} of {len(found.videos)}: {len(left)} methods above {lowest_db:g} dB; "
        f"about {seconds / 60:.0f} minutes left"
    )


def _compare(request: Request, method: LossyMethod, exact: _Made) -> Measurement:
    made = _make(Request(**{**request.given(), "quality": str(method)}))
    worst = float(np.min(frame_psnr(made.frames, exact.frames)))
    gain = exact.denoise_seconds / max(made.denoise_seconds, 1e-9)
    return Measurement(round(worst, 3), made.estimate, round(gain, 3))


def _make(request: Request) -> _Made:
    frames, steps, seconds, estimate = [], 0.0, 0.0, None
    with closing(stream(request, keep=SaveOptions(None))) as events:
        for event in events:
            if isinstance(event, FramesDecoded):
                frames.append(event.frames)
            elif isinstance(event, Step) and event.stage in DENOISING_STAGES:
                steps += event.seconds
            elif isinstance(event, StageDone):
                seconds += event.seconds
            elif isinstance(event, ErrorEstimated):
                estimate = max(event.error, estimate or 0.0)
    if estimate is not None and not math.isfinite(estimate):
        estimate = None  # of answers that are zero: it says nothing of the video
    if not frames:
        raise CannotRunError("the run made no frames that could be compared")
    return _Made(np.concatenate(frames), steps, seconds, estimate)


def _without(request: Request, *names: str) -> Request:
    given = {name: value for name, value in request.given().items() if name not in names}
    return Request(**given)


def _request_for(request: Request, prompt: str, seed: int) -> Request:
    given = {**request.given(), "seed": seed}
    return Request(**{**given, "prompt": prompt} if prompt else given)


def _prompts(request: Request, prompts: Sequence[str]) -> Sequence[str]:
    """The prompts; none for a model that takes none."""
    if prompts:
        return prompts
    if request.prompt is not None:
        return (request.prompt,)
    if request.model is None:
        return shapes_prompts(LEAST_VIDEOS + 1)
    from everyframe.planning.find_model import find_model

    model, _ = find_model(request, True)
    try:
        model.resolve(_request_for(request, PROMPTS[0], 0), 0)
    except InputError:
        model.resolve(_request_for(request, "", 0), 0)
        return ()
    return PROMPTS


def shapes_prompts(count: int) -> tuple[str, ...]:
    """Prompts of the embedded model, each of its words as often as the others."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        shape, colour = [*SHAPES][number % 4], [*COLOURS][number % 8]
        # Strides coprime to the lists' lengths, so that pairs don't repeat.
        background, motion = [*BACKGROUNDS][number % 5], [*MOTIONS][(3 * number + number // 8) % 8]
        prompt = f"a {colour} {shape} {MOTIONS[motion][0]} on a {background} background"
        number += 1
        if isinstance(read_prompt(prompt), Scene):  # a circle that turns can't be seen to
            found.append(prompt)
    return tuple(found)


def report(found: Calibration, budgets: Sequence[float]) -> list[str]:
    """What each budget leads to, and after how many videos the calibration repays."""
    lines = []
    for decibels in budgets:
        names = {name for method in found.measured for name in parse_method(method).names}
        best = found.fastest(decibels, [*names])
        if best is None:
            lines.append(f"{decibels:g}dB: {EXACT}; no method held it with {MARGIN_DB:g} dB margin")
            continue
        saved = found.exact_seconds * (1 - 1 / found.gain(best))
        repays = f"; repaid after {round(found.seconds / saved + 0.5)} videos" if saved > 0 else ""
        lines.append(
            f"{decibels:g}dB: {best}, {found.worst_db(best):.1f} dB at worst, "
            f"{found.median_db(best):.1f} dB in the median, denoises {found.gain(best):.1f} times "
            f"as fast{repays}"
        )
    return lines
