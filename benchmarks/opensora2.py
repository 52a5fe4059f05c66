"""What does Open-Sora 2.0 take: its blocks' share of the peak, memory of its weights, cards' time?

    python benchmarks/opensora2.py                    # ten minutes, 8 GB of disk, 5 GB of memory
    python benchmarks/opensora2.py --only forecast    # a minute: nothing is measured

Three questions of the released sizes, with random weights:

- blocks: one double and one single block (width 3072, 24 heads, float32) on few tokens, as a share
  of what the best matrix product reaches in the same minute; by turns, in processor time of one
  thread, so that a busy machine slows both.
- load: a synthetic checkpoint of 8 GB in bfloat16, in processes of their own, the peak beside the
  plan's forecast: a whole run with weights in eight bits, and a call of the denoiser whose blocks
  are read from the file one by one, as on a card with little memory.
- forecast: upstream's published table of time and memory, 1 to 8 cards, beside what its program
  should take by our dry runs (`opensora2_upstream.py`), and our plans for the same cards. One
  constant, operations a second: the one with which the median cell comes out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from measuring import hardware, seconds
from opensora2_upstream import upstream_work
from result_pages import compose_page, make_parser, publish
from torch.utils.flop_counter import FlopCounterMode

import everyframe
from everyframe.checkpoints.key_map import KeyMap
from everyframe.core.plan import ComponentPlan, Precision
from everyframe.core.request import Request
from everyframe.dry_run.executor import DryRunModule, dry_run_modules
from everyframe.families.opensora2.checkpoint import DENOISER
from everyframe.families.opensora2.components import DENOISER_ISLANDS
from everyframe.families.opensora2.config import MMDiTConfig
from everyframe.families.opensora2.layers import QKV, DoubleBlock, JointRope, SingleBlock
from everyframe.families.opensora2.mmdit import MMDiT
from everyframe.hardware import machine_facts
from everyframe.hardware.memory import peak_bytes
from everyframe.hardware.profiles import find_profile
from everyframe.ops.text_context import JointTextContext
from everyframe.planning.resolve import prepare
from everyframe.precision.islands import present
from everyframe.runtime.components.meta_init import build_on_meta
from everyframe.runtime.loading import load_component
from everyframe.runtime.memory.offload import resident_bytes

GRID, TEXT = (2, 8, 16), 512
ROUNDS = 3
#: Upstream's README: seconds and peak GiB by number of H100 or H800, 50 steps.
PUBLISHED = {
    "256px": {1: (60, 52.5), 2: (40, 44.3), 4: (34, 44.3)},
    "768px": {1: (1656, 60.3), 2: (863, 48.3), 4: (466, 44.3), 8: (276, 44.3)},
}


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


def sizes(args: argparse.Namespace) -> MMDiTConfig:
    """Blocks of the real width between the tiny checkpoint's latents and texts."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from helpers.tiny_checkpoints.opensora2 import VIDEO

    return replace(
        MMDiTConfig(),
        in_channels=VIDEO.in_channels,
        vec_in_dim=VIDEO.vec_in_dim,
        context_in_dim=VIDEO.context_in_dim,
        depth=args.double,
        depth_single_blocks=args.single,
    )


def write_checkpoint(folder: Path, config: MMDiTConfig) -> None:
    """A tiny Open-Sora 2.0 whose denoiser has blocks of the real width, in bfloat16."""
    from helpers.tiny_checkpoints import opensora2 as tiny

    tiny.opensora2(folder)
    shapes = build_on_meta(lambda: MMDiT(config)).state_dict()
    sizes = [2 * each.numel() for each in shapes.values()]
    ends = [0, *accumulate(sizes)]
    head = json.dumps({
        name: {"dtype": "BF16", "shape": list(each.shape), "data_offsets": [start, stop]}
        for (name, each), (start, stop) in zip(shapes.items(), pairwise(ends), strict=True)
    }).encode()  # fmt: skip
    torch.manual_seed(0)
    drawn = (0.02 * torch.randn(1 << 22)).bfloat16().view(torch.int16).numpy().tobytes()
    with (folder / DENOISER).open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for size in sizes:  # tensor by tensor: the whole would not fit in little memory
            for start in range(0, size, len(drawn)):
                file.write(drawn[: size - start])


