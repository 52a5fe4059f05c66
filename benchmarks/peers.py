"""How fast is one denoiser call by ours and by its peers: the same weights and inputs, by turns?

    python benchmarks/peers.py                         # three models; some ten minutes
    python benchmarks/peers.py --model wan             # one of them
    python benchmarks/peers.py --device cuda           # the released sizes; five minutes
    python benchmarks/peers.py --only openvino --only diffusers

Candidates: diffusers eager in float32 and bfloat16 and compiled block by block; torchao's dynamic
int8, compiled; cache-dit's compiler settings without a cache; on a CPU OpenVINO in float32 and
bfloat16, ONNX Runtime, and stable-diffusion.cpp's Wan where it was built (`sdcpp.py`); ours as
written (exact), with the fast paths that their trials certify here first (rounding), and with
compiled blocks besides. Open-Sora has no diffusers class: there "diffusers" is our model without
any fast path. On a CPU processes of ours allocate in large pages and keep what they free, as our
workers do while they denoise; diffusers is measured so too. What is not installed, or fails, is a
line with the reason. Each has a process of its own, in which it is prepared once, and its first
call is timed from there; then all take turns, round after round, with the best matrix product
before each round. On a CPU one thread's processor time counts (OMP_NUM_THREADS=1), on a card wall
time. `--limit` ends the process of one that takes longer to prepare, and `--seconds` skips what no
time is left for; what is slow to prepare comes last. The page is written after each model.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from block_stacks import SIZES, Call, Stack, dry_run_call, precision_of
from certified_paths import certified_paths, list_paths
from measuring import finish, hardware, peak, relative
from peer_candidates import BASE, FAST, Entry, SkippedError, candidates, needs
from result_pages import compose_page, make_parser, page_path, where
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.hardware import machine_facts, pick_device
from everyframe.hardware.isolation import safe_start
from everyframe.hardware.memory import keep_freed_memory

#: Seconds for trials of fast paths in one dtype; a card's time is short.
TRIALS = {"cpu": 120.0, "cuda": 20.0}


@dataclass
class Result:
    """Of one candidate: seconds by round, and what its first call took and held."""

    dtype: str
    first: float
    error: float
    bytes: int
    notes: str = ""
    times: list[float] = field(default_factory=list)


def clock(device: str) -> float:
    """Processor time of this process on one thread, also of threads that a library starts."""
    finish(device)
    if device == "cpu" and torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def held(device: str) -> int:
    """Bytes: of a card's peak since it was reset, or of this process."""
    if device == "cpu":
        return int(psutil.Process().memory_info().rss)
    return int(torch.cuda.max_memory_allocated())


@dataclass(frozen=True)
class Ready:
    """What a candidate's process says when it is prepared: first call, bytes and its answer."""

    first: float
    bytes: int
    answer: np.ndarray[Any, Any]


def prepared(make: Callable[[], Call], device: str) -> tuple[Call, Ready]:
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
    return run, Ready(first, held(device) - before, answer.float().cpu().numpy())


@torch.inference_mode()
def serve(
    pipe: Connection,
    model: str,
    name: str,
    device: DeviceFacts,
    threads: int,
    paths: Mapping[str, tuple[str, ...]],
) -> None:
    """A candidate's process: prepare it, then time a call whenever args."""
    there = device.torch_name
    if there == "cpu":
        torch.set_num_threads(threads)
    stack = SIZES[model][device.kind](there)
    entry = candidates(stack, device.kind, paths)[name]
    if entry.allocates_as_ours and there == "cpu":
        keep_freed_memory(True)
    try:
        run, ready = prepared(entry.make, there)
    except Exception as error:  # noqa: BLE001 - a peer may fail in any way, and that is a result
        pipe.send(" ".join(str(error).split())[:160] or type(error).__name__)
        return
    pipe.send(ready)
    while pipe.recv():
        began = clock(there)
        run()
        pipe.send(clock(there) - began)


