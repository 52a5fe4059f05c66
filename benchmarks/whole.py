"""What does a whole run take, from the command to the file, beside a script of diffusers?

    python benchmarks/whole.py                  # videos of a small Wan; twenty minutes at most
    python benchmarks/whole.py --model svd      # of a narrow Stable Video Diffusion
    python benchmarks/whole.py --model opensora # of a narrow Open-Sora 1.2, which diffusers lacks
    python benchmarks/whole.py --folder DIR     # the same, which continues where it was broken off
    python benchmarks/whole.py --device cuda    # a larger one, on a card; five minutes

A pipeline with random weights is written to disk first (`whole_models.py`). Then each command is a
process of its own, started with nothing loaded, and ends with an .mp4: a script of diffusers in
float32 and in bfloat16, with its blocks compiled where that is asked, and `everyframe generate`
exact (no fast path), with the fast paths that `everyframe fast-paths --certify` has certified
before, and with compiled blocks that `everyframe compile` made before; the time of both stands
apart. All take turns, round after round. Wall time and processor time with all child processes; the
median over rounds. A command that takes longer than `--limit` is a line with the reason, and no
round begins after `--seconds`.
Everything that was measured, and what was compiled, stays in `--folder`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from result_pages import compose_page, make_parser, publish, where
from whole_models import MODELS, START, WRITE

COMPILED = "everyframe, compiled before"

#: Everyframe's names of the sizes, and ours.
SHORT = {"height": "height", "width": "width", "num_frames": "frames",
         "num_inference_steps": "steps"}  # fmt: skip


@dataclass
class Measured:
    """What was measured so far; the first round of each command, which fills caches, apart.

    Attributes:
        asked: sizes that it is valid for.
        first: (wall, processor) seconds of each command's first round.
        rounds: the same of each later round.
        skipped: why a command is not measured.
        certified: seconds of `everyframe fast-paths --certify`.
        compiled: seconds of `everyframe compile`.
    """

    asked: dict[str, Any]
    first: dict[str, list[float]] = field(default_factory=dict)
    rounds: dict[str, list[list[float]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    certified: float | None = None
    compiled: float | None = None

    def keep(self, file: Path) -> None:
        """Write it whole or not at all."""
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self), indent=1))
        fresh.replace(file)

    @classmethod
    def find(cls, file: Path, asked: dict[str, Any]) -> Measured:
        """What an earlier start with the same sizes has measured. Raises `SystemExit` else."""
        if not file.is_file():
            return cls(asked)
        found = cls(**json.loads(file.read_text()))
        if found.asked != asked:
            raise SystemExit(f"{file} was measured with {found.asked}; give another --folder")
        found.skipped = {}  # they are tried again
        return found


def timed(command: list[str], place: Path, limit: float) -> tuple[float, float]:
    """Wall and processor seconds of a command with all that it starts.

    Raises:
        RuntimeError: it failed, or did not end within so many seconds.
    """
    env = {
        **os.environ, "EVERYFRAME_CACHE": str(place / "cache"), "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
    }  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    with open(place / "output.txt", "w+") as output:
        started = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            code = started.wait(limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done within {limit:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)  # and what it left behind
            started.wait()
        output.seek(0)
        text = output.read().strip()
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code:
        raise RuntimeError((text.splitlines() or [f"exit code {code}"])[-1][-300:])
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, used


def own_sizes(args: argparse.Namespace, place: Path) -> list[str]:
    """Device, sizes and the input as arguments of ours."""
    found = ["--device", args.device, *MODELS[args.model].own(place)]
    for name, short in SHORT.items():
        found += [f"--{name.replace('_', '-')}", str(getattr(args, short))]
    return found


def commands(args: argparse.Namespace, place: Path) -> dict[str, list[str]]:
    from everyframe.fast_paths.registry import CATALOGUE

    folder, output = str(place / "model"), str(place / "out.mp4")
    script = place / "diffusers_script.py"
    script.write_text(START + MODELS[args.model].script + WRITE)
    sizes = [str(each) for each in (args.height, args.width, args.frames, args.steps)]
    found: dict[str, list[str]] = {}
    for dtype in ("float32", "bfloat16") if MODELS[args.model].script else ():
        theirs = [sys.executable, str(script), folder, args.device, dtype]
        found[f"diffusers {dtype}"] = [*theirs, "False", output, *sizes]
        if args.compiled:
            found[f"diffusers {dtype}, compiled"] = [*theirs, "True", output, *sizes]
    ours = [
        sys.executable, "-m", "everyframe", "generate", "--model", folder,
        *own_sizes(args, place), "--seed", "1", "--run-dir", "off", "-o", output,
    ]  # fmt: skip
    off = [each for name in CATALOGUE for each in ("--disable", name)]
    found["everyframe, no fast path"] = [*ours, *off, "--dtype", "fp32"]
    found["everyframe"] = [*ours, "--disable", "compile"]
    found[COMPILED] = ours
    return {name: command for name, command in found.items()
            if not args.only or any(each in name for each in args.only)}  # fmt: skip


def measure(args: argparse.Namespace, place: Path, found: Measured) -> Iterator[None]:
    """Fill `found`, command by command; yields after each."""
    if not (place / "written").is_file():
        MODELS[args.model].write(place, args.width_of_model, args.layers)
        (place / "written").touch()
    runs = commands(args, place)
    model = [str(place / "model"), *own_sizes(args, place)]
    ours = [sys.executable, "-m", "everyframe"]
    ahead = [*ours, "compile", *model, "-o", str(place / "compiled")]
    ends = time.monotonic() + args.seconds
    if found.certified is None:
        found.certified = timed([*ours, "fast-paths", "--certify", "--model", *model], place,
                                args.limit)[0]  # fmt: skip
        found.keep(place / "measured.json")
    for number in range(args.rounds + 1):
        for name, command in runs.items():
            done = len(found.rounds.get(name, ())) + (name in found.first)
            if name in found.skipped or done > number:
                continue
            left = min(args.limit, ends - time.monotonic())
            if left <= 0:
                return
            try:
                if name == COMPILED and found.compiled is None:
                    found.compiled = timed(ahead, place, left)[0]
                    found.keep(place / "measured.json")
                times = list(timed(command, place, args.limit))
            except RuntimeError as error:
                found.skipped[name] = str(error)
            else:
                # The first round fills caches: certificates, torch's compiler, the files' pages.
                if number:
                    found.rounds.setdefault(name, []).append(times)
                else:
                    found.first[name] = times
                print(f"{number} {name}: {times[0]:.1f} s, processor {times[1]:.1f} s", flush=True)
            found.keep(place / "measured.json")
            yield


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--compiled", action="store_true", help="diffusers with compiled blocks too"
    )
    parser.add_argument("--folder", type=Path, help="keep what is measured, and continue with it")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one command")
    parser.add_argument("--seconds", type=float, default=1200.0, help="for all")
    parser.add_argument("--model", choices=tuple(MODELS), default="wan")
    parser.add_argument("--only", action="append", default=[], help="part of commands' names")
    for name in ("width-of-model", "layers", "height", "width", "frames", "steps"):
        parser.add_argument(f"--{name}", type=int, help="default: by model and device")
    args = parser.parse_args()
    model = MODELS[args.model]
    for name, value in (model.on_cpu if args.device == "cpu" else model.on_card).items():
        setattr(args, name, getattr(args, name) or value)
    return args


def main() -> None:
    args = arguments()
    names = ("model", "device", "width_of_model", "layers", "height", "width", "frames", "steps",
             "compiled")  # fmt: skip
    sizes = {name: getattr(args, name) for name in names}
    with contextlib.ExitStack() as stack:
        place = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place.mkdir(parents=True, exist_ok=True)
        found = Measured.find(place / "measured.json", sizes)
        for _ in measure(args, place, found):
            pass
    if not found.rounds:
        raise SystemExit(f"nothing could be measured: {found.skipped or 'no time was left'}")
    write_page(args, found)


def row(name: str, found: Measured, base: list[list[float]]) -> str:
    """One line of the table."""
    own = found.rounds[name]
    cells = []
    for kind in (0, 1):
        ratios = [before[kind] / after[kind] for before, after in zip(base, own, strict=False)]
        took = statistics.median(times[kind] for times in own)
        cells.append(f"{took:.1f} s | {statistics.median(ratios):.2f}")
    return f"| {name} | {' | '.join(cells)} | {found.first[name][0]:.1f} s |"


def write_page(args: argparse.Namespace, found: Measured) -> None:
    from measuring import hardware

    from everyframe.hardware import machine_facts, pick_device

    facts = machine_facts(args.device)
    device = pick_device(facts, args.device)
    first = next(name for name in ("diffusers float32", *found.rounds) if name in found.rounds)
    rows = "\n".join(row(name, found, found.rounds[first]) for name in found.rounds)
    lines = "".join(f"\n- {name}: not measured ({why})" for name, why in found.skipped.items())
    fewest = min(map(len, found.rounds.values()))
    took = "was not run" if found.compiled is None else f"took {found.compiled:.0f} s, once, before"
    certified = (
        f"`everyframe fast-paths --certify` took {found.certified or 0.0:.0f} s, once, before"
    )
    text = f"""
{MODELS[args.model].title(args.width_of_model, args.layers)}; {args.frames} frames
of {args.width}x{args.height}, {args.steps} steps, guided. Medians of {fewest} rounds or more,
after a first one that fills caches.

| command | wall | x {first} | processor | x {first} | first, wall |
| --- | --- | --- | --- | --- | --- |
{rows}

{certified}. `everyframe compile` {took}.{lines}
"""
    page = compose_page(
        f"From the command to the file on {where(device)}", text, hardware(facts, device)
    )
    name = "whole" if args.model == "wan" else f"whole-{args.model}"
    publish(name, page, is_page=args.is_page, device=device)


if __name__ == "__main__":
    main()
