"""Resume an interrupted run: the same plan, from the last saved state.

Recomputed steps have the same bits, so the frames equal those of an uninterrupted run. A change
that breaks this (weights, input files, device) is an error; one that may break it (versions) is a
note.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from everyframe.adapters.request_components import with_adapters
from everyframe.checkpoints.locate import is_listed
from everyframe.core.errors import CannotRunError, CorruptRunError, InputError, OutOfMemoryInfo
from everyframe.core.events import Event, Events, Note, Planned, WeightsReady
from everyframe.core.request import Request
from everyframe.engine.distributed import Rendezvous, join_plan, meet_peers
from everyframe.engine.owner_switches import with_owner_switches
from everyframe.engine.persistence import write
from everyframe.engine.records.comparison import differences
from everyframe.engine.records.provenance import make_record
from everyframe.engine.records.record_schema import option_facts
from everyframe.engine.repair_report import loaded_in, repairs_of, with_repair_report
from everyframe.engine.resumption.foreign_run import explain_errors
from everyframe.engine.resumption.interrupted_run import InterruptedRun, load_run
from everyframe.engine.resumption.replan import (
    OF_RANKS,
    add_fallbacks,
    change_notes,
    replan_for_devices,
    replan_with_less_memory,
    with_devices,
)
from everyframe.engine.run import initial_videos, run_stages
from everyframe.engine.warm_state import with_cache
from everyframe.hardware.facts import machine_facts
from everyframe.media.output_path import check_folder
from everyframe.planning.find_model import find_model
from everyframe.planning.resolve import LoadedModel
from everyframe.runs.folder import Lock, RunFolder, free_runs
from everyframe.runs.run_state import RunState, RunStateWriter, SaveInterval, SaveOptions, furthest
from everyframe.runtime.components.component_cache import ComponentCache
from everyframe.runtime.interface import Stage, VideoState

#: The name in a recorded file's identity, beside its hash.
_FILE = ("file", True)


@explain_errors
def resume_run(
    folder: RunFolder,
    *,
    skip: Collection[int] = (),
    given_model: LoadedModel | None = None,
    cleans: bool = True,
    pace: SaveInterval = SaveInterval(),  # noqa: B008 - frozen
    join: Rendezvous | None = None,
    ranks: Mapping[str, Any] | None = None,
    out_of_memory: OutOfMemoryInfo | None = None,
    trust_remote_code: bool = False,
    named: Mapping[str, Any] | None = MappingProxyType({}),
    cache: ComponentCache | None = None,
) -> Events:
    """Resume a run and yield its events, as `everyframe.engine.run.stream` does.

    `skip` are unwanted seeds; `given_model` is an in-memory run's model. With `join` this is one of
    several ranks: all read the saved state before the first one writes. `ranks` replace the run's
    devices. `out_of_memory` asks for the next memory fallback. `named` are options given again, for
    a foreign run; None if this call began it. `cache`, of `stream`, is emptied.
    """
    lock = _lock(folder) if (leads := join is None or join.rank == 0) else None
    try:
        run = load_run(folder).with_named(named)
        place = _place_of_report(run) if leads else None
        model = _model_here(run, given_model, trust_remote_code, is_same=ranks is None)
        run = replace(run, plan=with_owner_switches(run.plan, given_model))
        request = run.request if ranks is None else with_devices(run.request, ranks)
        peers = meet_peers(request, join, run.plan.num_threads if ranks is None else None)
        left = [video for video in initial_videos(run.request, run.plan) if video.seed not in skip]
        changes: tuple[Event, ...] = ()
        if out_of_memory is not None:
            plan, less = replan_with_less_memory(run.plan, model, out_of_memory)
            run, changes = replace(run, plan=plan, fallbacks=(*run.fallbacks, less)), (less,)
        elif ranks is not None and left:
            plan = replan_for_devices(run.plan, request, peers, skip)
            run, changes = replace(run, plan=plan), (*map(Note, change_notes(run.plan, plan)),)
        yield Planned(run.plan)
        record = make_record(run.plan, request, (model := model.fetch()).weight_files())
        yield from (*changes, *map(Note, _compare(run, record)), WeightsReady(record))
        if not left:
            yield from _all_made(folder)
            return
        here = join_plan(run.plan, model, record, peers, skip)
        model = with_cache(model, cache, here, record, empties=True)
        how = SaveOptions(folder.path.parent, run.output, run.as_uint8, cleans, pace)
        writer = RunStateWriter(replace(folder, part=here.group) if here.leads else None, how, lock)
        progress, message = _read(writer, run, here.mine(left), partial(here.stages, model))
        yield from map(Note, (message, *_skipped_note(skip if out_of_memory is None else ())))
        if peers is not None:  # before anybody writes
            peers.world.all_gather_object(None, "ranks read what was kept")
        if leads and changes:
            _write_anew(run, request, record)
        before, events = repairs_of(progress), run_stages(here, model, record, writer, progress)
        if place is not None:
            events = with_repair_report(events, run.plan, record, place, loaded_in(model), before)
        yield from events
    finally:
        if lock is not None:
            lock.release()


def _all_made(folder: RunFolder) -> Iterator[Note]:
    yield Note(f"all videos of {folder.name} were made")
    folder.remove()


def _lock(folder: RunFolder) -> Lock:
    """Lock the run for this process; `InputError` if that fails."""
    try:
        return folder.lock()
    except OSError as error:
        raise InputError(
            f"the run {folder.name} cannot be resumed in {folder.path.parent} "
            f"({error.strerror}); copy its folder to another disk and give it by its path: "
            "everyframe resume FOLDER"
        ) from error


def _place_of_report(run: InterruptedRun) -> Path | None:
    """Folder for the repair report, relative to where the run began."""
    asked = run.request.report
    return None if asked is None else check_folder(run.place / asked)


def _write_anew(run: InterruptedRun, request: Request, record: Mapping[str, Any]) -> None:
    """Save the new plan, so that the next resume uses it."""
    fallbacks = [each.to_json() for each in run.fallbacks]
    entries = {**run.folder.run(), "fallbacks": fallbacks}
    write(run.folder, entries, request, run.plan, record, is_own=run.is_own)


def _skipped_note(seeds: Collection[int]) -> tuple[str, ...]:
    named = ", ".join(map(str, sorted(seeds)))
    return (f"finished videos are left unchanged: seed {named}",) if seeds else ()


def _read(
    writer: RunStateWriter,
    run: InterruptedRun,
    videos: list[VideoState],
    stages: Callable[[int], Sequence[Stage]],
) -> tuple[RunState, str]:
    """Progress of these videos, as state and as one line of text."""
    settings, folder = run.plan.settings, run.folder
    what = f'"{settings.prompt[:60]}", ' if settings.prompt else ""
    name = f"{folder.name} ({run.plan.model}, {what}seed {settings.seed})"
    number = folder.num_answers()
    noun = "call is" if number == 1 else "calls are"
    served = f"; {number} saved model {noun} not computed again" if number else ""
    saved = furthest(folder, [video.seed for video in videos])
    progress, message = RunState(videos=videos), f"resuming {name} from the start{served}"
    try:
        if saved is not None:
            progress = writer.read(videos, saved)
            _check_position(progress, settings.chain, stages)
            clip = f"clip {progress.clip + 1} of {settings.chain}, " if progress.clip else ""
            done = f"{clip}stage {progress.stage + 1}, {sum(t.step for t in videos)} of its steps"
            message = f"resuming {name}: {done} done{served}"
    except CorruptRunError as error:
        # The request determines everything, so only time is lost.
        fresh = initial_videos(run.request, run.plan)
        wanted = {video.seed for video in videos}
        progress = RunState(videos=[video for video in fresh if video.seed in wanted])
        message = f"starting {name} again: {error}"
    add_fallbacks(progress, run.fallbacks)
    return progress, message


def _check_position(
    progress: RunState, num_clips: int, stages: Callable[[int], Sequence[Stage]]
) -> None:
    """Raise `CorruptRunError` for a stage that this run does not have; it would make no frames."""
    clip, stage = progress.clip, progress.stage
    is_position = type(clip) is int and type(stage) is int and 0 <= clip < num_clips
    if not is_position or not 0 <= stage < len(stages(clip)):
        raise CorruptRunError(f"its state is of stage {stage!r} of clip {clip!r}, which it lacks")


def _model_here(
    run: InterruptedRun, given: LoadedModel | None, trust_remote_code: bool, *, is_same: bool
) -> Any:
    """The model of the run, after checking that all else is unchanged; `is_same`: devices too."""
    _check_place(run)
    if is_same:  # others are asked for, and checked where they are planned for
        _check_device(run)
    if not trust_remote_code:
        _check_trust(run)
    if given is not None:
        if run.given is None:
            raise InputError(
                f"the run {run.folder.name} was begun with {run.plan.model}, and not with a "
                "pipeline that was given in Python; resume it with "
                f"everyframe.resume({run.folder.name!r})"
            )
        _check_given(run.folder, run.given, given.digests())
        return with_adapters(given.model, run.request)
    if run.record.get("model", {}).get("sha256") is None:
        raise InputError(
            f"the run {run.folder.name} was made with a {run.plan.model} that was given in Python; "
            f"load that again and call everyframe.resume({run.folder.name!r}, pipe=pipe)"
        )
    # The run began with all files of its model; others that its folder names are not fetched.
    name = run.request.model
    return find_model(run.request, may_fetch=name is None or is_listed(name))[0]


def _check_trust(run: InterruptedRun) -> None:
    """Raise `InputError` for a run whose model has its own code, which no file can allow."""
    if run.request.family_options.get("trust_remote_code"):
        raise InputError(
            f"the run {run.folder.name} runs Python code that comes with {run.plan.model}; if you "
            "trust it, allow it again: --trust-remote-code (trust_remote_code=True)"
        )


def find_run_of(digests: Mapping[str, str]) -> RunFolder:
    """The latest interrupted run of the in-memory model with these digests.

    Raises:
        InputError: there is none. If there is a run of another model, names what differs.
    """
    found: list[tuple[RunFolder, dict[str, str]]] = []
    for folder in free_runs():
        given = folder.run().get("given") if folder.is_readable() else None
        found += [] if given is None else [(folder, given)]
    if not found:
        raise InputError(
            "there is no interrupted run of a pipeline that was given in Python: nothing to resume"
        )
    fitting = [folder for folder, given in found if given == digests]
    if not fitting:
        _check_given(*found[-1], digests)
    return fitting[-1]


def _check_given(folder: RunFolder, was: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise `InputError` unless the digests `now` match those of the model that began the run."""
    others = [name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)]
    if others:
        raise InputError(
            f"the pipeline is not the one that {folder.name} was begun with: another "
            f"{', '.join(others)} (weights, dtype, config, device, adapters or hooks); set it up "
            "as it was to resume that run, or generate the video again from the start"
        )


