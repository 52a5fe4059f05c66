"""Goes on with a run that was broken off: the same plan, from the last state that was written.

What is computed again has the same bits, so the frames are those of an unbroken run; where that
can't be promised because something else changed since (weights, a given picture, the device) it is
an error, and what may matter (versions) is a note. Read next: `run.py`, `keeping.py`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from everyframe.core.errors import CannotRunError, DamagedError, InputError, Scarcity
from everyframe.core.events import Event, Events, Note, Planned, Ready, Repaired
from everyframe.core.plain import from_plain
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine.keeping import write
from everyframe.engine.moving import OF_RANKS, asked_anew, divided_anew, said_of_move
from everyframe.engine.owner import as_owned
from everyframe.engine.ranks import Join, Met, joined, met
from everyframe.engine.record import differences, make_record
from everyframe.engine.relieving import in_less, relieved_of, remind
from everyframe.engine.reporting import loaded_in, repairs_of, reported
from everyframe.engine.run import takes_of, work
from everyframe.families.family import Model, Take
from everyframe.hardware.facts import machine_facts
from everyframe.media.paths import check_folder
from everyframe.planning.models import find_model
from everyframe.planning.resolve import GivenModel
from everyframe.runs.folder import RunFolder
from everyframe.runs.keeper import Keep, Keeper, Pace, Progress, furthest
from everyframe.runs.store import Store


@dataclass(frozen=True)
class BrokenOff:
    """A run that was broken off: what was asked and planned, and how it was kept.

    `relieved` is what had to be done by all of its ranks so that they need less memory.
    """

    folder: RunFolder
    request: Request
    plan: Plan
    record: dict[str, Any]
    place: Path
    output: str | None
    as_uint8: bool
    relieved: tuple[Repaired, ...] = ()


def read_run(folder: RunFolder) -> BrokenOff:
    """A run as it was begun.

    Raises:
        DamagedError: the folder holds none, or not as it was written.
    """
    written = folder.run()
    fetch = Store(folder.given).fetch
    try:
        request, plan = (from_plain(written[name], fetch) for name in ("request", "plan"))
        found = BrokenOff(
            folder=folder,
            request=request,
            plan=plan,
            record=dict(written["record"]),
            place=Path(written["place"]),
            output=written["output"],
            as_uint8=bool(written["as_uint8"]),
            relieved=relieved_of(written.get("relieved", ())),
        )
    except (KeyError, TypeError) as error:
        raise DamagedError(f"{folder.path} can't be read: {error}") from error
    if not isinstance(request, Request) or not isinstance(plan, Plan):
        raise DamagedError(f"{folder.path} holds no request and plan")
    return found


def go_on(
    folder: RunFolder,
    *,
    skip: Collection[int] = (),
    given_model: GivenModel | None = None,
    cleans: bool = True,
    pace: Pace = Pace(),  # noqa: B008 - frozen
    join: Join | None = None,
    ranks: Mapping[str, Any] | None = None,
    scarcity: Scarcity | None = None,
) -> Events:
    """What happens from there on, as `everyframe.engine.run.stream` yields it.

    `skip` are seeds whose videos are not wanted again; `given_model` is the model, for a run whose
    model was in memory. Raises an `EveryframeError` for anything that stands in the way.
    With `join` this is one of several ranks: all read what was kept before the first one writes.
    `ranks` are options of the request that say which devices it goes on with; without, as before.
    `scarcity` is what these ranks lacked memory for, which is done in less from here on.
    """
    leads = join is None or join.rank == 0
    lock = folder.locked() if leads else None
    try:
        run = read_run(folder)
        place = _place_of_report(run) if leads else None
        _check_here(run, is_same=ranks is None)
        run, model = replace(run, plan=as_owned(run.plan, given_model)), _model(run, given_model)
        request = run.request if ranks is None else asked_anew(run.request, ranks)
        peers = met(request, join, run.plan.num_threads if ranks is None else None)
        left = [take for take in takes_of(run.request, run.plan) if take.seed not in skip]
        told: tuple[Event, ...] = ()
        if scarcity is not None:
            run, told = _in_less(run, model, scarcity)
        elif ranks is not None and left:
            run, told = _divided(run, request, peers, skip)
        yield Planned(run.plan)
        model = model.fetch()
        record = make_record(run.plan, request, model.weight_files())
        yield from (*told, *map(Note, _compared(run, record)), Ready(record))
        if not left:
            yield Note(f"all videos of {folder.name} were made")
            folder.remove()
            return
        here = joined(run.plan, model, record, peers, skip)
        how = Keep(folder.path.parent, run.output, run.as_uint8, cleans, pace)
        keeper = Keeper(replace(folder, part=here.group) if here.leads else None, how, lock)
        progress, says = _progress(keeper, run, here.mine(left))
        yield Note(says)
        if peers is not None:  # before anybody writes
            peers.world.tell_all(None, "ranks read what was kept")
        if leads and told:
            _write_anew(run, request, record)
        events = work(here, model, record, keeper, progress)
        if place is None:
            yield from events
            return
        before, loaded = repairs_of(progress), loaded_in(model)
        yield from reported(events, run.plan, record, place, loaded, before)
    finally:
        if lock is not None:
            lock.release()


def _place_of_report(run: BrokenOff) -> Path | None:
    """Where its page goes, relative to where the run was begun."""
    asked = run.request.report
    return None if asked is None else check_folder(run.place / asked)


def _divided(
    run: BrokenOff, request: Request, peers: Met | None, skip: Collection[int]
) -> tuple[BrokenOff, tuple[Event, ...]]:
    """The run for the devices of that request, and what is told of it."""
    plan = divided_anew(run.plan, request, peers, skip)
    return replace(run, plan=plan), (*map(Note, said_of_move(run.plan, plan)),)


def _in_less(
    run: BrokenOff, model: Model, scarcity: Scarcity
) -> tuple[BrokenOff, tuple[Event, ...]]:
    """The run with one thing more done so that its ranks need less, and what is told of it."""
    plan, told = in_less(run.plan, model, scarcity)
    return replace(run, plan=plan, relieved=(*run.relieved, told)), (told,)


def _write_anew(run: BrokenOff, request: Request, record: Mapping[str, Any]) -> None:
    """Have whoever goes on with it next do so as it is planned now."""
    relieved = [each.to_json() for each in run.relieved]
    write(run.folder, {**run.folder.run(), "relieved": relieved}, request, run.plan, record)


def _progress(keeper: Keeper, run: BrokenOff, takes: list[Take]) -> tuple[Progress, str]:
    """How far these videos came, and that in a line."""
    progress, says = _read(keeper, run, takes)
    remind(progress, run.relieved)
    return progress, says


def _read(keeper: Keeper, run: BrokenOff, takes: list[Take]) -> tuple[Progress, str]:
    name = run.folder.name
    kept = furthest(run.folder, [take.seed for take in takes])
    if kept is None:
        return Progress(takes=takes), f"goes on with {name} from its beginning"
    try:
        progress = keeper.read(takes, kept)
    except DamagedError as error:
        # All of it follows from what was asked, so nothing but time is lost.
        fresh = takes_of(run.request, run.plan)
        wanted = {take.seed for take in takes}
        again = Progress(takes=[take for take in fresh if take.seed in wanted])
        return again, f"begins {name} again: {error}"
    clip = f"clip {progress.clip + 1} of {run.plan.settings.chain}, " if progress.clip else ""
    steps = sum(take.step for take in takes)
    return (
        progress,
        f"goes on with {name}: {clip}stage {progress.stage + 1}, {steps} steps of it done",
    )


def _model(run: BrokenOff, given: GivenModel | None) -> Any:
    if given is not None:
        return given.model
    if run.record.get("model", {}).get("sha256") is None:
        raise InputError(
            f"the run {run.folder.name} was made with a {run.plan.model} that was given in Python; "
            f"load that again and call everyframe.resume({run.folder.name!r}, pipe=pipe)"
        )
    return find_model(run.request, may_fetch=True)[0]


def _check_here(run: BrokenOff, *, is_same: bool) -> None:
    """Raise for another folder or device than it was begun in; `is_same` if that is to go on."""
    _check_place(run)
    if is_same:  # others are asked for, and checked where they are planned for
        _check_device(run)


def _check_place(run: BrokenOff) -> None:
    """Raise `InputError` for files that were given relative to another folder than this one."""
    if Path.cwd() == run.place:
        return
    for name, value in {**run.request.given(), **run.request.family_options}.items():
        is_text = isinstance(value, (str, Path)) and name != "prompt"
        if is_text and not Path(value).is_absolute() and (run.place / value).exists():
            raise InputError(
                f"the run {run.folder.name} was begun in {run.place}, where its {name} "
                f"{str(value)!r} lies; go there first: cd {run.place}"
            )


def _check_device(run: BrokenOff) -> None:
    wanted = run.plan.device
    there = machine_facts(run.request.device).devices
    if not any((d.torch_name, d.name) == (wanted.torch_name, wanted.name) for d in there):
        names = ", ".join(f"{device.torch_name} ({device.name})" for device in there)
        raise CannotRunError(
            f"the run {run.folder.name} was on {wanted.torch_name} ({wanted.name}), and here is "
            f"{names}: another device gives other bits, so it can't be gone on with, but made "
            "again from its beginning; if it was lost, restart the machine and go on then"
        )


def _compared(run: BrokenOff, record: dict[str, Any]) -> tuple[str, ...]:
    """What is said of what may make a difference; `InputError` for what surely does."""
    record = json.loads(json.dumps(record))  # as the other one came out of its file
    # What is done to need less memory is told where it is done.
    savings = {"savings": record["settings"]["savings"]}
    was = {**run.record, "settings": {**run.record["settings"], **savings}}
    if was["model"]["sha256"] != record["model"]["sha256"]:
        raise InputError(
            f"the weights of {run.plan.model} are not those that {run.folder.name} was begun with; "
            "it can't be gone on with"
        )
    for name, value in was["request"].items():
        if name not in (*OF_RANKS, "device") and record["request"].get(name) != value:
            raise InputError(
                f"{name} is not what {run.folder.name} was begun with: the file was changed since; "
                "put the old one back to go on with it"
            )
    return tuple(
        f"the frames may differ from those of an unbroken run: {line}"
        for line in differences(was, record)
    )
