"""Do runs in which nothing is wrong raise no alarm of the guard?

    python benchmarks/clean.py             # 100 runs in each of two precisions; about 8 minutes
    python benchmarks/clean.py --runs 10   # fewer

In float32 the embedded model draws as many prompts, each of another shape, colour, background and
motion. In bfloat16 tiny random models of the families and of pipelines make as many videos, each of
another seed: a processor without bfloat16 of its own emulates it, which takes the embedded model a
minute a run. An alarm is a repair, or a note of a step or of frames of one colour; each is printed.
Half precision on a card is not run here. Runs on a copy of the package.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from copied import on_a_copy
from result_pages import compose_page, make_parser, publish, versions_of

from everyframe.checkpoints.shapes_prompts import BACKGROUNDS, COLOURS, SHAPES
from everyframe.core.events import Event, Note, Repaired, VideoDone
from everyframe.core.request import Request
from everyframe.engine.run import stream
from everyframe.hardware import machine_facts
from everyframe.runs.run_state import SaveOptions

#: The makers of tiny checkpoints lie beside the tests that use them.
TESTS = Path(__file__).parents[1] / "tests"
#: A transformer with guidance by turns, one with it in a batch, a UNet with motion layers.
PIPELINES = ("wan", "ltx", "animatediff")
MOTIONS = ("moves to the right", "moves up", "is still", "grows", "shrinks")


def drawn(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the embedded model is asked for."""
    chance = random.Random(0)
    for seed in range(count):
        background = chance.choice([*BACKGROUNDS])
        colour = chance.choice([each for each in COLOURS if each != background])
        motion, shape = chance.choice(MOTIONS), chance.choice([*SHAPES])
        prompt = f"a {colour} {shape} {motion} on a {background}"
        yield "shapes", {
            "prompt": f"{prompt} background", "seed": seed, "num_inference_steps": 4,
            "dtype": "fp32",
        }  # fmt: skip


def tiny_ones(folder: Path, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What tiny models of each family are asked for."""
    sys.path.insert(0, str(TESTS))
    from helpers.tiny_checkpoints import inpaint as tiny_inpaint
    from helpers.tiny_checkpoints import opensora as tiny_opensora
    from helpers.tiny_checkpoints import pipelines as tiny_pipelines
    from helpers.tiny_checkpoints import stepvideo as tiny_stepvideo
    from helpers.tiny_checkpoints import svd as tiny_svd

    picture = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    asked: dict[str, tuple[Any, dict[str, Any]]] = {
        "opensora": (
            tiny_opensora.opensora_1_2, {"prompt": "a red circle", "size": "32x32", "num_frames": 5}
        ),
        "svd": (tiny_svd.svd, {"image": picture, "size": "32x32", "num_frames": 2}),
        "inpaint": (
            tiny_inpaint.inpaint,
            {"prompt": "a red ball", "image": picture, "mask": "8,8,24,24", "control": "canny"},
        ),
        "stepvideo": (
            tiny_stepvideo.stepvideo, {"prompt": "a red circle", "size": "16x16", "num_frames": 1}
        ),
    }  # fmt: skip
    for name in PIPELINES:
        given = {"prompt": "a red circle", **tiny_pipelines.CALLS[name]}
        asked[f"pipeline: {name}"] = (tiny_pipelines.TINY[name], given)
    for name, (make, _) in asked.items():
        make(folder / name)
    for seed in range(count):
        name = list(asked)[seed % len(asked)]
        yield name, {
            "model": str(folder / name), "seed": seed, "num_inference_steps": 1, "dtype": "bf16",
            "device": "cpu", **asked[name][1],
        }  # fmt: skip


def alarms(events: list[Event]) -> list[str]:
    """Repairs, and notes about a step or about frames."""
    notes = [event.text for event in events if isinstance(event, Note)]
    wrong = [text for text in notes if "step " in text or "one colour" in text]
    return [*(event.text for event in events if isinstance(event, Repaired)), *wrong]


def main() -> None:
    """Run them all and write the page."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=100, help="in each precision")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    args = parser.parse_args()
    commit = on_a_copy()
    began, done, alarmed = time.monotonic(), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        for name, options in (*drawn(args.runs), *tiny_ones(Path(folder), args.runs)):
            if time.monotonic() - began > 60 * args.minutes:
                break
            events = list(stream(Request(**options), keep=SaveOptions(None)))
            assert isinstance(events[-1], VideoDone)
            key, found = (name, options["dtype"]), alarms(events)
            done[key] += 1
            alarmed[key] += bool(found)
            for text in found:
                print(key, options["seed"], text, flush=True)
            if done.total() == 1:
                gc.freeze()  # a quarter of a run's time goes into looking through what is imported
            if done.total() % 10 == 0:
                print(done, flush=True)
    page = report(done, alarmed, commit, time.monotonic() - began)
    publish("clean", page, is_page=args.is_page)
    sys.exit(bool(alarmed.total()))


def report(
    done: Counter[tuple[str, str]], alarmed: Counter[tuple[str, str]], commit: str, seconds: float
) -> str:
    """The result page."""
    lines = [
        f"**{alarmed.total()} of {done.total()}** runs raised an alarm. `shapes` is the embedded "
        "model, with another prompt each; the others are tiny random models.",
        "",
        "| model | precision | runs | with an alarm |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {dtype} | {count} | {alarmed[name, dtype]} |"
        for (name, dtype), count in done.items()
    ]
    facts = machine_facts("cpu")
    machine = (
        f"Hardware: {facts.cpu.name}, {facts.num_cores} cores that did other work too. Versions: "
        f"{versions_of(facts)}. Commit {commit}, {seconds / 60:.0f} minutes."
    )
    return compose_page("Runs in which nothing is wrong", "\n".join(lines), machine)


if __name__ == "__main__":
    main()