def _check_place(run: InterruptedRun) -> None:
    """Raise `InputError` for input files given relative to another folder than this one."""
    if Path.cwd() == run.place:
        return
    given = [*run.request.given().items(), *run.request.family_options.items()]
    loras = (("LoRA", lora.file) for lora in run.request.loras)
    components = (("component", file) for file in run.request.components.values())
    named = [(name, value) for name, value in given if option_facts(name).get("names_path")]
    for name, value in (*named, *loras, *components):
        is_name = isinstance(value, (str, Path)) and bool(str(value))
        if is_name and not Path(value).is_absolute() and os.path.exists(run.place / value):
            raise InputError(
                f"the run {run.folder.name} was begun in {run.place}, where its {name} "
                f"{str(value)!r} lies; go there first: cd {run.place}"
            )


def _check_device(run: InterruptedRun) -> None:
    wanted = run.plan.device
    there = machine_facts(run.request.device).devices
    if not any((d.torch_name, d.name) == (wanted.torch_name, wanted.name) for d in there):
        names = ", ".join(f"{device.torch_name} ({device.name})" for device in there)
        raise CannotRunError(
            f"the run {run.folder.name} was on {wanted.torch_name} ({wanted.name}), and here is "
            f"{names}: another device gives other bits, so it cannot be resumed here; generate it "
            "again from the start; if the device was lost, restart the machine and resume then"
        )