def run_in_eight_bits(folder: Path) -> dict[str, float]:
    """A whole run; the plan's peak, and the process's above what it took before."""
    asked: dict[str, Any] = {
        "model": str(folder), "device": "cpu", "size": "64x64", "num_frames": 5, "seed": 1,
        "num_inference_steps": 1, "quantize": "int8", "dtype": "bf16",
    }  # fmt: skip
    planned = max(part.peak_bytes for part in everyframe.plan("waves", **asked).components)
    before = peak_bytes(machine_facts("cpu").cpu) or 0
    everyframe.generate("waves", **asked)
    return {"planned": planned, "peak": (peak_bytes(machine_facts("cpu").cpu) or 0) - before}


def call_streamed(folder: Path, config: MMDiTConfig) -> dict[str, float]:
    """A call of the denoiser whose blocks come from the file; what was planned, and what came."""
    cpu = machine_facts("cpu").cpu
    empty = build_on_meta(lambda: MMDiT(config))
    islands = present(DENOISER_ISLANDS, empty.state_dict())
    precision = Precision("bfloat16", "bfloat16", islands)

    def call(model: MMDiT, device: str) -> object:
        x = torch.zeros(1, config.latent_channels, GRID[0], 2 * GRID[1], 2 * GRID[2], device=device)
        text = torch.zeros(1, TEXT, config.context_in_dim, device=device)
        pooled = torch.zeros(1, config.vec_in_dim, device=device)
        context: JointTextContext = model.context(text, pooled)
        return model(x, torch.full((1,), 0.5, device=device), context)

    parts = {"denoiser": DryRunModule(empty, precision)}
    found = dry_run_modules(parts, lambda device: call(empty, device), cpu)
    working, weights = found.found["denoiser"].working_bytes, resident_bytes(empty, precision)
    plan = ComponentPlan(
        "denoiser", "denoiser", "denoise", DENOISER, 0, "cpu", precision, weights, working,
        block_offload=True, from_disk=True,
    )  # fmt: skip
    before = peak_bytes(cpu) or 0
    with torch.inference_mode():
        call(load_component(plan, lambda: MMDiT(config), folder / DENOISER, KeyMap()), "cpu")
    return {"planned": weights + working, "peak": (peak_bytes(cpu) or 0) - before}


#: Ways to use the checkpoint, each in a process of its own.
WAYS = {"eight bits, a whole run": "int8", "streamed from the file, one call": "streamed"}


