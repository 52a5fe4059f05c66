"""Did the exact path keep its bits and its speed since an earlier version?

    git worktree add --detach /tmp/before d56be785^     # before the first kernel of our own
    python benchmarks/exact.py --before /tmp/before     # ten minutes
    python benchmarks/exact.py --before /tmp/before --no-page

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
import shlex
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

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
    said = subprocess.run(
        [sys.executable, __file__, "--measure"], env=environment, check=True,
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    rows = json.loads(said.splitlines()[-1])
    return min(seconds for seconds, _ in rows), [digest for _, digest in rows]


def page_of(rows: list[dict[str, Any]], before: str, facts: Any, device: Any) -> str:
    """The result page."""
    from measuring import hardware

    ratios = sorted(row["now"] / row["before"] for row in rows)
    quarters = statistics.quantiles(ratios, n=4)
    return "\n".join([
        f"# The exact path beside an earlier version, {date.today()}", "",
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
        f"{1000 * statistics.median(row['now'] for row in rows):.1f} |", "",
        hardware(facts, device), "",
        f"Command: `{shlex.join(['python', 'benchmarks/exact.py', *sys.argv[1:]])}`", "",
    ])  # fmt: skip


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout of the earlier version")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-page", action="store_true")
    given = parser.parse_args()
    if given.measure:
        measure()
        return
    if given.before is None:
        parser.error("--before: a checkout of the earlier version is missing")
    name = subprocess.run(
        ["git", "-C", str(given.before), "log", "-1", "--format=%h of %ad", "--date=short"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    rows: list[dict[str, Any]] = []
    for number in range(given.rounds):
        order = [("now", HERE.parent), ("before", given.before)]
        found = {key: measured_in(folder) for key, folder in (order, order[::-1])[number % 2]}
        (now, ours), (before, theirs) = found["now"], found["before"]
        equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
        rows.append({"now": now, "before": before, "equal": equal})
        print(f"{now / before:.3f}, {equal} of {VIDEOS} with the same bits", flush=True)
    # Not on top, as an earlier version of the package is measured by this file, too.
    from measuring import publish

    from everyframe.hardware import machine_facts, pick_device

    facts = machine_facts("cpu")
    device = pick_device(facts, "cpu")
    publish(page_of(rows, name, facts, device), "exact", device, is_page=not given.no_page)


if __name__ == "__main__":
    main()