def _names_model(name: str) -> bool:
    """Whether the option names a model, whose weights are compared and not its place."""
    return bool(option_facts(name).get("names_model"))


def _contents(value: Any) -> Any:
    """A recorded option without the names of files, which may be called otherwise elsewhere."""
    if isinstance(value, dict):
        return {k: _contents(each) for k, each in value.items() if (k, "sha256" in value) != _FILE}
    return [_contents(each) for each in value] if isinstance(value, list) else value


def _compare(run: InterruptedRun, record: dict[str, Any]) -> tuple[str, ...]:
    """Notes about differences that may change the result; `InputError` for those that do."""
    record = json.loads(json.dumps(record))  # as the other one came out of its file
    # Memory fallbacks are reported where they are applied.
    savings = {"savings": record["settings"]["savings"]}
    was = {**run.record, "settings": {**run.record["settings"], **savings}}
    if was["model"]["sha256"] != record["model"]["sha256"]:
        raise InputError(
            f"the weights of {run.plan.model} are not those that {run.folder.name} was begun with; "
            "it cannot be resumed"
        )
    for name, value in was["request"].items():
        if name in (*OF_RANKS, "device") or (name in run.named and _names_model(name)):
            continue
        if _contents(record["request"].get(name)) != _contents(value):
            raise InputError(
                f"{name} is not what {run.folder.name} was begun with: the file was changed since; "
                "put the old one back to resume"
            )
    return tuple(
        f"the frames may differ from those of an uninterrupted run: {line}"
        for line in differences(was, record, is_same_run=True)
    )
