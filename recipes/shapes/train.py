"""Train the embedded model from the shell: ``python -m recipes.shapes.train --stage all``.

Every stage can be interrupted at any time (Ctrl-C) and resumes when it is started again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from everyframe.checkpoints.folder import cache_folder
from recipes.shapes import autoencoder, denoiser, polish, shipped, temporal, understand
from recipes.shapes.loop import Task, train

STAGES = ("autoencoder", "temporal", "text", "denoiser", "polish")
#: Hours of training, kept where no checkout or clean-up of the sources takes them away.
WORK = cache_folder() / "recipes" / "shapes"


def build(stage: str, given: argparse.Namespace) -> Task:
    """The task of one stage; later stages read the best weights of earlier ones from the folder."""
    asked = {"num_steps": given.steps, "batch": given.batch, "device": given.device}
    options = {name: value for name, value in asked.items() if value is not None}
    if stage == "autoencoder":
        return autoencoder.task(**options)
    if stage == "text":
        return understand.task(**options)
    made = {"temporal": temporal.task, "denoiser": denoiser.task, "polish": polish.task}
    return made[stage](given.work, **options)


def run(stage: str, given: argparse.Namespace) -> None:
    """Trains one stage."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    task = build(stage, given)
    task.learning_rate = given.learning_rate or task.learning_rate
    task.static = task.static and not given.eager
    if given.compile:
        for part in task.compilable:
            part.compile(dynamic=False)
    train(task, given.work / stage, lambda line: print(line, flush=True), given.minutes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="number of steps instead of the stage's own")
    parser.add_argument("--minutes", type=float, help="end a stage after this long at the latest")
    parser.add_argument("--batch", type=int, help="small clips, frames or captions a step")
    parser.add_argument("--learning-rate", type=float, help="peak, instead of the stage's own")
    parser.add_argument("--compile", action="store_true", help="torch.compile; needs a compiler")
    parser.add_argument(
        "--from-shipped", action="store_true", help="polish: start from the shipped autoencoder"
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    given = parser.parse_args()
    if given.from_shipped:
        shipped.unpack(given.work)
    for stage in STAGES if given.stage == "all" else (given.stage,):
        print(f"stage {stage}", flush=True)
        run(stage, given)


if __name__ == "__main__":
    main()
