"""Runs a request: plan, then stages one after the other, each thing that happens an event.

Stages are the family's; here is their order, what they share, and how given frames come in. Memory
peaks at the largest stage: a component lives as long as its stage's generator. Several videos of
one request go through each stage together, each with its own seed, one after the other, so each is
bit for bit what that seed alone gives. Read next: `families/family.py`, `record.py`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everyframe.core.errors import CannotRunError, InputError, NumericsError
from everyframe.core.events import (
    Event,
    Frames,
    Note,
    Planned,
    Ready,
    Repaired,
    StageDone,
    StageStarted,
    VideoDone,
)
from everyframe.core.plan import Plan, Settings
from everyframe.core.request import Request
from everyframe.engine.record import make_record
from everyframe.families.family import GivenFrames, Model, Stage, Take
from everyframe.families.loading import let_go
from everyframe.media.paths import exact_fps, sidecar_of
from everyframe.media.pixels import fit_image, to_uint8
from everyframe.media.read import read_image, read_video
from everyframe.media.video import Video
from everyframe.planning.resolve import GivenModel, check_feasible, prepare
from everyframe.precision.full import full_float32

_log = logging.getLogger(__name__)

#: A video to go on from is kept whole in the result; this bounds what is read of it.
_MAX_SOURCE_FRAMES = 20_000


def stream(
    request: Request, *, num_threads: int | None = None, given_model: GivenModel | None = None
) -> Iterator[Event]:
    """What happens, as it happens: `Planned` first, `VideoDone` last for each video.

    Raises an `EveryframeError` for anything that a person should know; nothing was written then.
    `num_threads` overrules the number of CPU threads, which a record asks for to get its bits back.
    `given_model` is one in memory, in place of one that the request names.
    """
    prepared = prepare(request, may_fetch=True, num_threads=num_threads, given=given_model)
    plan, model = prepared.plan, prepared.model
    check_feasible(plan)
    given = read_given(request, plan.settings)
    noise = _start_noise(request)
    _log.debug("plan: %s", plan)
    yield Planned(plan)
    for note in (*plan.notes, *given.notes, *(f"fetching {part}" for part in plan.to_fetch)):
        yield Note(note)
    model = model.fetch()
    record = make_record(plan, request, model.weight_files())
    yield Ready(record)
    seeds = range(plan.settings.seed, plan.settings.seed + plan.settings.num_videos)
    takes = [Take(seed, given, noise) for seed in seeds]
    yield from _apart(_run(plan, model, takes, record), plan.num_threads)


def _apart(events: Generator[Event, None, None], num_threads: int) -> Iterator[Event]:
    """The same events, made with that many threads, in full float32 and without gradients.

    All are entered for each event anew: whoever reads the stream runs between two events, and
    nothing of theirs may change by it.
    """
    with closing(events):
        while True:
            with _Threads(num_threads), full_float32(), torch.inference_mode():
                event = _next(events)
            if event is None:
                return
            yield event


def _next(events: Iterator[Event]) -> Event | None:
    """The next event; torch running out of memory is told as what it is."""
    try:
        return next(events, None)
    except RuntimeError as error:
        # torch has a class for accelerators only; its CPU allocator says so in words.
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise CannotRunError(
                "out of memory while it ran; a smaller size or num_frames takes less, and another "
                f"program may hold what the plan counted on ({str(error).splitlines()[0]})"
            ) from error
        raise


def _run(
    plan: Plan, model: Model, takes: Sequence[Take], record: dict[str, Any]
) -> Generator[Event, None, None]:
    num_clips = plan.settings.chain
    num_frames = {take.seed: 0 for take in takes}
    record = dict(record)
    unfinished: list[int] = []
    for clip in range(num_clips):
        for stage in model.stages(plan, clip):
            for event in _run_stage(stage, takes, clip, num_clips):
                if isinstance(event, Repaired):
                    repairs = (*record.get("repairs", ()), {"clip": clip, **event.to_json()})
                    record["repairs"] = [*repairs]
                if isinstance(event, Frames):
                    _check_finite(event, stage)
                    num_frames[event.seed] += event.num_frames
                    if clip == num_clips - 1 and event.seed not in unfinished:
                        # Takes come one after the other: where one begins, those before are whole.
                        yield from _done(unfinished, num_frames, record)
                        unfinished = [event.seed]
                yield event
    yield from _done(unfinished, num_frames, record)


def _check_finite(event: Frames, stage: Stage) -> None:
    """The last gate: frames that are not finite go to nobody, whatever was watched before."""
    frames = np.asarray(event.frames)
    # Both carry NaN through, and need no copy as large as the frames.
    if frames.size and not (np.isfinite(frames.min()) and np.isfinite(frames.max())):
        raise NumericsError(
            f"{stage.name} made frames that hold values that are not finite; nothing was written. "
            "Another precision may not (--dtype fp32), and `everyframe doctor` tells what this "
            "device is known for"
        )


def _done(
    seeds: Sequence[int], num_frames: Mapping[int, int], record: dict[str, Any]
) -> Iterator[Event]:
    for seed in seeds:
        yield VideoDone(seed, num_frames[seed], for_seed(record, seed))


def _run_stage(stage: Stage, takes: Sequence[Take], clip: int, num_clips: int) -> Iterator[Event]:
    began = time.perf_counter()
    yield StageStarted(stage.name, stage.num_steps(len(takes)), clip, num_clips)
    with let_go():
        # When the generator is over, so is the component that it held.
        yield from stage.run(takes)
    for accelerator in (torch.cuda, torch.mps):
        if accelerator.is_available():
            accelerator.empty_cache()
    seconds = time.perf_counter() - began
    _log.info("clip %d of %d: %s took %.2f s", clip + 1, num_clips, stage.name, seconds)
    yield StageDone(stage.name, seconds)


def for_seed(record: dict[str, Any], seed: int) -> dict[str, Any]:
    """The record of one video out of several: as if its seed alone had been asked for."""
    request = {key: value for key, value in record["request"].items() if key != "num_videos"}
    settings = {**record["settings"], "seed": seed, "num_videos": 1}
    mine = {**record, "request": {**request, "seed": seed}, "settings": settings}
    repairs = [each for each in record.get("repairs", ()) if each["seed"] in (None, seed)]
    mine.pop("repairs", None)
    return {**mine, "repairs": repairs} if repairs else mine


def read_given(request: Request, settings: Settings) -> GivenFrames:
    """The pictures and videos of a request, read and, unless the family does it, fitted.

    Raises `MediaError` for a file that is none.
    """

    def picture(source: Any) -> np.ndarray[Any, Any]:
        read = read_image(source)
        if settings.fit is None:
            return read[None]
        return fit_image(read, settings.height, settings.width, settings.fit)[None]

    source: np.ndarray[Any, Any] | None = None
    notes: tuple[str, ...] = ()
    if request.extend is not None:
        source, notes = _source(request.extend, settings)
    return GivenFrames(
        notes=notes,
        first=None if request.image is None else picture(request.image),
        last=None if request.last_image is None else picture(request.last_image),
        source=source,
    )


def _source(extend: Any, settings: Settings) -> tuple[np.ndarray[Any, Any], tuple[str, ...]]:
    """The video to go on from, fitted, and what is to be said of its frame rate."""
    fps = rate = exact_fps(settings.fps)
    if isinstance(extend, Video):
        frames, rate = to_uint8(extend.frames), extend.fps
    elif isinstance(extend, np.ndarray):
        if extend.ndim != 4 or extend.shape[-1] != 3 or not len(extend):
            raise InputError(f"extend must be frames (T, H, W, 3), got {extend.shape}")
        frames = to_uint8(extend)
    elif not isinstance(extend, (str, os.PathLike)):
        raise InputError(
            "extend must be a path, an array of frames (T, H, W, 3) or a Video, "
            f"got {type(extend).__name__}"
        )
    else:
        # Pictures in a folder have no rate of their own; they are taken to have the result's.
        bare = Path(extend).is_dir() and not sidecar_of(f"{extend}/").is_file()
        size = (settings.height, settings.width)
        frames, rate = read_video(extend, fps=fps if bare else None, size=size)
    if len(frames) > _MAX_SOURCE_FRAMES:
        raise InputError(
            f"the video to go on from has {len(frames)} frames, "
            f"at most {_MAX_SOURCE_FRAMES} are read"
        )
    notes: tuple[str, ...] = ()
    if rate != fps:
        notes = (
            f"the given video has {float(rate):g} frames a second and the result {float(fps):g}, "
            f"so it will not play at its own speed; --fps {float(rate):g} keeps that",
        )
    return fit_image(frames, settings.height, settings.width), notes


def _start_noise(request: Request) -> torch.Tensor | None:
    if request.latents is None:
        return None
    noise = torch.as_tensor(request.latents).to("cpu", torch.float32)
    if not torch.isfinite(noise).all():
        raise InputError("latents hold values that are not finite")
    return noise


class _Threads:
    """CPU threads for the time of a run: results depend on their number, so the plan fixes it."""

    def __init__(self, num_threads: int) -> None:
        self._wanted = num_threads
        self._before = torch.get_num_threads()

    def __enter__(self) -> None:
        torch.set_num_threads(self._wanted)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)
