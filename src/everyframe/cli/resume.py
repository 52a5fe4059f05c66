"""``everyframe resume``: resume an interrupted run, list interrupted runs, or delete them.

The video goes to its original output path. `everyframe.engine.resumption.resume` does the work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from everyframe.cli.executors import RayChoice, chosen_ray, executor_flags
from everyframe.cli.generate import is_silent, make
from everyframe.cli.options import command, flag, optional, request_flag, run_flag
from everyframe.cli.table_layout import table
from everyframe.cli.tables import console, json_line, shortened
from everyframe.core.errors import ExitCode, InputError, RunLockedError
from everyframe.core.events import Events
from everyframe.core.request import Request
from everyframe.engine.workers.torchrun import under_torchrun
from everyframe.families.registry import options_of
from everyframe.media.output_path import check_here, check_output
from everyframe.runs.folder import RunFolder, RunSummary, find_run, list_runs, root_of
from everyframe.runs.resume_hint import resume_command
from everyframe.runs.retention import MOST_BYTES, days_of_runs

_HELP = """Resume an interrupted run: the video equals that of an uninterrupted run, bit for bit.

Without RUN it is the latest one. Runs are saved until they are done or forgotten. On another number
of devices (--num-devices) the video is the same up to rounding.
"""


def resume(
    run: str | None = None,
    *,
    list: bool = False,  # noqa: A002 - the flag's name
    forget: bool = False,
    output: str | None = None,
    json: bool = False,
    run_dir: str | None = None,
    trust_remote_code: bool = False,
    model: str | None = None,
    option: Sequence[str] = (),
    executor: str | None = None,
    ray_address: str | None = None,
    place_timeout: str | None = None,
    **devices: str,
) -> int:
    """Resume, list, or forget; the exit code. `devices` are options of the request about them."""
    ray = chosen_ray(executor, ray_address, place_timeout)
    if list and (forget or run is not None):
        raise InputError("--list shows all runs; leave out the rest")
    root = root_of(run_dir)
    if list:
        return 0 if is_silent() else _list(root, as_json=json)
    if run is None and under_torchrun() is not None:
        # The last one that nobody works on is soon another one for the next rank.
        raise InputError("name the run that every rank resumes: everyframe resume RUN")
    found = find_run(run, root)
    if forget:
        return _forget(found, is_named=run is not None)
    # Checked as the options of a run, which they replace.
    Request(**devices)
    written, is_own = found.run(), found.is_own()
    texts: Any = options_of("pipeline")
    named = {**texts(option=option).option, **({} if model is None else {"model": model})}
    if named:
        from everyframe.engine.resumption.foreign_run import find_here

        named = find_here(named)
    if not is_own:
        from everyframe.engine.resumption.foreign_run import check_named

        again = named.keys() | ({"output"} if output is not None else set())
        check_named(found, again, written["output"])
    place = output if output is not None else written["output"]
    if place is None:
        check_here()
    else:
        check_output(place)
    return make(
        lambda: _events(
            found,
            Path(written["place"]) if is_own else None,
            devices,
            named,
            trusts=trust_remote_code,
            ray=ray,
        ),
        place,
        json=json,
    )


def _forget(found: RunFolder, *, is_named: bool) -> int:
    """Remove a run that the person named and nobody works on."""
    if not is_named:
        raise InputError(f"name the run to remove: {resume_command(found)} --forget")
    if found.is_busy():
        raise RunLockedError(
            f"the run {found.name} is in use by another process; end that process first"
        )
    found.remove()
    return int(ExitCode.DONE)


def _events(
    found: RunFolder,
    where: Path | None,
    devices: Mapping[str, str],
    named: Mapping[str, Any],
    *,
    trusts: bool,
    ray: RayChoice | None,
) -> Events:
    from everyframe.engine.workers.launcher import ranks_of, run_in_workers
    from everyframe.engine.workers.worker_process import WorkerJob
    from everyframe.engine.workers.worker_start import is_possible

    ranks, here = _other_ranks(found, devices, ranks_of(found)), under_torchrun()
    if ray is not None or is_possible():
        number = ranks_of(found) if ranks is None else Request(**ranks).num_ranks
        job = WorkerJob(run=found.path, skip=found.done(), as_uint8=True, ranks=ranks,
                  trust_remote_code=trusts, named=named)  # fmt: skip
        place = where if where is not None and where.is_dir() else None
        if ray is not None:
            return ray.run(job.of_ranks(number), place or Path.cwd())
        return run_in_workers(job.of_ranks(number, here), place)
    from everyframe.engine.resumption.resume import resume_run

    return resume_run(found, skip=found.done(), ranks=ranks, trust_remote_code=trusts, named=named)


def _other_ranks(
    found: RunFolder, devices: Mapping[str, str], before: int
) -> dict[str, Any] | None:
    """The devices to resume on; None for those of the run."""
    given: dict[str, Any] = {**devices}
    torchrun = under_torchrun()
    if torchrun is not None:
        given |= torchrun.options(given)
        # Rank 0 writes, so it needs a part of what is left.
        is_as_before = torchrun.size == before and not found.done()
        return None if is_as_before and not devices else given
    return given or None


def _list(root: Path | None, *, as_json: bool) -> int:
    rows = list_runs(root)
    if as_json:
        for row in rows:
            print(json_line({"type": "run", **asdict(row)}))
        return int(ExitCode.DONE)
    print_runs(rows, sys.stdout)
    return int(ExitCode.DONE)


def _age(seconds: float) -> str:
    """Time since the last write of a run, in whole units."""
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        number = int(seconds // length)
        if number > 0:
            return f"{number} {unit}" + ("s" if number > 1 else "")
    return "now"


def print_runs(rows: Sequence[RunSummary], file: IO[str]) -> None:
    """Print one row per resumable run, with its prompt."""
    from everyframe.core.bytes import format_bytes

    out = console(file)
    if not rows:
        out.print("there is no interrupted run")
        return
    shown = table(*((name, "left") for name in ("run", "model", "progress", "age", "size")))
    for row in rows:
        far = f"{row.progress}; running" if row.is_busy else row.progress
        age = _age(time.time() - row.written)
        shown.add_row(row.run, row.model, far, age, format_bytes(row.num_bytes))
    out.print(shown)
    total, days = sum(row.num_bytes for row in rows), days_of_runs()
    if days:
        out.print(
            f"{format_bytes(total)} in all; a run is removed after {days:g} days without a "
            f"write, the oldest first above {format_bytes(MOST_BYTES)}",
            style="dim",
        )
    for row in rows:
        out.print(f"{row.run}  {shortened(row.prompt, 58)}", style="dim")


COMMAND = command(
    resume,
    (
        optional("run", "Name or folder of the run; see --list."),
        flag("list", bool, "List the runs that can be resumed, and stop."),
        flag("forget", bool, "Remove the run and all its saved state, and stop."),
        flag("trust_remote_code", bool, "Run Python code that comes with the run's checkpoint."),
        *(
            request_flag(name)
            for name in ("num_devices", "devices", "parallel", "shares", "shard_weights")
        ),
        flag("model", str, "For a run that somebody else made: its model's folder.", alias="-m"),
        flag(
            "option", list, "For such a run: a file that it was given, as image=FILE; repeatable."
        ),
        run_flag("output"),
        run_flag("json"),
        run_flag("run_dir"),
        run_flag("log_level"),
        *executor_flags(),
    ),
    _HELP,
)
