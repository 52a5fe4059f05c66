"""How fast is one denoiser call by ours and by its peers: the same weights and inputs, by turns?

    python benchmarks/peers.py                         # three models; some ten minutes
    python benchmarks/peers.py --model wan             # one of them
    python benchmarks/peers.py --device cuda           # the released sizes; five minutes
    python benchmarks/peers.py --only openvino --only diffusers

Candidates: diffusers eager in float32 and bfloat16 and compiled block by block; torchao's dynamic
int8, compiled; cache-dit's compiler settings without a cache; OpenVINO in float32 and bfloat16 and
ONNX Runtime (both on a CPU); ours as written (exact), with the fast paths of `everyframe
fast-paths` (rounding), and with compiled blocks besides. Open-Sora has no diffusers class: there
"diffusers" is our model without any fast path. What is not installed, or fails, is a line with the
reason. Each is prepared once, and its first call is timed from there; then all take turns, round
after round, with the best matrix product before each round. On a CPU one thread's processor time
counts (OMP_NUM_THREADS=1), on a card wall time. `--seconds` skips what no time is left for.
Writes a dated page into `benchmarks/results/` unless told not to.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path

import psutil
import torch
from block_stacks import SIZES, Call, Stack
from measuring import finish, hardware, peak, relative, result_page, where
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import everyframe
from everyframe.core.facts import DeviceFacts
from everyframe.fast_paths.apply import applies_to
from everyframe.fast_paths.compilation import compiled_blocks
from everyframe.fast_paths.registry import for_device
from everyframe.hardware import machine_facts, pick_device
from everyframe.precision.strict_float32 import strict_float32

#: What every ratio is to.
BASE = "diffusers float32"


class SkippedError(Exception):
    """A candidate can't take part; the text says why."""


@dataclass
class Result:
    """Of one candidate: seconds by round, and what its first call took and held."""

    dtype: str
    first: float
    error: float
    bytes: int
    notes: str = ""
    times: list[float] = field(default_factory=list)


def needs(package: str) -> None:
    """Raise `SkippedError` if a package isn't installed."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise SkippedError("not installed") from None


def clock(device: str) -> float:
    """Processor time of this process on one thread, also of threads that a library starts."""
    finish(device)
    if device == "cpu" and torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def compiled_by_torch(model: nn.Module, stack: Stack) -> nn.Module:
    """Each block compiled, as diffusers' `compile_repeated_blocks` does."""
    for name in stack.blocks:
        for block in getattr(model, name):
            block.compile()
    return model


def diffusers(stack: Stack, dtype: str, *, compiled: bool = False) -> Call:
    model = stack.theirs(getattr(torch, dtype))
    if compiled:
        compiled_by_torch(model, stack)
    return partial(stack.call, model, stack.inputs(getattr(torch, dtype)))


def cache_dit(stack: Stack) -> Call:
    needs("cache-dit")
    import cache_dit as library

    library.set_compile_configs()
    return diffusers(stack, "bfloat16", compiled=True)


def torchao(stack: Stack) -> Call:
    needs("torchao")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = stack.theirs(torch.bfloat16)
    for name in stack.blocks:
        quantize_(getattr(model, name), Int8DynamicActivationInt8WeightConfig())
    compiled_by_torch(model, stack)
    return partial(stack.call, model, stack.inputs(torch.bfloat16))


class _Traced(nn.Module):
    """Takes tensors and returns one, for converters."""

    def __init__(self, stack: Stack, model: nn.Module) -> None:
        super().__init__()
        self.model, self.run = model, stack.call

    def forward(self, *given: Tensor) -> Tensor:
        return self.run(self.model, given)


def openvino(stack: Stack, dtype: str) -> Call:
    needs("openvino")
    import openvino as library

    given = stack.inputs(torch.float32)
    wrapped = _Traced(stack, stack.theirs(torch.float32))
    converted = library.convert_model(
        wrapped, example_input=given, input=[tuple(each.shape) for each in given]
    )
    hint = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    own = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    network = library.compile_model(converted, "CPU", own)
    arrays = [each.numpy() for each in given]
    return lambda: torch.from_numpy(network(arrays)[0])


def onnxruntime(stack: Stack) -> Call:
    needs("onnxruntime")
    needs("onnxscript")
    import onnxruntime as library

    given = stack.inputs(torch.float32)
    wrapped = _Traced(stack, stack.theirs(torch.float32)).eval()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.onnx"))
        torch.onnx.export(wrapped, given, path, dynamo=True, external_data=True)
        options = library.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = library.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    arrays = dict(zip(names, (each.numpy() for each in given), strict=True))
    return lambda: torch.from_numpy(session.run(None, arrays)[0])


