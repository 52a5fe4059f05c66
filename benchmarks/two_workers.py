"""How much faster are two workers of one thread than one? Part of ``parallel.py --two``.

An Open-Sora 1.2 of random weights, large enough that products of matrices are most of its time,
makes the same video with one worker and with two that share it in each way there is. By turns, with
as many runs of one worker side by side: two that have nothing to do with each other show what this
machine's second core is worth at all, which on a shared machine is less than 2. What is compared
are the seconds of all denoising steps, without imports, loading and decoding.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from result_pages import compose_page, versions_of

from everyframe.hardware import machine_facts
from helpers.tiny_checkpoints import opensora as tiny_opensora

SIZES: dict[str, Any] = {"hidden_size": 288, "depth": 4, "num_heads": 8}
RUN = ["a red circle moves to the right", "--size", "256x256", "--num-frames", "51", "--seed", "7",
       "--num-inference-steps", "3", "--device", "cpu", "--dtype", "fp32", "--json"]  # fmt: skip
#: How two workers share a video.
WAYS = ("cfg=2", "sequence=2")
APART = "two videos, a worker each"


def page(turns: int) -> str:
    """The result page of so many turns."""
    with tempfile.TemporaryDirectory() as folder:
        found = measure(tiny_opensora.opensora_1_2(Path(folder, "model"), **SIZES), turns)
    facts = machine_facts("cpu")
    lines = [
        "Seconds of the denoising steps of "
        f"51 frames of 256x256 by an Open-Sora 1.2 of width {SIZES['hidden_size']} and "
        f"{SIZES['depth']} pairs of blocks, medians and the least of {turns} turns (other work "
        "only adds). The last row is what the second core here is worth where nothing is shared.",
        "",
        f"Hardware: {facts.cpu.name}, {facts.num_cores} cores; load at the end "
        f"{os.getloadavg()[0]:.1f}. Versions: {versions_of(facts)}.",
        "",
        "| | seconds | times as fast | at the least | times as fast |",
        "|---|---:|---:|---:|---:|",
    ]
    names = {"one": "one worker", **{way: f"two, `{way}`" for way in WAYS}, APART: APART}
    for name, shown in names.items():
        videos = 2 if name == APART else 1
        cells = [
            cell
            for of in (statistics.median, min)
            for cell in (of(found[name]), videos * of(found["one"]) / of(found[name]))
        ]
        lines.append(f"| {shown} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return compose_page("Two workers of one thread", "\n".join(lines))


def measure(model: Path, turns: int) -> dict[str, list[float]]:
    """Seconds of one worker, of two in each way, and of two apart, turn by turn."""
    found: dict[str, list[float]] = {name: [] for name in ("one", *WAYS, APART)}
    for _ in range(turns):
        found["one"].append(seconds_of_steps(model))
        for way in WAYS:
            found[way].append(seconds_of_steps(model, "--num-devices", "2", "--parallel", way))
        with ThreadPoolExecutor(2) as both:
            found[APART].append(max(both.map(seconds_of_steps, [model, model])))
        print({name: round(seconds[-1], 2) for name, seconds in found.items()}, flush=True)
    return found


def seconds_of_steps(model: Path, *options: str) -> float:
    """Seconds of all denoising steps of one run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["generate", *RUN, "--model", str(model), "-o", f"{folder}/clip.mp4", *options]
        done = subprocess.run(
            [sys.executable, "-m", "everyframe", *words],
            env={**os.environ, "OMP_NUM_THREADS": "1", "EVERYFRAME_RUNS": "off"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    events = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [e for e in events if e["type"] == "step" and e["stage"] == "denoise"]
    return float(sum(step["seconds"] for step in steps))