def load(args: argparse.Namespace) -> list[str]:
    """Peaks beside the plan."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="everyframe-os2-") as made:
        more = ["--double", str(args.double), "--single", str(args.single)]

        def child(way: str) -> str:
            # In processes of their own: what a parent held counts for its children's peaks.
            words = [sys.executable, __file__, "--way", way, "--folder", made, *more]
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout

        child("write")
        total = (Path(made) / DENOISER).stat().st_size
        for title, way in WAYS.items():
            found = json.loads(child(way).splitlines()[-1])
            planned, peak = found["planned"], found["peak"]
            both = f"{planned / 1e9:.2f} GB | {peak / 1e9:.2f} GB"
            rows.append(f"| {title} | {both} | {peak / planned - 1:+.1%} |")
    return [
        "## Memory of the weights",
        "",
        f"A synthetic checkpoint of {args.double} double and {args.single} single blocks of the "
        f"real width, {total / 1e9:.1f} GB in bfloat16; peak of the process above what it took "
        "before.",
        "",
        "| weights | plan | measured | apart |",
        "| - | - | - | - |",
        *rows,
        "",
    ]


def forecast() -> list[str]:
    """Upstream's program by our dry runs, and our plans, beside the published table."""
    card = find_profile("cuda-sm90").machine().devices[0]
    work, rates = upstream_work(card), card.rates
    assert rates is not None
    products = dict(rates.products)["bfloat16"]
    cells = {(size, n): cell for size, row in PUBLISHED.items() for n, cell in row.items()}

    def times(rate: float) -> dict[tuple[str, int], float]:
        return {key: work.seconds(*key, rate, rates) for key in cells}

    def median_error(rate: float) -> float:
        return statistics.median(took / cells[key][0] - 1 for key, took in times(rate).items())

    low, high = 1e14, 1e15
    while high / low > 1.0001:
        rate = math.sqrt(low * high)
        low, high = (rate, high) if median_error(rate) > 0 else (low, rate)
    lines = []
    for key, took in times(rate).items():
        size, cards = key
        published, published_peak = cells[key]
        peak = work.peak(*key) / 2**30
        ours, our_peak = our_plan(size, cards, rate / products)
        lines.append(
            f"| {size} | {cards} | {published} s | {took:.0f} s | {took / published - 1:+.0%} | "
            f"{published_peak} | {peak:.1f} | {peak / published_peak - 1:+.0%} | {ours:.0f} s | "
            f"{our_peak / 2**30:.1f} |"
        )
    return [
        "## Forecast for cards of 80 GB",
        "",
        "129 frames, 16:9, 50 steps, from text. Upstream's program as it is: three branches a step "
        "(80 of 150 are needed), tensor parallelism at 256px, a ring at 768px, a mask that is "
        "filled row by row, two copies of the denoiser while it loads. The constant, with which "
        f"the median cell comes out: {rate / 1e12:.0f} TFLOP/s; bandwidths and launches are those "
        "of the profile `cuda-sm90`. Its memory is in GiB: 44.3 is twice the denoiser. The last "
        "columns are our plans for the same cards and constant, loading included.",
        "",
        "| | cards | published | forecast | apart | peak GiB | forecast | apart | ours | GiB |",
        "| - | - | - | - | - | - | - | - | - | - |",
        *lines,
        "",
    ]


def our_plan(size: str, cards: int, share: float) -> tuple[float, float]:
    """Seconds and peak bytes of a card, with products at that multiple of the profile's rate."""
    facts = find_profile("cuda-sm90").machine().devices[0]
    assert facts.rates is not None
    products = tuple((dtype, rate * share) for dtype, rate in facts.rates.products)
    rates = replace(facts.rates, products=products)
    devices = [replace(facts, index=index, rates=rates) for index in range(cards)]
    request = Request(
        prompt="waves", model="opensora-2.0", resolution=size, num_frames=129, seed=1,
        num_devices=cards,
    )  # fmt: skip
    plan = prepare(request, profile="cuda-sm90", devices=devices, with_seconds=True).plan
    assert plan.seconds is not None
    return plan.seconds, max(part.peak_bytes for part in plan.components)


#: What is asked, in the order of the page.
QUESTIONS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "load": load,
    "blocks": lambda args: blocks(),
    "forecast": lambda args: forecast(),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--double", type=int, default=6, help="blocks of the checkpoint")
    parser.add_argument("--single", type=int, default=14, help="blocks of the checkpoint")
    parser.add_argument("--only", choices=QUESTIONS, help="one of the questions")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.way == "write":
        write_checkpoint(args.folder, sizes(args))
    elif args.way is not None:
        streamed = args.way == "streamed"
        found = call_streamed(args.folder, sizes(args)) if streamed else None
        print(json.dumps(found or run_in_eight_bits(args.folder)))
    if args.way is not None:
        return
    torch.manual_seed(0)
    names = [args.only] if args.only else [*QUESTIONS]
    with torch.inference_mode():
        lines = [line for name in names for line in QUESTIONS[name](args)]
    facts = machine_facts("cpu")
    page = compose_page("Open-Sora 2.0's parts", hardware(facts, facts.cpu), "\n".join(lines))
    publish("opensora2", page, is_page=args.is_page)


if __name__ == "__main__":
    main()
