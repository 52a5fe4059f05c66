"""Would a dry run before each call of a pipeline in memory repay?

    python benchmarks/dry_run.py

The dry run tells how many frames a call makes. Folders get one while they are planned; a pipeline
in memory says its length after the call. Compared are processor seconds of the dry run of a call,
its first one and without the cache on disk, and of the whole call, for tiny pipelines. For Wan 2.2
by the configs of a model of 1.3 billion parameters per expert there is the dry run alone, and the
forecast of the call on an H100. Writes a dated page into `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
#: The makers of tiny checkpoints lie beside the tests that use them.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import diffusers
from versions import versions_of

import everyframe
from everyframe.hardware import machine_facts
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

RESULTS = Path(__file__).parent / "results"
TINY = ("wan", "ltx", "cogvideox", "hunyuan")
#: What a model of that size has in place of the tiny one's numbers.
DENOISER = {"num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30,
            "ffn_dim": 8960, "text_dim": 4096, "rope_max_seq_len": 1024}  # fmt: skip
TEXT_ENCODER = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "d_kv": 64}
VAE = {"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}


def seconds(act: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds of this process, and the result."""
    began = time.process_time()
    result = act()
    return time.process_time() - began, result


def planned(model: Path, profile: str | None = None, **asked: Any) -> tuple[float, everyframe.Plan]:
    """Seconds of the dry run alone: a plan less the same plan, which is remembered, again."""

    def plan() -> everyframe.Plan:
        return everyframe.plan("a fox", profile=profile, model=str(model), **asked)

    first, _ = seconds(plan)
    again, found = seconds(plan)
    return first - again, found


def tiny(name: str, folder: Path) -> str:
    """A row about a tiny pipeline."""
    model = folder / name
    tiny_pipelines.TINY[name](model)
    asked: dict[str, Any] = {"num_frames": 9, "size": "32x32", "num_inference_steps": 2,
                             **tiny_pipelines.CALLS.get(name, {})}  # fmt: skip
    everyframe.plan("a fox", model=str(model), **{**asked, "num_inference_steps": 1})  # imports
    dry, _ = planned(model, **{**asked, "size": "64x64"})
    pipe = diffusers.DiffusionPipeline.from_pretrained(model)
    everyframe.run(pipe, "a fox", **asked)
    call, _ = seconds(lambda: everyframe.run(pipe, "a fox", **asked))
    return f"| tiny {name} | {dry:.2f} | {call:.2f} |"


def large(folder: Path) -> tuple[str, everyframe.Plan]:
    """A row about Wan in its real size, and the plan."""
    model = folder / "large"
    tiny_pipelines.TINY["wan"](model)
    configs: dict[str, dict[str, Any]] = {
        "transformer": DENOISER, "transformer_2": DENOISER, "text_encoder": TEXT_ENCODER,
        "vae": VAE,
    }  # fmt: skip
    for part, values in configs.items():
        file = model / part / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    dry, plan = planned(
        model, "cuda-sm90", num_frames=81, size="832x480", num_inference_steps=50,
        option={"max_sequence_length": 512},
    )  # fmt: skip
    call = "unknown" if plan.seconds is None else f"{plan.seconds:.0f} (forecast, 50 steps)"
    return f"| Wan 2.2, 832x480, 81 frames | {dry:.2f} | {call} |", plan


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EVERYFRAME_CACHE"] = str(Path(folder, "cache"))
        rows = [tiny(name, Path(folder)) for name in TINY]
        row, plan = large(Path(folder))
    notes = [f"- {note}" for note in plan.notes if "dry run" in note]
    lines = [
        "# A dry run before a call in memory", "",
        f"{date.today()}, `python benchmarks/dry_run.py`; {versions_of(machine_facts())}.", "",
        "| pipeline | dry run, s | call, s |", "|---|---|---|", *rows, row, "", *notes,
    ]  # fmt: skip
    place = RESULTS / f"dry-run-{date.today()}.md"
    place.write_text("\n".join(lines).rstrip() + "\n")
    print(place.read_text())


if __name__ == "__main__":
    main()
