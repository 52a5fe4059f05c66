"""Run a request: plan, then stages in order; everything that happens is an event.

This module defines the order of the family's stages, what they share, and how conditioning frames
enter. A component lives only during its stage, so peak memory is that of the largest stage. Several
videos of one request pass through each stage in turn, each with its own seed, so each equals bit
for bit what its seed alone gives.

Read next: `runtime/interface.py` (what a family implements), `provenance.py` (records).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from everyframe.core.errors import CannotRunError, NumericsError, first_line
from everyframe.core.events import (
    Event,
    Events,
    FramesDecoded,
    Note,
    Output,
    Planned,
    Repaired,
    RunSaved,
    StageDone,
    StageStarted,
    Step,
    VideoDone,
    WeightsReady,
)
from everyframe.core.plan import Plan, Repair
from everyframe.core.request import Request
from everyframe.engine.distributed import (
    Peers,
    RankContext,
    Rendezvous,
    gather_events,
    join_plan,
    meet_peers,
)
from everyframe.engine.owner_switches import thread_count_notes, threads_for, with_owner_switches
from everyframe.engine.persistence import create_run, saved_run, writer_for_rank
from everyframe.engine.records.provenance import for_seed, make_record, recorded_loras
from everyframe.engine.repair_report import loaded_in, with_repair_report
from everyframe.engine.request_inputs import read_given, start_noise
from everyframe.engine.warm_state import check_contents_once, warm_of, with_cache
from everyframe.hardware.cpu import cpu_threads
from everyframe.hardware.device_loss import translate_device_loss
from everyframe.hardware.memory import empty_cache, is_out_of_memory, peak_bytes
from everyframe.hardware.switches import Turn
from everyframe.hardware.thread_state import without_casts, without_default_device
from everyframe.media.output_path import check_folder
from everyframe.ops.attention import restore_kernels
from everyframe.planning.fast_paths.component_certificates import count_stage
from everyframe.planning.resolve import LoadedModel, PreparedPlan, check_feasible, prepare
from everyframe.precision.strict_float32 import strict_float32
from everyframe.runs.folder import runs_folder
from everyframe.runs.run_state import RunState, RunStateWriter, SaveOptions
from everyframe.runtime.batch_member import MEMBER
from everyframe.runtime.components.component_cache import ComponentCache
from everyframe.runtime.components.patchable import digest_with_loras, patches_of
from everyframe.runtime.interface import ModelSpec, Stage, VideoState
from everyframe.runtime.loading import release_components
from everyframe.runtime.repair.repair_cache import (
    RepairCacheKey,
    delete_repairs,
    key_of,
    save_repair,
)

_log = logging.getLogger(__name__)
_Which = tuple[int, "int | None"]
"""A video by its seed, and by its place among those of one call."""


def stream(
    request: Request,
    *,
    num_threads: int | None = None,
    given_model: LoadedModel | None = None,
    keep: SaveOptions | None = None,
    join: Rendezvous | None = None,
    cache: ComponentCache | None = None,
) -> Events:
    """Run a request and yield its events: `Planned` first, `VideoDone` last for each video.

    A plan that can't run here is yielded as `Planned` too, followed by the error. `num_threads` of
    the CPU override a record, which asks for its own to reproduce its bits. `given_model` is an
    in-memory model in place of the request's; torch switches then stay as its owner set them.
    `keep` is how progress is saved (None: in `runs_folder`). `join` meets the other ranks;
    `ParallelPlan.reports_events` tells whose events count. `cache` has components of earlier runs.

    Raises an `EveryframeError` for anything that a person should know; no output is written then.
    """
    place = None if request.report is None else check_folder(request.report)
    freed = None if cache is None else cache.freed
    peers = meet_peers(request, join, num_threads, freed)
    if peers is not None:
        request = Request(**{**request.given(), "seed": peers.seed})
    prepared = prepare(
        request,
        may_fetch=True,
        num_threads=threads_for(given_model, num_threads) if peers is None else peers.num_threads,
        devices=None if peers is None else peers.devices,
        given=given_model,
        will_run=peers is None or peers.rank == 0,
        freed=freed,
    )
    plan, model = with_owner_switches(prepared.plan, given_model), prepared.model
    if plan.infeasible is not None:
        yield Planned(plan)  # so that it can be seen what is in the way
    check_feasible(plan)
    videos = initial_videos(request, plan)
    _log.debug("plan: %s", plan)
    yield Planned(plan)
    notes = (*plan.notes, *thread_count_notes(plan, num_threads), *videos[0].inputs.notes)
    for note in (*notes, *(f"fetching {part}" for part in plan.downloads)):
        yield Note(note)
    model = model.fetch()
    check_contents_once(model, cache)
    patches_of(model).check()
    record = make_record(plan, request, model.weight_files())
    yield from _repairs_forgotten(request, record, plan, peers)
    yield WeightsReady(record)
    here = join_plan(plan, model, record, peers)
    model = with_cache(model, cache, here, record)
    how = SaveOptions(runs_folder()) if keep is None else keep
    writer = writer_for_rank(here, how, create_run(how, request, plan, record, given_model))
    events = run_stages(here, model, record, writer, RunState(videos=here.mine(videos)))
    if place is not None and (peers is None or not peers.rank):
        events = with_repair_report(events, plan, record, place, loaded_in(model))
    with closing(events):
        for event in events:
            count_event(event, prepared, here)
            yield event


def count_event(event: Event, prepared: PreparedPlan, here: RankContext) -> None:
    """Count a stage's seconds towards the trials of its kernels, on the first rank alone."""
    if not isinstance(event, StageDone) or here.parallel.world.rank:
        return
    plan = prepared.plan
    # Runs of a batch share their time.
    number = 1 if plan.batch is None or MEMBER.get() is None else plan.batch.num_videos
    count_stage(
        prepared.chooser.certificates, plan.components, prepared.fitted.runs, event.stage,
        event.seconds / number,
    )  # fmt: skip


