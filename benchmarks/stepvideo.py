"""What does Step-Video take: a block's share of the peak, memory of loading, pieces of decoding?

    python benchmarks/stepvideo.py                   # about five minutes, 8 GB of disk and memory
    python benchmarks/stepvideo.py --blocks 2        # a smaller synthetic checkpoint

Three questions of the released sizes, with random weights:

- block: one denoiser block (width 6144, 48 heads, bfloat16 where the processor has it) on few
  tokens, as a share of what the best matrix product reaches in the same minute; by turns, in
  processor time of one thread, so that a busy machine slows both. And how far what it adds to the
  stream is from that when its weights are kept in eight bits.
- load: a synthetic checkpoint of some blocks in upstream's layout of shards is loaded, held in
  memory, held in int8, or left in its files and read block by block during a call; the process's
  peak beside the plan's forecast, in blocks. Each in a process of its own. Its weights are zeros,
  its bytes are read all the same.
- decode: two pieces of the autoencoder one after the other, as a run does, and both at once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from measuring import seconds
from result_pages import compose_page, make_parser, publish, versions_of
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from everyframe.checkpoints.key_map import KeyMap
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import ComponentPlan, Precision
from everyframe.dry_run.executor import DryRunModule, dry_run_modules
from everyframe.families.stepvideo.components import DENOISER_ISLANDS
from everyframe.families.stepvideo.config import StepVideoModelConfig
from everyframe.families.stepvideo.layers import StepVideoBlock
from everyframe.families.stepvideo.model import StepVideoModel
from everyframe.families.stepvideo.vae import StepVAE
from everyframe.families.stepvideo.vae_config import StepVAEConfig
from everyframe.hardware import machine_facts
from everyframe.hardware.memory import peak_bytes
from everyframe.planning.component_precision import ERRORS
from everyframe.precision import cast_hooks
from everyframe.precision.dtypes import torch_dtype
from everyframe.precision.islands import weight_bytes
from everyframe.precision.quantization import QuantizedLinear, layers, quantize, rows, swap
from everyframe.runtime.components.meta_init import build_on_meta
from everyframe.runtime.loading import load_component
from everyframe.runtime.memory.offload import resident_bytes

GRID = (2, 8, 16)  # 256 tokens
TEXT_TOKENS = 397
ROUNDS = 3


def block_precision(cpu: DeviceFacts) -> Precision:
    dtype = "bfloat16" if cpu.has_fast_bf16 else "float32"
    return Precision(dtype, dtype, DENOISER_ISLANDS if dtype == "bfloat16" else ())


def given(
    config: StepVideoModelConfig, device: str = "cpu"
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    x = torch.zeros(1, config.in_channels, *GRID, device=device)
    llm, clip = config.caption_channels
    texts = (
        torch.zeros(1, TEXT_TOKENS - 77, llm, device=device),
        torch.zeros(1, 77, clip, device=device),
    )
    return x, torch.full((1,), 0.5, device=device), texts


def block(cpu: DeviceFacts) -> list[str]:
    """Seconds of one block and of products, by turns."""
    config, precision = StepVideoModelConfig(num_layers=1), block_precision(cpu)
    model = StepVideoModel(config)
    one = model.transformer_blocks[0]
    assert isinstance(one, StepVideoBlock)
    islands = ("scale_shift_table", "norm1", "norm2") if precision.islands else ()
    cast_hooks.add_cast_hooks(one, Precision(precision.parameters, precision.compute, islands))
    one.eval().requires_grad_(False)
    size = config.hidden_size
    tokens = GRID[0] * GRID[1] * GRID[2]
    x, t = torch.randn(1, tokens, size), torch.randn(1, 6, size)
    table = model.rope(GRID, torch.float32, torch.device("cpu"))
    dtype = torch_dtype(precision.compute)
    text = one.attn2.keys_values(torch.randn(1, TEXT_TOKENS, size).to(dtype))

    def run() -> Tensor:
        out: Tensor = one(x, t, text, None, table)
        return out

    with FlopCounterMode(display=False) as counter:
        run()
    operations = counter.get_total_flops()
    side = 2048
    a, b = (torch.randn(side, side).to(dtype) for _ in range(2))
    shares, rates = [], []
    for _ in range(ROUNDS):
        peak = max(2 * side**3 / seconds(lambda: a @ b) for _ in range(3))
        rate = operations / seconds(run)
        shares.append(rate / peak)
        rates.append(rate)
    share, rate = statistics.median(shares), statistics.median(rates)
    narrow = replace(precision, islands=islands)
    errors = ", ".join(
        f"{kind} {rounding_error(one, replace(narrow, weight_dtype=kind), run, x):.2%}"
        for kind in ERRORS
    )
    return [
        "## One block",
        "",
        f"Width {size}, {config.num_attention_heads} heads, {tokens} tokens and {TEXT_TOKENS} of "
        f"text, {precision.parameters}, one thread: {operations / 1e9:.0f} GFLOP in "
        f"{operations / rate:.2f} s of processor time, **{share:.0%} of what a product of {side} x "
        f"{side} reaches** in the same minute (rounds: "
        f"{', '.join(f'{each:.0%}' for each in shares)}).",
        "",
        f"With its weights (normal, of 0.02) in eight bits, what it adds differs by: {errors}.",
        "",
    ]


def rounding_error(
    one: StepVideoBlock, precision: Precision, run: Callable[[], Tensor], x: Tensor
) -> float:
    """Of what the block adds to the stream `x`: norm of the difference over the norm."""
    found = layers(one, precision)
    for linear in found.values():
        nn.init.normal_(linear.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    plain = run() - x
    for name, linear in found.items():
        values, scale = quantize(linear.weight, precision.weight_dtype, torch.device("cpu"))
        layer = QuantizedLinear(
            precision.weight_dtype, values, scale.to(linear.weight.dtype), linear.bias
        )
        swap(one, name, layer)
    error = float((run() - x - plain).norm() / plain.norm())
    for name, linear in found.items():
        swap(one, name, linear)
    return error


def write_checkpoint(folder: Path, config: StepVideoModelConfig) -> None:
    """Shards of a block each, in bfloat16."""
    module = build_on_meta(lambda: StepVideoModel(config))
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in module.state_dict().items():
        parts = name.split(".")
        group = parts[1] if parts[0] == "transformer_blocks" else "rest"
        groups.setdefault(group, {})[name] = tuple(tensor.shape)
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(groups.values(), start=1):
        file = f"diffusion_pytorch_model-{number:05}-of-{len(groups):05}.safetensors"
        tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(shapes, file)
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def load_once(folder: Path, blocks: int, streams: bool, kind: str) -> None:
    """In a process of its own: load, make one call, and print what was planned and what came."""
    config = StepVideoModelConfig(num_layers=blocks)
    cpu = machine_facts("cpu").cpu
    precision = block_precision(cpu)
    if kind:
        precision = replace(precision, islands=DENOISER_ISLANDS, weight_dtype=kind)
    empty = build_on_meta(lambda: StepVideoModel(config))
    scales = rows(empty, precision)
    sizes = {
        name: weight_bytes({name: each.numel()}, precision, rows=scales)
        for name, each in empty.named_parameters()
    }

    def call(model: StepVideoModel, device: str) -> object:
        x, t, (llm, clip) = given(config, device)
        mask = torch.ones(1, TEXT_TOKENS, dtype=torch.bool)
        return model(x, t, model.context(llm, clip, mask))

    parts = {"denoiser": DryRunModule(empty, precision)}
    found = dry_run_modules(parts, lambda device: call(empty, device), cpu)
    working = found.found["denoiser"].working_bytes
    weights = resident_bytes(empty, precision) if streams else sum(sizes.values())
    plan = ComponentPlan(
        "denoiser", "denoiser", "denoise", str(folder), 0, "cpu", precision, sum(sizes.values()),
        working, block_offload=streams, from_disk=streams,
    )  # fmt: skip
    before = peak_bytes(cpu) or 0
    with torch.inference_mode():
        model = load_component(plan, lambda: StepVideoModel(config), folder, KeyMap())
        began = time.perf_counter()
        call(model, "cpu")
    block_bytes = sum(n for name, n in sizes.items() if name.startswith("transformer_blocks.0."))
    print(json.dumps({
        "planned": weights + working, "peak": (peak_bytes(cpu) or 0) - before,
        "block": block_bytes, "seconds": time.perf_counter() - began,
    }))  # fmt: skip


def load(blocks: int) -> list[str]:
    """Peaks of loading, each way."""
    with tempfile.TemporaryDirectory(prefix="everyframe-step-") as made:
        folder = Path(made)
        # In a process of its own: what a parent held counts for its children's peaks.
        subprocess.run(
            [sys.executable, __file__, "--write", made, "--blocks", str(blocks)], check=True
        )
        total = sum(file.stat().st_size for file in folder.iterdir())
        lines = [
            "## Memory of loading",
            "",
            f"A synthetic checkpoint of {blocks} blocks, {total / 1e9:.1f} GB in {blocks + 1} "
            "shards; peak of the process above what it took before, after one call.",
            "",
            "| weights | plan | measured | above the plan, in blocks |",
            "| --- | --- | --- | --- |",
        ]
        ways = {
            "held in memory": [],
            "held in int8": ["--kind", "int8"],
            "left in their files": ["--streams"],
        }
        for title, way in ways.items():
            words = [sys.executable, __file__, "--load-once", made, "--blocks", str(blocks), *way]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            above = (found["peak"] - found["planned"]) / found["block"]
            lines.append(
                f"| {title} | {found['planned'] / 1e9:.2f} GB | {found['peak'] / 1e9:.2f} GB | "
                f"{above:+.2f} |"
            )
    return [*lines, ""]


def decode() -> list[str]:
    """Two pieces one after the other and both in one call."""
    vae = StepVAE(StepVAEConfig()).eval().requires_grad_(False)
    latents = torch.randn(1, 64, 6, 2, 2)
    pieces = vae.config.pieces(34)

    def apart() -> object:
        return [vae.decode_piece(latents, piece) for piece in pieces]

    def together() -> object:
        return vae.decoder(torch.cat(latents.chunk(2, dim=2)))

    facts = machine_facts("cpu").cpu
    wide = Precision("float32", "float32")
    empty = build_on_meta(lambda: StepVAE(StepVAEConfig()))

    def dry(call: Callable[[StepVAE, Tensor], object]) -> int:
        def one(device: str) -> object:
            return call(empty, torch.zeros(1, 64, 6, 2, 2, device=device))

        parts = {"vae": DryRunModule(empty, wide, ("decoder",))}
        return dry_run_modules(parts, one, facts).found["vae"].working_bytes

    piece_bytes = dry(lambda module, z: module.decode_piece(z, pieces[0]))
    whole_bytes = dry(lambda module, z: module.decoder(torch.cat(z.chunk(2, dim=2))))
    by_turns = [(seconds(apart), seconds(together)) for _ in range(2)]
    one, whole = (min(each) for each in zip(*by_turns, strict=True))
    return [
        "## Decoding",
        "",
        "34 frames of 32 x 32 (two pieces) by the released autoencoder, float32, one thread.",
        "",
        "| | processor time | working memory |",
        "| --- | --- | --- |",
        f"| piece by piece | {one:.1f} s | {piece_bytes / 1e6:.0f} MB |",
        f"| both at once | {whole:.1f} s | {whole_bytes / 1e6:.0f} MB |",
        "",
        "Memory is that of the dry run and grows with rows times columns; a piece's does not grow "
        "with the number of frames.",
        "",
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=6, help="of the synthetic checkpoint")
    parser.add_argument("--load-once", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--streams", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kind", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.write is not None:
        write_checkpoint(args.write, StepVideoModelConfig(num_layers=args.blocks))
        return
    if args.load_once is not None:
        load_once(args.load_once, args.blocks, args.streams, args.kind)
        return
    wanted = 1.3e9 * (args.blocks + 1)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < wanted:
        sys.exit(f"needs {wanted / 1e9:.0f} GB in {tempfile.gettempdir()}, {free / 1e9:.0f} free")
    facts = machine_facts("cpu")
    torch.manual_seed(0)
    with torch.inference_mode():
        lines = [*load(args.blocks), *block(facts.cpu), *decode()]
    machine = f"{facts.cpu.name}, {facts.num_cores} cores, one thread; {versions_of(facts)}"
    page = compose_page("Step-Video's parts", machine, "\n".join(lines))
    publish("stepvideo", page, is_page=args.is_page)


if __name__ == "__main__":
    main()
