"""Trains the embedded model from the shell: ``python -m recipes.shapes.train --stage all``.

Every stage can be stopped at any time (Ctrl-C) and goes on where it stopped when started again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from everyframe.checkpoints.places import cache_folder
from recipes.shapes.loop import Task, train

STAGES = ("autoencoder", "temporal", "text", "denoiser", "polish")
#: Hours of training, kept where no checkout or clean-up of the sources takes them away.
WORK = cache_folder() / "recipes" / "shapes"


def build(stage: str, work: Path, num_steps: int | None) -> Task:
    """The task of one stage; later stages read the best weights of earlier ones from `work`."""
    steps = {} if num_steps is None else {"num_steps": num_steps}
    if stage == "autoencoder":
        from recipes.shapes import autoencoder

        return autoencoder.task(**steps)
    if stage == "temporal":
        from recipes.shapes import temporal

        return temporal.task(work, **steps)
    if stage == "text":
        from recipes.shapes import understand

        return understand.task(**steps)
    if stage == "denoiser":
        from recipes.shapes import denoiser

        return denoiser.task(work, **steps)
    from recipes.shapes import polish

    return polish.task(work, **steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the runs")
    parser.add_argument("--steps", type=int, help="number of steps instead of the stage's own")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for stage in STAGES if given.stage == "all" else (given.stage,):
        torch.manual_seed(0)
        print(f"stage {stage}", flush=True)
        train(
            build(stage, given.work, given.steps),
            given.work / stage,
            say=lambda line: print(line, flush=True),
        )


if __name__ == "__main__":
    main()
