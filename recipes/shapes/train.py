"""Trains the embedded model from the shell: ``python -m recipes.shapes.train --stage all``.

Every stage can be stopped at any time (Ctrl-C) and goes on where it stopped when started again.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from everyframe.checkpoints.places import cache_folder
from recipes.shapes import shipped
from recipes.shapes.loop import Task, train

STAGES = ("autoencoder", "temporal", "text", "denoiser", "polish")
REPAIRS = (
    "apart",
    "direction",
    "repair",
    "agree",
    "settle",
)  # of a denoiser that gets motions wrong
ALONE = (
    "autoencoder",
    "temporal",
    "text",
    "apart",
    "agree",
)  # not trained by several processes together
#: Hours of training, kept where no checkout or clean-up of the sources takes them away.
WORK = cache_folder() / "recipes" / "shapes"


def build(stage: str, given: argparse.Namespace) -> Task:
    """The task of one stage; later stages read the best weights of earlier ones from the folder."""
    work, asked = given.work, {"num_steps": given.steps, "batch": given.batch}
    steps = {name: number for name, number in asked.items() if number is not None}
    if stage == "autoencoder":
        from recipes.shapes import autoencoder

        return autoencoder.task(**steps)
    if stage == "temporal":
        from recipes.shapes import temporal

        return temporal.task(work, **steps)
    if stage == "text":
        from recipes.shapes import understand

        return understand.task(**steps)
    if stage == "apart":
        from recipes.shapes import apart

        return apart.task(work, **steps)
    if stage == "agree":
        from recipes.shapes import agree

        return agree.task(work, **steps)
    if stage == "denoiser":
        from recipes.shapes import denoiser

        return denoiser.task(work, **steps)
    if stage in REPAIRS:
        from recipes.shapes import repair

        tasks = {
            "direction": repair.direction_task,
            "repair": repair.repair_task,
            "settle": repair.settle_task,
        }
        return tasks[stage](work, **steps)
    from recipes.shapes import polish

    return polish.task(work, **steps)


def run(rank: int, stage: str, given: argparse.Namespace) -> None:
    """Trains one stage, as one of several processes where there are."""
    if given.processes > 1:
        # One core each: threads that share a layer wait for each other most of the time.
        dist.init_process_group(
            "gloo", init_method=f"file://{given.meeting}", rank=rank, world_size=given.processes
        )
        if hasattr(os, "sched_setaffinity"):  # Linux
            os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1 if given.processes > 1 else given.threads)
    torch.manual_seed(0)
    task = build(stage, given)
    task.learning_rate = given.learning_rate or task.learning_rate
    if given.compile:
        for part in task.compilable:
            part.compile()
    train(task, given.work / stage, say=lambda line: print(line, flush=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", choices=(*STAGES, *REPAIRS, "all"), default="all")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the runs")
    parser.add_argument("--steps", type=int, help="number of steps instead of the stage's own")
    parser.add_argument("--batch", type=int, help="clips, frames or captions a step")
    parser.add_argument("--learning-rate", type=float, help="peak, instead of the stage's own")
    parser.add_argument("--threads", type=int, default=2, help="of a process that trains alone")
    parser.add_argument("--processes", type=int, default=1, help="a core each (later stages)")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile; needs a C++ compiler"
    )
    parser.add_argument(
        "--from-shipped", action="store_true", help="go on from the weights in the package"
    )
    given = parser.parse_args()
    if given.from_shipped:
        shipped.unpack(given.work)
    for stage in STAGES if given.stage == "all" else (given.stage,):
        print(f"stage {stage}", flush=True)
        if stage not in ALONE and given.processes > 1:
            with tempfile.TemporaryDirectory() as folder:
                given.meeting = Path(folder) / "meeting"
                mp.spawn(run, (stage, given), nprocs=given.processes)
        else:
            run(0, stage, argparse.Namespace(**{**vars(given), "processes": 1}))


if __name__ == "__main__":
    main()
