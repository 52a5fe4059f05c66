"""Does any input break the command line?

    python benchmarks/fuzz.py                       # 10,000 cases, about 20 minutes on two cores
    python benchmarks/fuzz.py --cases 600           # fewer
    python benchmarks/fuzz.py --kinds record,run    # some kinds
    python benchmarks/fuzz.py --only "record 0 61"  # one case again, with its output

Kinds: requests (every option with any value), prompts on standard input, records, checkpoints'
configs and index files, safetensors headers, pictures and videos, and run folders, with values or
bytes changed. A case passes without a traceback, a signal, a hang (30 s of processor time) or a
file beside its output, in bounded memory; a run folder gives the frames of the unbroken run or
none. The same seed gives the same cases.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
#: The makers of cases and of tiny checkpoints lie beside the tests that use them.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from result_pages import compose_page, make_parser, publish, versions_of

from everyframe.hardware import machine_facts
from everyframe.hardware.cpu import processor_flags, processor_name
from helpers.fuzz_cases import KINDS, Inputs, case_of, names
from helpers.fuzz_runner import run, warm_up

#: Instruction sets that a result page names, where the processor has them.
SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd",
        "bf16")  # fmt: skip


class Found(NamedTuple):
    """What came of a case; `problem` is empty where it passed."""

    name: str
    problem: str
    seconds: float
    text: str


def share(inputs: Inputs, every: list[str], number: int, count: int, queue: Any) -> None:
    """Run each `count`-th case from `number` on; put (name, problem, seconds, output)."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for at in range(number, len(every), count):
            verdict = run(case_of(every[at], inputs), Path(folder, "sandbox"))
            queue.put((every[at], verdict.problem, verdict.seconds, str(verdict)))


def verdicts(inputs: Inputs, every: list[str], workers: int) -> list[Found]:
    """All of them, with a line for each case that fails and every hundredth."""
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    processes = [
        fork.Process(target=share, args=(inputs, every, number, workers, queue))
        for number in range(workers)
    ]
    for process in processes:
        process.start()
    found: list[Found] = []
    while len(found) < len(every):
        found.append(Found(*queue.get()))
        if found[-1].problem:
            print(found[-1].text, flush=True)
        if len(found) % 100 == 0:
            bad = sum(bool(each.problem) for each in found)
            print(f"{len(found)} of {len(every)} cases, {bad} failed", flush=True)
    for process in processes:
        process.join()
    return found


def page(found: list[Found], minutes: float) -> str:
    """The result page."""
    lines = ["| kind | cases | failed | slowest, s |", "|---|---|---|---|"]
    kinds = Counter(each.name.split()[0] for each in found)
    for kind, count in kinds.items():
        mine = [each for each in found if each.name.startswith(f"{kind} ")]
        failed = sum(bool(each.problem) for each in mine)
        lines.append(f"| {kind} | {count} | {failed} | {max(e.seconds for e in mine):.1f} |")
    problems = Counter(each.problem for each in found if each.problem)
    lines += ["", *(f"- {count} times: {problem}" for problem, count in problems.most_common())]
    machine = (
        f"{minutes:.0f} minutes; {versions_of(machine_facts())}; {processor_name()} with "
        f"{', '.join(flag for flag in SETS if flag in processor_flags())}."
    )
    return compose_page("Fuzzed inputs", machine, "\n".join(lines))


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--only", default="", help="the name of one case")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    kinds = tuple(args.kinds.split(","))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-inputs-") as folder:
        os.environ["XDG_STATE_HOME"] = str(Path(folder, "state"))  # the key of its runs
        inputs = Inputs(Path(folder))
        warm_up(inputs)
        every = [args.only] if args.only else names(args.cases, args.seed, kinds)
        found = verdicts(inputs, every, min(args.workers, len(every)))
    minutes = (time.monotonic() - began) / 60
    if args.only:
        print(*(each.text for each in found))
    else:
        publish("fuzz", page(found, minutes), is_page=args.is_page)
    failed = [each for each in found if each.problem]
    print(f"{len(found)} cases, {len(failed)} failed, {minutes:.1f} minutes")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
