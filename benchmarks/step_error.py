"""How far do lossy methods go from the exact run, in steps of tiny SVD and Wan with random weights?

    python benchmarks/step_error.py             # both models; ten minutes
    python benchmarks/step_error.py --seeds 5 --no-page

Builds the tests' tiny checkpoints, and makes each video by exact steps and by every method at
several numbers of computed steps. The error is that of the final latents, the norm of the
difference over the norm. Random weights draw nothing, so this is no quality of pictures, and no
budget is read from it (`quality.py` measures decibels of a trained model): it shows whether an
error falls with the steps computed, how much a call costs, and what products in eight bits add.
They are measured where torchao is installed, also where their trial finds them no faster.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from measuring import hardware, relative
from result_pages import compose_page, make_parser, publish, where
from torch import Tensor, nn

from everyframe import stream
from everyframe.core.events import Step
from everyframe.core.quality import EXACT, SHALLOW_SHARE, parse_method
from everyframe.core.request import Request
from everyframe.hardware import machine_facts, pick_device
from everyframe.planning.resolve import prepare
from everyframe.runtime.components.component_observers import on_component_loaded
from everyframe.runtime.interface import LossySpec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

STEPS, COMPUTED = 24, (16, 12, 8, 6)

#: By model, what its autoencoder gives the final latents to.
LATENTS_ENTER = {"svd": "decoder", "wan": "post_quant_conv"}

#: Further forms of a method, and the numbers of computed steps with products in eight bits.
PLACED = {"abm2": ("e130",)}
WITH_PRODUCTS = (12, 6)
KIND = "int8-dynamic"


class Made(NamedTuple):
    """The final latents of a video, and the processor time of its steps."""

    latents: Tensor
    seconds: float


class Row(NamedTuple):
    """A method: calls of the denoiser, its speed and errors, one a seed."""

    method: str
    calls: float
    gains: list[float]
    errors: list[float]


def made(name: str, request: Request) -> Made:
    """Run the request, and take the latents as the autoencoder gets them."""
    pieces: list[Tensor] = []

    def look(component: str, module: nn.Module) -> None:
        if component == "vae":
            place = module.get_submodule(LATENTS_ENTER[name])
            place.register_forward_pre_hook(lambda _, given: pieces.append(given[0].clone()))

    seconds, before = 0.0, time.process_time()
    with on_component_loaded(look):
        for event in stream(request):
            now = time.process_time()
            if isinstance(event, Step) and event.stage in ("denoise", "pipeline"):
                seconds += now - before
            before = now
    return Made(torch.cat(pieces), seconds)


def methods_of(request: Request) -> Iterator[str]:
    """What the model can do, at each number of computed steps; then products in eight bits."""
    prepared = prepare(request)
    assert isinstance(prepared.model, LossySpec)
    names = prepared.model.sampling_methods(prepared.plan.settings)
    for name in names:
        for form in ("", *PLACED.get(name, ())):
            yield from (f"{name}@{count}{form}" for count in COMPUTED)
    if importlib.util.find_spec("torchao") is not None:
        yield f"{EXACT}+{KIND}"
        best = ("abm2", "deepcache", "taylor1")
        for name in (each for each in best if each in names):
            yield from (f"{name}@{count}+{KIND}" for count in WITH_PRODUCTS)


def rows_of(name: str, folder: Path, seeds: int) -> list[Row]:
    """Every method beside the exact run, seed by seed."""
    from helpers.tiny_checkpoints import families

    asked = families.asked(name, model=str(families.made(name, folder)))
    # What is refused only as no faster is measured, too.
    request = Request(**{**asked, "num_inference_steps": STEPS, "dtype": "fp32", "force": True})
    rows = [Row(each, _calls(each), [], []) for each in methods_of(request)]
    made(name, request)  # whatever is tried or loaded once
    for seed in range(seeds):
        one = {**request.given(), "seed": seed}
        exact = made(name, Request(**one))
        for row in rows:
            lossy = made(name, Request(**one, quality=row.method))
            row.gains.append(exact.seconds / lossy.seconds)
            row.errors.append(relative(lossy.latents, exact.latents))
            print(f"{name} {row.method}: {row.errors[-1]:.1e}", flush=True)
    return rows


def _calls(method: str) -> float:
    sampling = parse_method(method).sampling
    return STEPS if sampling is None else sampling.num_calls(STEPS)


def table(name: str, rows: list[Row]) -> list[str]:
    """The rows of a model."""
    return [
        "",
        f"## Tiny {name}",
        "",
        "| method | calls | denoises | error, median | largest |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(
            f"| `{row.method}` | {row.calls:.4g} | {statistics.median(row.gains):.2f}x | "
            f"{statistics.median(row.errors):.1e} | {max(row.errors):.1e} |"
            for row in rows
        ),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="videos by each method")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tables = [line for name in LATENTS_ENTER
                  for line in table(name, rows_of(name, Path(folder), args.seeds))]  # fmt: skip
    facts = machine_facts("cpu")
    device = pick_device(facts, "cpu")
    lines = "\n".join(tables)
    text = f"""
Tiny Stable Video Diffusion and Wan 2.2 **with random weights, which say nothing about pictures**:
there are no decibels here, and no budget follows. The error is that of the final latents against
the exact run of {STEPS} steps, the norm of the difference over the norm; {args.seeds} seeds.
`calls` are those of the denoiser; a shallow one of DeepCache counts {SHALLOW_SHARE:g}.
`denoises` is the time of the exact steps over that of the method's, in the median: of denoisers so
small that what surrounds a call takes as long, and Wan's first step has its texts besides.
torchao's products in eight bits are measured whether or not their trial finds them faster here.
{lines}
"""
    title = f"Step error of lossy methods on {where(device)}"
    page = compose_page(title, text, hardware(facts, device))
    publish("step-error", page, is_page=args.is_page, device=device)


if __name__ == "__main__":
    main()
