"""Does a run that is killed at any moment continue and give the frames of an unbroken one?

    python benchmarks/kill.py              # 100 kills of the embedded model; about 10 minutes
    python benchmarks/kill.py --kills 20   # fewer
    python benchmarks/kill.py --tiny wan   # a tiny random pipeline, gone on with by replay
    python benchmarks/kill.py --name 1.2 model=FOLDER num_frames=3 size=16x16  # another model

`--tiny` takes the models of `tests/helpers/tiny_checkpoints/`.

Each run is a process of its own that is ended by SIGKILL: two times out of three at a random moment
after a random event, in whatever it does then (loading, text, a step, decoding), and the third time
inside a write of its state: before or after a random one of the calls that put bytes on the disk
and names in their places. The state is written at every step here, to be in danger as often as can
be. What is left is resumed in another process, and its frames are compared bit for bit. A
third of those are killed and resumed once more. It runs on a copy of the
package, so that a change on the disk meanwhile does no harm, and writes its page again after every
tenth.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from copied import on_a_copy
from result_pages import compose_page, make_parser, publish, versions_of

from everyframe.core import paths
from everyframe.core.events import ComponentLoaded, Event, FramesDecoded, StageStarted, Step
from everyframe.core.request import Request
from everyframe.engine.resumption.resume import resume_run
from everyframe.engine.run import stream
from everyframe.hardware import machine_facts
from everyframe.planning.resolve import prepare
from everyframe.runs import replay_log
from everyframe.runs.folder import all_runs
from everyframe.runs.run_state import EVERY_STEP, SaveOptions

#: The makers of tiny checkpoints lie beside the tests that use them.
TESTS = Path(__file__).parents[1] / "tests"
#: Two clips, so that frames are encoded and kept as well; as few steps as show something.
OPTIONS: dict[str, Any] = {
    "prompt": "a red circle moves to the right on a blue background", "seed": 7,
    "num_inference_steps": 2, "num_frames": 17, "chain": 2,
}  # fmt: skip
#: The same of a tiny Open-Sora, with given frames to encode.
TINY_OPENSORA: dict[str, Any] = {**OPTIONS, "num_frames": 3, "size": "16x16", "edit_strength": 0.5}
#: The longest wait after an event before the kill, in seconds.
_DELAY = 0.5
#: What a write of the state is made of.
_CALLS = ("fsync", "replace")

#: What a run imports when it needs it, beside what is imported above.
_SLOW_TO_IMPORT = ("everyframe", "transformers", "diffusers", "safetensors", "tokenizers")


@dataclass(frozen=True)
class Moment:
    """When a process dies: `delay` seconds after the event of that number, or around a call of
    `_CALLS` of that number."""

    event: int | None = None
    delay: float = 0.0
    call: int | None = None
    after: bool = False


@dataclass(frozen=True)
class Counts:
    """How many events and calls of `_CALLS` a run has."""

    events: int
    calls: int


def die() -> None:
    """As the system ends a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_to(place: Path, events: Iterator[Event], moment: Moment | None) -> None:
    """Take the events until that moment; without one, write frames and counts to `place`."""
    calls = _counted(moment)
    frames, number, stage = [], 0, ""
    (place / "stage").write_text("before the first stage")
    for number, event in enumerate(events, start=1):
        if isinstance(event, StageStarted | ComponentLoaded | Step):
            stage = event.stage if isinstance(event, StageStarted) else stage
            what = "loading" if isinstance(event, StageStarted) else "working"
            (place / "stage").write_text(f"{stage}, {what}")
        if isinstance(event, FramesDecoded):
            frames.append(np.asarray(event.frames, np.float32))
        if moment is not None and moment.event == number:
            threading.Timer(moment.delay, die).start()
    # By another name first: the kill may come now, too.
    np.save(place / "all.npy", np.concatenate(frames))
    os.replace(place / "all.npy", place / "frames.npy")
    (place / "modules").write_text("\n".join(sorted(sys.modules)))
    (place / "counts").write_text(f"{number} {calls()}")