def _repairs_forgotten(
    request: Request, record: dict[str, Any], plan: Plan, peers: Peers | None
) -> Iterator[Note]:
    """Every rank deletes the saved repairs, as each may have a disk of its own; all note it."""
    key = _repairs_key(record, plan)
    if not request.forget_repairs or key is None:
        return
    count = delete_repairs(key)
    if peers is not None:
        count = sum(peers.world.all_gather_object(count, "saved repairs are removed"))
    if count:
        yield Note("the saved repairs of this model on this device are removed")


def initial_videos(request: Request, plan: Plan) -> list[VideoState]:
    """The videos of a request before their first stage, with input files read."""
    with without_default_device():
        given, noise = read_given(request, plan.settings), start_noise(request)
    first = plan.settings.seed
    return [
        VideoState(seed, given, noise) for seed in range(first, first + plan.settings.num_videos)
    ]


def run_stages(
    here: RankContext,
    model: ModelSpec,
    record: dict[str, Any],
    writer: RunStateWriter,
    progress: RunState,
) -> Events:
    """Run the remaining stages of the plan, then release the saved run."""
    if not progress.videos:
        return
    with saved_run(writer, progress.videos, is_in_memory=here.plan.switches is not None):
        yield from writer.notes()
        if writer.folder is not None and writer.folder.part == 0:
            yield RunSaved(writer.folder.name, str(writer.folder.path))
        events = _PlannedEvents(_run(here, model, record, writer, progress), here)
        with closing(events):
            yield from gather_events(events, here) if here.sources else events


class _PlannedEvents:
    """The same events, computed with the plan's threads, full float32, and no gradients.

    The settings are entered again for each event, since the consumer's code runs between two events
    and must not be affected. An in-memory model runs with torch as its owner set it. Out-of-memory
    and lost-device errors of torch become errors of ours.
    """

    def __init__(self, events: Generator[Event, None, None], here: RankContext) -> None:
        self._events, self._plan = events, here.plan
        self._where, self._turn = "before its first stage", Turn(is_alone=True)
        rank = f" of rank {here.parallel.world.rank}" if here.parallel.world.size > 1 else ""
        self._device = f"{here.plan.device.torch_name}{rank} ({here.plan.device.name})"

    def __iter__(self) -> Iterator[Event]:
        return self

    def close(self) -> None:
        """End the events."""
        self._events.close()

    def __next__(self) -> Event:
        is_ours = self._plan.switches is None
        with (
            torch_set_by(self._plan, self._turn) if is_ours else nullcontext(),
            translate_device_loss(self._device, self._where),
        ):
            try:
                event = next(self._events)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise CannotRunError(
                    "out of memory during the run; use a smaller size or num_frames, or close "
                    f"other programs that use this memory ({first_line(error)})"
                ) from error
        if isinstance(event, StageStarted):
            self._where = f"in {event.stage}"
        elif isinstance(event, Step):
            # GPU work is queued: the failed call may be of any step after this one.
            self._where = f"after step {event.step} of {event.stage}"
        return event


@contextmanager
def torch_set_by(plan: Plan, turn: Turn) -> Iterator[None]:
    """Context: torch is set as our plans require, whatever thread and process have set.

    Most settings are process-wide, so no other run of ours computes meanwhile.
    """
    with (
        turn,
        cpu_threads(plan.num_threads),
        # An interrupt inside a module would leave its attention kernels selected.
        restore_kernels(),
        strict_float32(),
        without_casts(),
        without_default_device(),
        torch.inference_mode(),
    ):
        yield


