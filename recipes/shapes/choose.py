"""Compare sampling settings on the validation prompts: ``python -m recipes.shapes.choose``.

Guidance, number of steps and shift are chosen with these prompts, never with the test prompts.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch

from recipes.shapes import denoiser, latents
from recipes.shapes.evaluate import trials
from recipes.shapes.train import WORK
from recipes.shapes.world import FORMATS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=224, help="number of prompts")
    parser.add_argument("--sides", type=int, nargs="+", default=[form.side for form in FORMATS])
    parser.add_argument("--guidance", type=float, nargs="+", default=[denoiser.GUIDANCE])
    parser.add_argument("--steps", type=int, nargs="+", default=[denoiser.NUM_STEPS])
    parser.add_argument("--shift", type=float, nargs="+", default=[denoiser.SHIFT])
    parser.add_argument("--processes", type=int, default=2, help="that read clips side by side")
    given = parser.parse_args()
    modules = denoiser.trained_in(given.work / "denoiser", given.device).eval()
    vae = latents.trained_vae(given.work, given.device)
    chosen = trials(given.count, validation=True)
    scenes, prompts = [each.scene for each in chosen], [each.prompt for each in chosen]
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        for form, guidance, steps, shift in product(
            FORMATS, given.guidance, given.steps, given.shift
        ):
            if form.side not in given.sides:
                continue
            frames = denoiser.sample(
                modules, vae, scenes, form, seed=61, prompts=prompts,
                guidance=guidance, num_steps=steps, shift=shift,
            )  # fmt: skip
            shares = denoiser.read_back(frames, scenes, pool.map)
            listed = " ".join(f"{name} {share:.3f}" for name, share in shares.items())
            print(
                f"{form}: guidance {guidance}, {steps} steps, shift {shift}: {listed}", flush=True
            )


if __name__ == "__main__":
    main()