def _counted(moment: Moment | None) -> Callable[[], int]:
    """Count the calls that a write is made of, and die at the one of that number."""
    count = 0

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            nonlocal count
            count += 1
            is_it = moment is not None and moment.call == count
            if is_it and moment is not None and not moment.after:
                die()
            result = real(*given)
            if is_it:
                die()
            return result

        return call

    class Watched:
        def __getattr__(self, name: str) -> Any:
            real = getattr(os, name)
            return counting(real) if name in _CALLS else real

    for module in (paths, replay_log):
        module.os = Watched()  # type: ignore[attr-defined]
    return lambda: count


def begin(root: Path, place: Path, options: dict[str, Any], moment: Moment | None) -> None:
    """In a process of its own: run from the beginning."""
    request = Request(**options)
    run_to(place, stream(request, keep=SaveOptions(root, pace=EVERY_STEP)), moment)


def resume(root: Path, place: Path, options: dict[str, Any], moment: Moment | None) -> None:
    """In a process of its own: continue with the only run that there is."""
    (folder,) = all_runs(root)
    run_to(place, resume_run(folder, pace=EVERY_STEP), moment)


def tiny_options(name: str, folder: Path) -> dict[str, Any]:
    """What a tiny model of that name is asked for, which is made in `folder`."""
    sys.path.insert(0, str(TESTS))
    from helpers.tiny_checkpoints import opensora as tiny_opensora
    from helpers.tiny_checkpoints import pipelines as tiny_pipelines

    names = ("opensora-1.2", *tiny_pipelines.TINY)
    if name not in names:
        sys.exit(f"--tiny is one of {', '.join(names)}, got {name!r}")
    make = tiny_opensora.opensora_1_2 if name == names[0] else tiny_pipelines.TINY[name]
    if forked(make, folder) != 0:
        sys.exit(f"{name} could not be made")
    its_own = {**OPTIONS, "num_inference_steps": 3, "chain": 1}
    if name == names[0]:
        its_own = TINY_OPENSORA
    else:
        del its_own["num_frames"]
        its_own |= tiny_pipelines.CALLS[name]
    return {**its_own, "model": str(folder), "device": "cpu", "dtype": "fp32"}


def process(
    work: Callable[..., None], root: Path, options: dict[str, Any], moment: Moment | None = None
) -> int:
    """The exit code of that work in a process of its own, negative for a signal."""
    return forked(work, root / "runs", root, options, moment)


def forked(work: Callable[..., object], *given: Any) -> int:
    """The same of a function and what it is given."""
    # Forked, so that nothing is imported again (see `whole`); this process has computed nothing
    # with numbers, and has no threads that a fork would lack.
    child = multiprocessing.get_context("fork").Process(target=work, args=given)
    child.start()
    child.join()
    code = child.exitcode
    assert code is not None
    return code


def whole(root: Path, options: dict[str, Any]) -> tuple[np.ndarray[Any, Any], Counts]:
    """The frames of an unbroken run, and how many events and writes it has."""
    if process(begin, root, options) != 0:
        sys.exit("the unbroken run failed")
    for name in (root / "modules").read_text().splitlines():
        # Half of what a run of this size takes is the import of libraries when they are needed.
        if name.partition(".")[0] in _SLOW_TO_IMPORT and name not in sys.modules:
            importlib.import_module(name)
    # Nor what plans know of a call by running it dry, without numbers.
    prepare(Request(**options), may_fetch=True)
    # A quarter of a run's time was spent on looking through what is imported for garbage.
    gc.freeze()
    events, calls = (root / "counts").read_text().split()
    return np.load(root / "frames.npy"), Counts(int(events), int(calls))


def moment_of(chance: random.Random, number: int, counts: Counts) -> Moment:
    """The moment of the kill of that number."""
    if number % 3 == 2:
        return Moment(call=chance.randint(1, counts.calls), after=chance.random() < 0.5)
    return Moment(event=chance.randint(1, counts.events), delay=chance.uniform(0, _DELAY))


@dataclass(frozen=True)
class Outcome:
    """What came of one kill: where it hit, whether it did, how often, and the frames."""

    where: str
    kills: int
    same: bool