def _run(
    here: RankContext,
    model: ModelSpec,
    record: dict[str, Any],
    writer: RunStateWriter,
    progress: RunState,
) -> Generator[Event, None, None]:
    plan, videos, num_clips = here.plan, progress.videos, here.plan.settings.chain
    key = _repairs_key(record, plan) if here.parallel.video_group.is_lead else None
    warm, ends = warm_of(model), _VideoEnds(record, progress)
    for frames in writer.saved_frames(progress):
        if frames.seed in {video.seed for video in videos}:
            ends.count(frames)
            yield frames
    for clip, stage in _stages(here, model, progress):
        writer.write(progress)
        for video in videos:
            video.oom_log = writer.oom_log(clip, progress.stage)
        began, is_last = time.perf_counter(), clip == num_clips - 1
        yield StageStarted(stage.name, stage.num_steps(len(videos)), clip, num_clips)
        # The generator holds its component until it is closed.
        with release_components(), warm.during_stage(), closing(stage.run(videos)) as events:
            for event in events:
                warm.note(event)
                if isinstance(event, Repaired):
                    progress.repairs.append({"clip": clip, **event.to_json()})
                    _remember(key, plan, event)
                elif isinstance(event, Note) and event.in_record:
                    progress.notes.append((event.seed, event.text))
                elif isinstance(event, Step) and stage.is_resumable:
                    writer.write(progress)
                elif isinstance(event, FramesDecoded):
                    _check_finite(event, stage)
                    ends.count(event)
                    if not is_last:
                        writer.frames(progress, event)
                if isinstance(event, Output) or (is_last and isinstance(event, FramesDecoded)):
                    yield from ends.before(event)
                yield event
                yield from writer.notes()
        empty_cache()
        seconds = time.perf_counter() - began
        _log.info("clip %d of %d: %s took %.2f s", clip + 1, num_clips, stage.name, seconds)
        yield StageDone(stage.name, seconds, peak_bytes(plan.device))
        yield from writer.notes()
        for video in videos:
            video.begin_stage()
    yield from ends.rest()


class _VideoEnds:
    """The `VideoDone` of each video.

    Videos come one after the other: when one begins, the ones before are complete.
    """

    def __init__(self, record: dict[str, Any], progress: RunState) -> None:
        self._record, self._progress = record, progress
        self._num_frames = Counter[_Which]()
        self._open: list[_Which] = []

    def count(self, event: FramesDecoded) -> None:
        """Count the frames of a video."""
        self._num_frames[event.seed, event.index] += event.num_frames

    def before(self, event: FramesDecoded | Output) -> Iterator[Event]:
        """Ends of the videos that are complete, if this event is another one's."""
        which: _Which = (event.seed, None if isinstance(event, Output) else event.index)
        is_open = which in self._open
        if isinstance(event, Output):
            is_open = event.seed in {seed for seed, _ in self._open}
        if not is_open:
            yield from self.rest()
            self._open = [which]

    def rest(self) -> Iterator[Event]:
        """Ends of the videos that have begun."""
        for seed, index in self._open:
            notes = [text for of, text in self._progress.notes if of in (None, seed)]
            found = {"repairs": [*self._progress.repairs], "notes": notes}
            whole = {**self._record, **{name: value for name, value in found.items() if value}}
            mine = for_seed(whole, seed)
            mine = mine if index is None else {**mine, "index": index}
            yield VideoDone(seed, self._num_frames[seed, index], mine, index)


def _repairs_key(record: Mapping[str, Any], plan: Plan) -> RepairCacheKey | None:
    """Key of the repair cache; None for in-memory weights."""
    sha256 = record.get("model", {}).get("sha256")
    if sha256 is None:
        return None
    weights = digest_with_loras(sha256, recorded_loras(record))
    return key_of(weights, plan.device, record["versions"])


def _remember(key: RepairCacheKey | None, plan: Plan, event: Repaired) -> None:
    """Cache this repair for later plans; memory fallbacks depend on free memory, so not those."""
    if key is not None and event.cause != "memory":
        dtype = plan.component(event.component).precision.parameters
        save_repair(key, Repair(event.component, event.target, event.to, dtype))


def _stages(here: RankContext, model: ModelSpec, progress: RunState) -> Iterator[tuple[int, Stage]]:
    """The remaining stages with their clips; `progress` says where to start."""
    for clip in range(progress.clip, here.plan.settings.chain):
        first = progress.stage if clip == progress.clip else 0
        for number, stage in enumerate(here.stages(model, clip)):
            if number >= first:
                progress.clip, progress.stage = clip, number
                yield clip, stage


def _check_finite(event: FramesDecoded, stage: Stage) -> None:
    """Final check: non-finite frames are never delivered, whatever was watched before."""
    frames = np.asarray(event.frames)
    # Both propagate NaN without a copy of the frames.
    if frames.size and not (np.isfinite(frames.min()) and np.isfinite(frames.max())):
        raise NumericsError(
            f"{stage.name} made frames with values that are not finite; nothing was written. "
            "Try another precision (--dtype fp32); `everyframe doctor` lists the known issues of "
            "this device"
        )