class Candidate:
    """A candidate in a process of its own, which ends with this object."""

    def __init__(
        self,
        model: str,
        name: str,
        device: DeviceFacts,
        paths: Mapping[str, tuple[str, ...]],
        *,
        allocates_as_ours: bool,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        given = (theirs, model, name, device, torch.get_num_threads(), paths)
        self._process = context.Process(target=serve, args=given, daemon=False)
        with safe_start() if allocates_as_ours else contextlib.nullcontext():
            self._process.start()
        theirs.close()

    def answer(self, seconds: float) -> Any:
        """What the process says next. Raises `SkippedError` if it says nothing or failed."""
        if not self._pipe.poll(max(seconds, 0.0)):
            raise SkippedError(f"not ready within {seconds:.0f} s")
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join(10)
            raise SkippedError(f"its process ended with {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise SkippedError(answer)
        return answer

    def timed(self) -> float:
        """Seconds of one call."""
        self._pipe.send(True)
        return float(self.answer(600.0))

    def close(self) -> None:
        """End the process and what it started."""
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._process.kill()
        self._process.join()


def count_flops(stack: Stack, device: str) -> int:
    """Two for each multiply-add of products, attention and convolutions."""
    model, given = stack.theirs(torch.bfloat16), stack.inputs(torch.bfloat16)
    # torch counts a CPU's fused attention as nothing, and a card has no room for the plain one.
    kernels = [SDPBackend.MATH] if device == "cpu" else [SDPBackend.FLASH_ATTENTION]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(kernels):
        stack.call(model, given)
    return int(counter.get_total_flops())


def measure(model: str, device: DeviceFacts, args: argparse.Namespace, ends: float) -> str:
    """All candidates by turns; the section of the page."""
    there = device.torch_name
    stack = SIZES[model][device.kind](there)
    wanted = {
        name: entry
        for name, entry in candidates(stack, device.kind, {}).items()
        if name == BASE or not args.only or any(each in name.lower() for each in args.only)
    }
    paths, certified = certify_all(model, device, wanted)
    runs: dict[str, Candidate] = {}
    results: dict[str, Result] = {}
    skipped: dict[str, str] = {}
    base: Tensor | None = None
    try:
        for name, entry in wanted.items():
            left = ends - args.reserve - time.monotonic()
            if name != BASE and left <= 0:
                skipped[name] = "no time left"
                continue
            candidate = runs[name] = Candidate(
                model, name, device, paths, allocates_as_ours=entry.allocates_as_ours
            )
            try:
                ready = candidate.answer(args.limit if name == BASE else min(args.limit, left))
                answer = torch.from_numpy(ready.answer)
                base = answer if base is None else base
                error = relative(answer, base)
                if not error < 0.2:
                    raise SkippedError(f"its answer is off by {error:.1e}")
            except SkippedError as reason:
                skipped[name] = str(reason)
                runs.pop(name).close()
                continue
            results[name] = Result(entry.dtype, ready.first, error, ready.bytes)
            print(f"{name}: first call {ready.first:.1f} s, error {error:.1e}", flush=True)
        peaks = take_turns(runs, results, there, args.rounds, ends)
    finally:
        for candidate in runs.values():
            candidate.close()
    if BASE not in results:
        raise SystemExit(f"{BASE} failed: {skipped[BASE]}")
    return page_section(stack, results, peaks, count_flops(stack, there), skipped, certified)


def certify_all(
    model: str, device: DeviceFacts, wanted: Mapping[str, Entry]
) -> tuple[dict[str, tuple[str, ...]], str]:
    """Certified paths by dtype, for candidates that use them; and lines about them."""
    paths, lines = {}, ""
    islands = SIZES[model][device.kind]("meta").islands
    for dtype in {entry.dtype: None for name, entry in wanted.items() if FAST in name}:
        precision = precision_of(getattr(torch, dtype), islands)
        call = dry_run_call(model, device.kind)
        gains, reasons = certified_paths(call, precision, device, TRIALS[device.kind])
        paths[dtype] = tuple(gains)
        lines += list_paths(dtype, gains, reasons)
    print(lines, flush=True)
    return paths, lines


def take_turns(
    runs: Mapping[str, Candidate],
    results: Mapping[str, Result],
    device: str,
    rounds: int,
    ends: float,
) -> dict[str, list[float]]:
    """Time each candidate once a round; the peaks of the same rounds, in the dtypes that they use.

    A product in bfloat16 takes minutes on a CPU without instructions for it.
    """
    peaks: dict[str, list[float]] = {found.dtype: [] for found in results.values()}
    for number in range(rounds):
        if number and time.monotonic() > ends:
            break
        for dtype, found in peaks.items():
            found.append(peak(dtype, device))
        for name, run in runs.items():
            results[name].times.append(run.timed())
    return peaks


def page_section(
    stack: Stack,
    results: Mapping[str, Result],
    peaks: Mapping[str, list[float]],
    flops: int,
    skipped: Mapping[str, str],
    certified: str,
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
{certified}
Not measured:

{lines}
"""


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--model", action="append", choices=tuple(SIZES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", action="append", default=[], help="part of candidates' names")
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds to prepare one candidate"
    )
    parser.add_argument("--seconds", type=float, help="for all; 330 on a card, 3600 on a CPU")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args = arguments()
    facts = machine_facts(args.device)
    device = pick_device(facts, args.device)
    if device.kind == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or facts.num_cores)
    total = args.seconds or (3600.0 if device.kind == "cpu" else 330.0)
    names = args.model or list(SIZES)
    sections, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        # Everybody compiles again.
        os.environ["EVERYFRAME_CACHE"] = str(Path(cache, "everyframe"))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache, "inductor"))
        for number, name in enumerate(names, 1):
            args.reserve = 0.1 * total / len(names)
            ends = began + total * number / len(names)
            sections.append(measure(name, device, args, ends))
            print(sections[-1], flush=True)
            write_page(sections, facts, device, args)


def write_page(
    sections: Sequence[str], facts: MachineFacts, device: DeviceFacts, args: argparse.Namespace
) -> None:
    """The page of the models so far."""
    packages = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("openvino", "onnxruntime", "torchao", "cache-dit")
        if not _is_missing(name)
    )
    text = f"""
The same random weights and inputs, by turns, medians of {args.rounds} rounds. Error: norm of the
difference to {BASE} over its norm.

{chr(10).join(sections)}
{hardware(facts, device)}
Peers: {packages or "none installed"}.
"""
    if args.is_page:
        title = f"One denoiser call beside its peers on {where(device)}"
        page_path("peers", device).write_text(compose_page(title, text))


def _is_missing(name: str) -> bool:
    try:
        needs(name)
    except SkippedError:
        return True
    return False


if __name__ == "__main__":
    main()