def paths_of(stack: Stack, device: DeviceFacts) -> tuple[str, ...]:
    """Fast paths that the model has a place for, other than half precision and compiling."""
    kinds = [path for path in for_device(device) if path.group not in ("precision", "compile")]
    first = next((path.name for path in kinds if path.group == "attention"), None)
    others = [path.name for path in kinds if path.group != "attention"]
    probe = stack.ours(torch.float32, ())
    found = [name for name in others if applies_to(name, probe)]
    return tuple(name for name in (first, *found) if name)


def ours(stack: Stack, dtype: str, device: DeviceFacts, *, fast: bool, compiled: bool) -> Call:
    paths = paths_of(stack, device) if fast else ()
    model = stack.ours(getattr(torch, dtype), paths)
    if compiled:
        everyframe.compile(model)
    run = partial(_strictly, stack, model, stack.inputs(getattr(torch, dtype)))
    if compiled:
        run()
        blocks = compiled_blocks(model).values()
        if not any(block.is_compiled for block in blocks):
            notes = sorted({note for block in blocks for note in block.report.notes})
            raise SkippedError("; ".join(notes) or "no block is called")
    return run


def _strictly(stack: Stack, model: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
    with strict_float32():
        return stack.call(model, given)


def candidates(stack: Stack, device: DeviceFacts) -> dict[str, tuple[str, Callable[[], Call]]]:
    """Name -> dtype of its products, and what prepares it."""
    half = "bfloat16"
    found: dict[str, tuple[str, Callable[[], Call]]] = {
        BASE: ("float32", partial(diffusers, stack, "float32")),
        f"diffusers {half}": (half, partial(diffusers, stack, half)),
        f"ours {half}, exact": (
            half, partial(ours, stack, half, device, fast=False, compiled=False)),
        f"ours {half}, fast paths": (
            half, partial(ours, stack, half, device, fast=True, compiled=False)),
        f"ours {half}, fast paths and compiled": (
            half, partial(ours, stack, half, device, fast=True, compiled=True)),
        f"diffusers {half} compiled": (half, partial(diffusers, stack, half, compiled=True)),
        f"cache-dit {half} compiled, no cache": (half, partial(cache_dit, stack)),
        "torchao int8 dynamic compiled": (half, partial(torchao, stack)),
    }  # fmt: skip
    if device.kind != "cpu":
        return found
    single: dict[str, tuple[str, Callable[[], Call]]] = {
        "ours float32, exact": (
            "float32", partial(ours, stack, "float32", device, fast=False, compiled=False)),
        "ours float32, fast paths": (
            "float32", partial(ours, stack, "float32", device, fast=True, compiled=False)),
        "ours float32, fast paths and compiled": (
            "float32", partial(ours, stack, "float32", device, fast=True, compiled=True)),
        "OpenVINO float32": ("float32", partial(openvino, stack, "float32")),
        f"OpenVINO {half}": (half, partial(openvino, stack, half)),
        "ONNX Runtime float32": ("float32", partial(onnxruntime, stack)),
        "diffusers float32 compiled": (
            "float32", partial(diffusers, stack, "float32", compiled=True)),
    }  # fmt: skip
    return {**found, **single}


def held(device: str) -> int:
    """Bytes: of a card's peak since it was reset, or of this process."""
    if device == "cpu":
        return int(psutil.Process().memory_info().rss)
    return int(torch.cuda.max_memory_allocated())


def prepared(
    make: Callable[[], Call], dtype: str, device: str, base: Tensor | None
) -> tuple[Call, Result, Tensor]:
    """Prepare a candidate and call it once; raises whatever goes wrong with it."""
    gc.collect()
    before = held(device)
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = int(torch.cuda.memory_allocated())
    began = time.perf_counter()
    run = make()
    answer = run()
    finish(device)
    first = time.perf_counter() - began
    error = 0.0 if base is None else relative(answer.float().cpu(), base)
    if not error < 0.2:
        raise SkippedError(f"its answer is off by {error:.1e}")
    return run, Result(dtype, first, error, held(device) - before), answer.float().cpu()


def count_flops(stack: Stack, device: str) -> int:
    """Two for each multiply-add of products, attention and convolutions."""
    model, given = stack.theirs(torch.bfloat16), stack.inputs(torch.bfloat16)
    # torch counts a CPU's fused attention as nothing, and a card has no room for the plain one.
    kernels = [SDPBackend.MATH] if device == "cpu" else [SDPBackend.FLASH_ATTENTION]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(kernels):
        stack.call(model, given)
    return int(counter.get_total_flops())


def measure(stack: Stack, device: DeviceFacts, asked: argparse.Namespace, ends: float) -> str:
    """All candidates by turns; the section of the page."""
    there, runs, results = device.torch_name, {}, {}
    skipped: dict[str, str] = {}
    base: Tensor | None = None
    flops = count_flops(stack, there)
    for name, (dtype, make) in candidates(stack, device).items():
        wanted = not asked.only or any(each in name.lower() for each in asked.only)
        if name != BASE and not wanted:
            continue
        if name != BASE and time.monotonic() > ends - asked.reserve:
            skipped[name] = "no time left"
            continue
        try:
            runs[name], results[name], answer = prepared(make, dtype, there, base)
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way, and that is a result
            said = " ".join(str(error).split())[:160] or type(error).__name__
            skipped[name] = said
            torch._dynamo.reset()
            continue
        base = answer if base is None else base
        shown = results[name]
        print(f"{name}: first call {shown.first:.1f} s, error {shown.error:.1e}", flush=True)
    peaks: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    for number in range(asked.rounds):
        if number and time.monotonic() > ends:
            break
        for dtype, found in peaks.items():
            found.append(peak(dtype, there))
        for name, run in runs.items():
            began = clock(there)
            run()
            results[name].times.append(clock(there) - began)
    return page_section(stack, results, peaks, flops, skipped)


def page_section(
    stack: Stack,
    results: Mapping[str, Result],
    peaks: Mapping[str, list[float]],
    flops: int,
    skipped: Mapping[str, str],
) -> str:
    rows = []
    for name, found in results.items():
        pairs = zip(results[BASE].times, found.times, strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        best = zip(found.times, peaks[found.dtype], strict=False)
        share = statistics.median(flops / took / own for took, own in best)
        took = statistics.median(found.times)
        bold = "**" if name.startswith("ours") else ""
        rows.append(
            f"| {name} | {took:.3g} s | {bold}{ratio:.2f}{bold} | {share:.0%} | {found.error:.1e} "
            f"| {found.first:.1f} s | {found.bytes / 1e6:.0f} MB |"
        )
    lines = "\n".join(f"- {name}: {why}" for name, why in skipped.items()) or "- none"
    return f"""## {stack.name}

Products, attention and convolutions of one call: {flops / 1e12:.3g} TFLOP.

| candidate | call | x {BASE} | share of peak | error | prepared and first call | memory |
| --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

Not measured:

{lines}
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", action="append", choices=tuple(SIZES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", action="append", default=[], help="part of candidates' names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="for all; 330 on a card, 3600 on a CPU")
    parser.add_argument("--no-page", action="store_true", help="print only")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    asked = arguments()
    facts = machine_facts(asked.device)
    device = pick_device(facts, asked.device)
    if device.kind == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or facts.num_cores)
    total = asked.seconds or (3600.0 if device.kind == "cpu" else 330.0)
    names = asked.model or list(SIZES)
    sections, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        # Everybody compiles anew.
        os.environ["EVERYFRAME_CACHE"] = str(Path(cache, "everyframe"))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache, "inductor"))
        for number, name in enumerate(names, 1):
            asked.reserve = 0.1 * total / len(names)
            stack = SIZES[name][device.kind](device.torch_name)
            ends = began + total * number / len(names)
            sections.append(measure(stack, device, asked, ends))
            print(sections[-1], flush=True)
            gc.collect()
            torch._dynamo.reset()
    packages = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("openvino", "onnxruntime", "torchao", "cache-dit")
        if not _is_missing(name)
    )
    command = shlex.join(["python", "benchmarks/peers.py", *sys.argv[1:]])
    text = f"""# One denoiser call beside its peers on {where(device)}, {date.today().isoformat()}

The same random weights and inputs, by turns, medians of {asked.rounds} rounds. Error: norm of the
difference to {BASE} over its norm.

{chr(10).join(sections)}
{hardware(facts, device)}
Peers: {packages or "none installed"}.

Command: `{command}`
"""
    if not asked.no_page:
        result_page("peers", device).write_text(text)


def _is_missing(name: str) -> bool:
    try:
        needs(name)
    except SkippedError:
        return True
    return False


if __name__ == "__main__":
    main()
