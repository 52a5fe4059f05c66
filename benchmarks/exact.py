"""Did the exact path keep its bits and its speed since an earlier version?

    git worktree add --detach /tmp/before d56be785^     # before the first kernel of our own
    python benchmarks/exact.py --before /tmp/before     # ten minutes

Both versions make the same videos of the embedded model in float32, with every fast path disabled,
in processes of one thread that take turns. A step's processor time, with all threads of the
process, is taken over all steps of a video but the first; that of a round is the least of its
videos, as other programs only add to it. Frames are compared by their digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from result_pages import compose_page, make_parser, publish

HERE = Path(__file__).parent
STEPS, VIDEOS = 30, 4


def measure() -> None:
    """Print seconds of a step and the digest of the frames, for each video."""
    import numpy as np

    import everyframe
    from everyframe.core.events import FramesDecoded, Step
    from everyframe.core.request import Request
    from everyframe.fast_paths.registry import CATALOGUE

    rows = []
    for seed in range(VIDEOS + 1):
        request = Request(
            prompt="a red circle moves to the right on a blue background", seed=seed,
            dtype="float32", num_inference_steps=STEPS, disable=tuple(CATALOGUE),
        )  # fmt: skip
        clock, digest = list[float](), hashlib.sha256()
        for event in everyframe.stream(request):
            if isinstance(event, Step):
                clock.append(time.process_time())
            elif isinstance(event, FramesDecoded):
                digest.update(np.asarray(event.frames).tobytes())
        rows.append(((clock[-1] - clock[0]) / (len(clock) - 1), digest.hexdigest()))
    print(json.dumps(rows[1:]))  # the first one imports and compiles


def measured_in(folder: Path) -> tuple[float, list[str]]:
    """Least seconds of a step by the version of that checkout, and the digests of its videos."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1",
                   "EVERYFRAME_IN_PROCESS": "1"}  # fmt: skip
    output = subprocess.run(
        [sys.executable, __file__, "--measure"], env=environment, check=True,
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    rows = json.loads(output.splitlines()[-1])
    return min(seconds for seconds, _ in rows), [digest for _, digest in rows]


def page_of(rows: list[dict[str, Any]], before: str, facts: Any, device: Any) -> str:
    """The result page."""
    from measuring import hardware

    ratios = sorted(row["now"] / row["before"] for row in rows)
    quarters = statistics.quantiles(ratios, n=4)
    lines = [
        f"{len(rows)} rounds of {VIDEOS} videos of `shapes`, {STEPS} steps in float32, every fast "
        f"path disabled, beside `{before}`.", "",
        "| what | |", "| --- | --- |",
        f"| frames with the same bits | {sum(row['equal'] for row in rows)} of "
        f"{len(rows) * VIDEOS} videos |",
        f"| processor time of a step, earlier version = 1, median | "
        f"{statistics.median(ratios):.3f} |",
        f"| its quartiles | {quarters[0]:.3f}, {quarters[2]:.3f} |",
        f"| its range | {ratios[0]:.3f} to {ratios[-1]:.3f} |",
        f"| milliseconds of a step now, median | "
        f"{1000 * statistics.median(row['now'] for row in rows):.1f} |",
    ]  # fmt: skip
    title = "The exact path beside an earlier version"
    return compose_page(title, "\n".join(lines), hardware(facts, device))


def main() -> None:
    """Measure, print, and write the page."""
    parser = make_parser(__doc__, rounds=16)
    parser.add_argument("--before", type=Path, help="a checkout of the earlier version")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure()
        return
    if args.before is None:
        parser.error("--before: a checkout of the earlier version is missing")
    name = subprocess.run(
        ["git", "-C", str(args.before), "log", "-1", "--format=%h of %ad", "--date=short"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    rows: list[dict[str, Any]] = []
    for number in range(args.rounds):
        order = [("now", HERE.parent), ("before", args.before)]
        found = {key: measured_in(folder) for key, folder in (order, order[::-1])[number % 2]}
        (now, ours), (before, theirs) = found["now"], found["before"]
        equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
        rows.append({"now": now, "before": before, "equal": equal})
        print(f"{now / before:.3f}, {equal} of {VIDEOS} with the same bits", flush=True)
    # Not on top, as an earlier version of the package is measured by this file, too.
    from everyframe.hardware import machine_facts, pick_device

    facts = machine_facts("cpu")
    device = pick_device(facts, "cpu")
    publish("exact", page_of(rows, name, facts, device), is_page=args.is_page)


if __name__ == "__main__":
    main()