def kill_once(
    root: Path,
    options: dict[str, Any],
    wanted: np.ndarray[Any, Any],
    moment: Moment,
    again: Moment | None = None,
) -> Outcome:
    """Kill a run at that moment, and what resumes it at `again`; compare what comes of it."""
    kills = int(process(begin, root, options, moment) == -signal.SIGKILL)
    where = (root / "stage").read_text() or "between two events"
    where = "writing the state" if moment.call is not None else where
    while any(all_runs(root / "runs")):
        code = process(resume, root, options, again)
        again = None
        kills += code == -signal.SIGKILL
        if code > 0:
            return Outcome(where, kills, same=False)
    is_made = (root / "frames.npy").exists()
    if not is_made:
        # It was killed before it was a run, or after it had been one.
        where += ", with nothing left to continue with"
        process(begin, root, options)
    found = np.load(root / "frames.npy")
    return Outcome(where, kills, same=found.tobytes() == wanted.tobytes())


def main() -> None:
    """Kill, continue, compare, and write the page."""
    parser = make_parser(__doc__)
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="of the request")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--name", default="", help="of the model, in the page and its name")
    parser.add_argument("--tiny", default="", metavar="NAME", help="a tiny random model")
    args = parser.parse_args()
    commit = on_a_copy()
    chance, began = random.Random(args.seed), time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        usual = tiny_options(args.tiny, Path(folder, "model")) if args.tiny else OPTIONS
        options = {**usual, **dict(each.split("=", 1) for each in args.options)}
        name = args.name or args.tiny
        title = "-".join(filter(None, ("kill", name)))
        (base := Path(folder, "whole")).mkdir()
        wanted, counts = whole(base, options)
        for number in range(args.kills):
            if time.monotonic() - began > 60 * args.minutes:
                break
            (root := Path(folder, str(number))).mkdir()
            moment = moment_of(chance, number, counts)
            again = moment_of(chance, number // 3, counts) if number % 3 == 0 else None
            outcomes.append(kill_once(root, options, wanted, moment, again))
            print(number + 1, outcomes[-1], flush=True)
            # Whatever ends this process, most of what it found stays.
            if len(outcomes) % 10 == 0:
                page = report(name, outcomes, counts, options, commit, began)
                publish(title, page, is_page=args.is_page)
    publish(title, report(name, outcomes, counts, options, commit, began), is_page=args.is_page)
    sys.exit(not all(outcome.same for outcome in outcomes))


def report(
    name: str,
    outcomes: list[Outcome],
    counts: Counts,
    options: dict[str, Any],
    commit: str,
    began: float,
) -> str:
    """The result page."""
    same = sum(outcome.same for outcome in outcomes)
    facts = machine_facts("cpu")
    lines = [
        f"**{same} of {len(outcomes)}** runs gave the bits of an unbroken run; "
        f"{sum(outcome.kills for outcome in outcomes)} processes were killed, by SIGKILL. Of "
        f"{f'a tiny random {name}' if name else 'the embedded model'}, clips: {options['chain']}, "
        f"of {options['num_frames']} frames in {options['num_inference_steps']} steps; "
        f"{counts.events} events and {counts.calls} calls of the disk in an unbroken run, the "
        "state written at every step.",
        "",
        "What is killed is the engine in a forked process: no worker, no parent process, and no "
        "video file. A run killed before its folder was whole, or after its frames were made, has "
        "nothing left to continue with, is begun again, and counts as the same bits.",
        "",
        "| killed while | runs | the same bits |",
        "|---|---|---|",
    ]
    hit = Counter(outcome.where for outcome in outcomes)
    good = Counter(outcome.where for outcome in outcomes if outcome.same)
    lines += [f"| {where} | {count} | {good[where]} |" for where, count in sorted(hit.items())]
    machine = (
        f"Hardware: {facts.cpu.name}, {facts.num_cores} cores that did other work too. Versions: "
        f"{versions_of(facts)}. Commit {commit}, {(time.monotonic() - began) / 60:.0f} minutes."
    )
    return compose_page("Runs that are killed", "\n".join(lines), machine)


if __name__ == "__main__":
    main()
