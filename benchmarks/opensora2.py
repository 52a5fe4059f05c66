"""What does Open-Sora 2.0 take: its blocks' share of the peak, memory of loading, one card's time?

    python benchmarks/opensora2.py                             # about five minutes, 4 GB of memory
    python benchmarks/opensora2.py --double 6 --single 14      # a synthetic checkpoint of 8 GB

Three questions of the released sizes, with random weights:

- blocks: one double and one single block (width 3072, 24 heads, float32) on few tokens, as a share
  of what the best matrix product reaches in the same minute; by turns, in processor time of one
  thread, so that a busy machine slows both.
- load: a synthetic checkpoint of some blocks in bfloat16 is loaded and called once in a process of
  its own; the process's peak beside the plan's forecast.
- forecast: work and memory of the plan for one card of 80 GB, beside upstream's published table.
  One constant, operations a second, is taken from one cell of the table (768px, one card).

Writes a dated page into `benchmarks/results/` unless told not to.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from measuring import hardware, result_page, seconds
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from everyframe.checkpoints.key_map import KeyMap
from everyframe.core.plan import ComponentPlan, Precision
from everyframe.core.request import Request
from everyframe.dry_run.executor import DryRunModule, dry_run_modules
from everyframe.families.opensora2.components import DENOISER_ISLANDS
from everyframe.families.opensora2.config import MMDiTConfig
from everyframe.families.opensora2.layers import QKV, DoubleBlock, JointRope, SingleBlock
from everyframe.families.opensora2.mmdit import MMDiT
from everyframe.hardware import machine_facts
from everyframe.hardware.memory import peak_bytes
from everyframe.ops.text_context import JointTextContext
from everyframe.planning.resolve import prepare
from everyframe.precision.islands import present, weight_bytes
from everyframe.runtime.loading import load_component
from everyframe.runtime.meta_init import build_on_meta

GRID, TEXT = (2, 8, 16), 512
ROUNDS = 3
#: Upstream's README: seconds and peak GB by number of H100 or H800, 50 steps.
PUBLISHED = {
    "256px": {1: (60, 52.5), 2: (40, 44.3), 4: (34, 44.3)},
    "768px": {1: (1656, 60.3), 2: (863, 48.3), 4: (466, 44.3), 8: (276, 44.3)},
}
#: Branches that upstream computes in 50 steps, and that ours does, of text alone.
UPSTREAM_BRANCHES, OUR_BRANCHES = 150, 80


def blocks() -> list[str]:
    """Share of the peak of one block of each kind."""
    config = MMDiTConfig()
    tokens = GRID[0] * GRID[1] * GRID[2]
    table = JointRope(config)(TEXT, GRID, torch.float32, torch.device("cpu"))
    vector = torch.randn(1, config.hidden_size)
    text, img = (torch.randn(1, n, config.hidden_size) for n in (TEXT, tokens))
    joint = torch.cat([text, img], 1)
    double, single = DoubleBlock(config).eval(), SingleBlock(config).eval()
    calls: dict[str, Callable[[], object]] = {
        "double": lambda: double(text, img, vector, table),
        "single": lambda: single(joint, vector, table),
    }
    lines = ["| block | work | processor time | share of the peak (rounds) |", "| - | - | - | - |"]
    for name, call in calls.items():
        with FlopCounterMode(display=False) as counter:
            call()
        work = counter.get_total_flops() + _attention_work(config, tokens + TEXT)
        shares, took = [], []
        for _ in range(ROUNDS):
            before = _peak()
            took.append(seconds(call))
            shares.append(work / took[-1] / max(before, _peak()))
        rounds = ", ".join(f"{each:.0%}" for each in shares)
        lines.append(
            f"| {name} | {work / 1e9:.0f} GFLOP | {statistics.median(took):.2f} s | "
            f"**{statistics.median(shares):.0%}** ({rounds}) |"
        )
    return [
        "## One block of each kind",
        "",
        f"Width {config.hidden_size}, {config.num_heads} heads, {tokens} tokens of the picture and "
        f"{TEXT} of text, float32, one thread; the peak is the best of products of 2048 x 2048 "
        "in the same minute.",
        "",
        *lines,
        "",
    ]


def _peak() -> float:
    """Operations a second of the best of three products of 2048 x 2048."""
    a, b = (torch.randn(2048, 2048) for _ in range(2))
    return max(2 * 2048**3 / seconds(lambda: a @ b) for _ in range(3))


def _attention_work(config: MMDiTConfig, tokens: int) -> int:
    """Operations of one attention; torch counts none of its fused kernel for CPUs."""
    q = torch.zeros(1, 1, 1, config.head_size)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(*QKV(q, q, q))
    return 0 if counter.get_total_flops() else 4 * tokens * tokens * config.hidden_size


def sizes(told: argparse.Namespace) -> MMDiTConfig:
    return replace(MMDiTConfig(), depth=told.double, depth_single_blocks=told.single)


def write_checkpoint(path: Path, config: MMDiTConfig) -> None:
    """One file in bfloat16, of zeros; its bytes are read all the same."""
    shapes = build_on_meta(lambda: MMDiT(config)).state_dict()
    zeros = {name: torch.zeros(each.shape, dtype=torch.bfloat16) for name, each in shapes.items()}
    save_file(zeros, path)


def load_once(path: Path, config: MMDiTConfig) -> None:
    """In a process of its own: load, make one call, and print what was planned and what came."""
    cpu = machine_facts("cpu").cpu
    empty = build_on_meta(lambda: MMDiT(config))
    islands = present(DENOISER_ISLANDS, empty.state_dict())
    precision = Precision("bfloat16", "bfloat16", islands)
    count = {name: each.numel() for name, each in empty.named_parameters()}
    weights = weight_bytes(count, precision)

    def call(model: MMDiT, device: str) -> object:
        x = torch.zeros(1, config.latent_channels, GRID[0], 2 * GRID[1], 2 * GRID[2], device=device)
        text = torch.zeros(1, TEXT, config.context_in_dim, device=device)
        context: JointTextContext = model.context(text, text[:, 0, : config.vec_in_dim])
        return model(x, torch.full((1,), 0.5, device=device), context)

    parts = {"denoiser": DryRunModule(empty, precision)}
    found = dry_run_modules(parts, lambda device: call(empty, device), cpu)
    working = found.found["denoiser"].working_bytes
    plan = ComponentPlan(
        "denoiser", "denoiser", "denoise", str(path), 0, "cpu", precision, weights, working
    )
    before = peak_bytes(cpu) or 0
    with torch.inference_mode():
        call(load_component(plan, lambda: MMDiT(config), path, KeyMap()), "cpu")
    print(json.dumps({"planned": weights + working, "peak": (peak_bytes(cpu) or 0) - before}))


def load(told: argparse.Namespace) -> list[str]:
    """Peak of loading beside the plan."""
    with tempfile.TemporaryDirectory(prefix="everyframe-os2-") as made:
        path = Path(made) / "Open_Sora_v2.safetensors"
        more = ["--double", str(told.double), "--single", str(told.single)]
        # In processes of their own: what a parent held counts for its children's peaks.
        for way in ("--write", "--load-once"):
            words = [sys.executable, __file__, way, str(path), *more]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
        found, total = json.loads(done.stdout.splitlines()[-1]), path.stat().st_size
    return [
        "## Memory of loading",
        "",
        f"A synthetic checkpoint of {told.double} double and {told.single} single blocks, "
        f"{total / 1e9:.1f} GB, loaded in bfloat16 and called once; peak of the process above what "
        "it took before.",
        "",
        f"Plan {found['planned'] / 1e9:.2f} GB, measured {found['peak'] / 1e9:.2f} GB "
        f"({found['peak'] / found['planned'] - 1:+.1%}).",
        "",
    ]


def forecast() -> list[str]:
    """Work and memory of the plan beside the published table."""
    work: dict[str, tuple[float, float]] = {}
    for size in PUBLISHED:
        request = Request(
            prompt="waves", model="opensora-2.0", resolution=size, num_frames=129, seed=1
        )
        plan = prepare(request, profile="cuda-sm90").plan
        stages = {stage.name: stage for stage in plan.stages}
        most = max(
            stage.working_bytes + plan.component(stage.component).on_device_bytes
            for stage in plan.stages
        )
        work[size] = (stages["denoise"].operations, most)
    rate = work["768px"][0] * UPSTREAM_BRANCHES / OUR_BRANCHES / PUBLISHED["768px"][1][0]
    lines = ["| | cards | published | by the constant | apart | ours, by the constant |",
             "| - | - | - | - | - | - |"]  # fmt: skip
    for size, cells in PUBLISHED.items():
        for cards, (took, _) in cells.items():
            ours = work[size][0] / rate / cards
            theirs = ours * UPSTREAM_BRANCHES / OUR_BRANCHES
            lines.append(
                f"| {size} | {cards} | {took} s | {theirs:.0f} s | {theirs / took - 1:+.0%} | "
                f"{ours:.0f} s |"
            )
    memory = [
        f"| {size} | {cells[1][1]} GB | {work[size][1] / 1e9:.1f} GB |"
        for size, cells in PUBLISHED.items()
    ]
    return [
        "## Forecast for cards of 80 GB",
        "",
        "129 frames, 16:9, 50 steps, from text. Upstream computes 150 branches of the denoiser, of "
        "which 80 are needed. The constant is what makes 768px on one card come out: "
        f"{rate / 1e12:.0f} TFLOP/s of the denoiser's operations as the plan counts them. Text "
        "encoders and decoding are left out, and so is what cards send each other.",
        "",
        *lines,
        "",
        "Peak memory of one card:",
        "",
        "| | published | the plan, stage by stage |",
        "| - | - | - |",
        *memory,
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--double", type=int, default=3, help="blocks of the checkpoint")
    parser.add_argument("--single", type=int, default=7, help="blocks of the checkpoint")
    parser.add_argument("--no-page", action="store_true", help="print, and write no page")
    parser.add_argument("--load-once", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    told = parser.parse_args()
    torch.set_num_threads(1)
    if told.write is not None:
        write_checkpoint(told.write, sizes(told))
        return
    if told.load_once is not None:
        load_once(told.load_once, sizes(told))
        return
    torch.manual_seed(0)
    with torch.inference_mode():
        lines = [*load(told), *blocks(), *forecast()]
    facts = machine_facts("cpu")
    head = [
        f"# Open-Sora 2.0's parts, {date.today()}",
        "",
        hardware(facts, facts.cpu),
        "",
        f"`python benchmarks/opensora2.py {shlex.join(sys.argv[1:])}`".replace(" `", "`"),
        "",
    ]
    page = "\n".join([*head, *lines])
    print(page)
    if not told.no_page:
        result_page("opensora2", facts.cpu).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
