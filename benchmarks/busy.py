"""What does a step cost where other programs use the cores too, by how threads wait?

    python benchmarks/busy.py                # some minutes
    python benchmarks/busy.py --rounds 5

The embedded model denoises in a new process for each way of waiting, by turns, round after round:
GNU's OpenMP by default, with a thirtieth of its spinning, and without any. First alone, then beside
one and two processes that use a core all the time. Seconds are wall time of all steps, the median
of three videos after a first one, and of one video beside two processes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from contextlib import ExitStack

from measuring import hardware
from result_pages import compose_page, make_parser, publish, where

from everyframe.hardware import machine_facts, pick_device

#: Variables by the way of waiting; the first one is what the others are compared with.
WAYS: dict[str, dict[str, str]] = {
    "GNU's OpenMP by default": {},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}

STEPS = """
import statistics
import sys
import everyframe
from everyframe.core.events import Step

def steps():
    found = []
    everyframe.generate("a red circle moves right", seed=7, run_dir="off", on_event=found.append)
    return sum(each.seconds for each in found if isinstance(each, Step) and each.stage == "denoise")

steps()
print(statistics.median(steps() for _ in range(int(sys.argv[1]))))
"""


def denoise(variables: dict[str, str], num_videos: int) -> float:
    """Seconds of all steps in a new process with these variables, the median of so many videos."""
    plain = {name: value for name, value in os.environ.items()
             if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(num_videos)], check=True, capture_output=True, text=True,
        env={**plain, "EVERYFRAME_IN_PROCESS": "1", **variables},
    )  # fmt: skip
    return float(done.stdout)


def measure(num_others: int, rounds: int) -> str:
    """The table beside so many busy processes."""
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    with ExitStack() as stack:
        for _ in range(num_others):
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(other.wait)
            stack.callback(other.kill)
        for _ in range(rounds):
            for name, variables in WAYS.items():
                times[name].append(denoise(variables, 3 if num_others < 2 else 1))
                print(f"{num_others} {name}: {times[name][-1]:.2f} s", flush=True)
    base = next(iter(times.values()))
    rows = []
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(base, own, strict=True))
        spread = f"{min(own):.2f} to {max(own):.2f}"
        rows.append(f"| {name} | {statistics.median(own):.2f} s | {spread} | {ratio:.2f} |")
    processes = "1 busy process" if num_others == 1 else f"{num_others} busy processes"
    title = f"Beside {processes}" if num_others else "Alone"
    return f"""## {title}

| threads wait | 30 steps | from, to | x default |
| --- | --- | --- | --- |
{chr(10).join(rows)}
"""


def main() -> None:
    args = make_parser(__doc__, rounds=5).parse_args()
    facts = machine_facts()
    device = pick_device(facts, "cpu")
    tables = "\n".join(measure(num_others, args.rounds) for num_others in range(3))
    text = compose_page(
        f"Threads that wait on {where(device)} that is busy",
        f"The embedded model, {facts.num_cores} threads, medians of {args.rounds} rounds by turns.",
        tables,
        hardware(facts, device),
    )
    publish("busy", text, is_page=args.is_page, device=device)


if __name__ == "__main__":
    main()
