"""What would a step of several videos at once be worth, and does each video keep its bits?

    python benchmarks/batches.py              # a minute
    python benchmarks/batches.py --no-page    # print only

One forward of STDiT3 for 1, 2, 4 and 8 videos of the same plan, as a server could run requests that
wait: the wall time of a video, by turns, and whether each row has the bits of the video by itself.
A server runs jobs of one plan as one batch only where it has: the same request has the same video,
whoever else asks at that moment.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from datetime import date
from functools import partial

import torch
from denoiser import Sizes, build
from measuring import hardware, publish, relative, seconds, where
from torch import Tensor

from everyframe.core.facts import DeviceFacts
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.hardware import machine_facts, pick_device
from everyframe.precision.strict_float32 import strict_float32

BATCHES = (1, 2, 4, 8)
#: The embedded model's size, and two blocks of Open-Sora's.
SIZES = (
    Sizes(hidden=192, heads=4, depth=6, frames=4, side=8, text=32),
    Sizes(hidden=1152, heads=16, depth=1, frames=4, side=32, text=120),
)


def forward(model: STDiT3, latents: Tensor, text: Tensor) -> Tensor:
    """One denoiser call for as many videos as there are rows."""
    count, pixels = len(latents), latents.shape[-1] * 8
    t = torch.full((count,), 637.5, device=latents.device)
    out: Tensor = model(latents, t, model.context(text), fps=24.0, height=pixels, width=pixels)
    return out


def measure(sizes: Sizes, dtype: str, rounds: int, device: str) -> list[str]:
    """A row of the table for each batch."""
    model = build(sizes, dtype, plain=False, device=device)
    generator = torch.Generator().manual_seed(1)
    side = sizes.side
    latents = torch.randn(max(BATCHES), 4, sizes.frames, side, side, generator=generator).to(device)
    text = torch.randn(max(BATCHES), sizes.text, sizes.hidden, generator=generator).to(device)
    alone = torch.cat(
        [forward(model, latents[i : i + 1], text[i : i + 1]) for i in range(len(latents))]
    )
    taken: dict[int, list[float]] = {count: [] for count in BATCHES}
    for _ in range(rounds):
        for count in BATCHES:
            run = partial(forward, model, latents[:count], text[:count])
            taken[count].append(seconds(run, device) / count)
    rows = []
    for count in BATCHES:
        together = forward(model, latents[:count], text[:count])
        same = sum(torch.equal(a, b) for a, b in zip(together, alone, strict=False))
        worth = statistics.median(
            one / each for one, each in zip(taken[1], taken[count], strict=True)
        )
        error = relative(together, alone[:count])
        bits = f"{same} of {count}"
        rows.append(f"| {sizes.hidden} | {dtype} | {count} | {worth:.2f} | {bits} | {error:.1e} |")
    return rows


def page(rows: list[str], device: DeviceFacts) -> str:
    """The result page."""
    return "\n".join([
        f"# Several videos in one step, {date.today()}, on {where(device)}", "",
        "One forward of STDiT3 for several videos of one plan. Speed is videos a second beside one",
        "video alone; bits are those of each video by itself; the error is the norm of the",
        "difference over the norm.", "",
        "| width | dtype | videos | speed | with the same bits | error |",
        "| --- | --- | --- | --- | --- | --- |", *rows, "",
        *(f"Width {sizes.hidden}: {sizes}." for sizes in SIZES), "",
        hardware(machine_facts(device.kind), device),
        f"Command: `{shlex.join(['python', 'benchmarks/batches.py', *sys.argv[1:]])}`", "",
    ])  # fmt: skip


@torch.inference_mode()
def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-page", action="store_true")
    asked = parser.parse_args()
    device = pick_device(machine_facts(asked.device), asked.device)
    with strict_float32():
        rows = [
            row
            for sizes in SIZES
            for dtype in ("float32", "bfloat16")
            for row in measure(sizes, dtype, asked.rounds, device.torch_name)
        ]
    text = page(rows, device)
    publish(text, "batches", device, is_page=not asked.no_page)


if __name__ == "__main__":
    main()
