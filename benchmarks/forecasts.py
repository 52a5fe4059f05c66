"""Are a plan's forecasts of memory and time what is measured?

    python benchmarks/forecasts.py            # all cases, a process each, as a table
    python benchmarks/forecasts.py CASE       # one case, in this process, as a line of JSON

A case is one call of a stage of one family, of a size at which it takes 300 MB and more. Memory is
the most that the process holds above what it held after its imports, as Linux counts it, in a call
in which every large block is asked of the system and given back to it: what glibc keeps beside that
of blocks under 32 MB is from a tenth to nearly as much again, by chance. Time is a second call's,
with the allocator as it is. The forecast comes of the dry run and of rates that are measured right
after, by the code that `everyframe plan` uses. With one thread, processor time is taken for both,
which waiting for other programs doesn't add to.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

#: Case -> family, stage, height, width, frames, and sizes of the model.
CASES: dict[str, tuple[str, str, int, int, int, dict[str, Any]]] = {
    "opensora-1.0-decode-768": ("opensora-1.0", "decode", 768, 768, 16, {}),
    "opensora-1.0-decode-1024": ("opensora-1.0", "decode", 1024, 1024, 16, {}),
    "opensora-1.2-denoise-340": (
        "opensora-1.2", "denoise", 256, 256, 340,
        {"hidden_size": 192, "num_heads": 4, "depth": 1},
    ),
    "opensora-1.2-denoise-510": (
        "opensora-1.2", "denoise", 256, 256, 510,
        {"hidden_size": 192, "num_heads": 4, "depth": 1},
    ),
    "svd-denoise-320": ("svd", "denoise", 320, 320, 64, {}),
    "svd-denoise-384": ("svd", "denoise", 384, 384, 64, {}),
    "svd-decode-448": ("svd", "decode", 448, 448, 3, {}),
    "stepvideo-denoise-34": (
        "stepvideo", "denoise", 512, 512, 34,
        {"num_attention_heads": 12, "attention_head_dim": 64, "num_layers": 1},
    ),
    "stepvideo-denoise-51": (
        "stepvideo", "denoise", 512, 512, 51,
        {"num_attention_heads": 12, "attention_head_dim": 64, "num_layers": 1},
    ),
}  # fmt: skip
NUM_THREADS = 1

#: glibc's names for what `mallopt` sets: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1


def main() -> None:
    """The case that was named, or all of them."""
    # Not on top, as a test imports this file by its path.
    from result_pages import compose_page, make_parser, publish, versions_of

    from everyframe.hardware import machine_facts

    parser = make_parser(__doc__)
    parser.add_argument("case", nargs="?", choices=tuple(CASES))
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measured(args.case)))
        return
    rows = [row(name) for name in CASES]
    facts = machine_facts("cpu")
    text = compose_page(
        "Forecasts of memory and time",
        f"float32, {NUM_THREADS} thread of {facts.cpu.name}; load at the end "
        f"{os.getloadavg()[0]:.1f}. Ratios are forecast over measured. Versions: "
        f"{versions_of(facts)}.",
        "| case | memory forecast | measured | ratio | time forecast | measured | ratio |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(rows),
    )
    publish("forecasts", text, is_page=args.is_page)


def row(case: str) -> str:
    """One case in a process of its own, as a line of the table."""
    done = subprocess.run(
        [sys.executable, __file__, case], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    memory, held = found["forecast_bytes"], found["measured_bytes"]
    seconds, took = found["forecast_seconds"], found["measured_seconds"]
    line = (
        f"| {case} | {memory / 1e6:.0f} MB | {held / 1e6:.0f} MB | {memory / held:.2f} "
        f"| {seconds:.2f} s | {took:.2f} s | {seconds / took:.2f} |"
    )
    print(line, flush=True)
    return line


def measured(case: str) -> dict[str, float]:
    """Forecast and measurement of one case, in bytes and seconds."""
    import torch

    from everyframe.core.facts import DeviceFacts
    from everyframe.core.plan import Precision
    from everyframe.hardware import throughput as rates_module
    from everyframe.hardware.throughput import measured_rates
    from everyframe.ops.attention import by_kernel
    from everyframe.planning.dry_runs import DryRun, call_seconds, dry_run, heaviest
    from everyframe.precision.strict_float32 import strict_float32
    from helpers import config_only_models

    torch.set_num_threads(NUM_THREADS)
    # The rates of the plan are seconds on the wall; on a busy machine those of a trial of some
    # hundredths of a second say little about a call of many.
    vars(rates_module)["time"] = types.SimpleNamespace(perf_counter=time.process_time)
    family, stage, height, width, num_frames, sizes = CASES[case]
    name, _, version = family.partition("-")
    model = getattr(config_only_models, name)(*filter(None, [version]), **sizes)
    settings = config_only_models.settings(height, width, num_frames)
    stage_call = next(each for each in model.dry_run_calls(settings) if each.stage == stage)
    cpu = DeviceFacts("here", "cpu", None, 1 << 40, 1 << 40)
    run = dry_run(stage_call, {stage_call.component: Precision("float32", "float32")}, cpu)
    assert isinstance(run, DryRun)
    weights = sum(p.numel() * 4 for p in stage_call.module().parameters())
    with torch.inference_mode(), strict_float32():
        peak, took = measured_calls(stage_call)
    # After it: what trials leave in the allocator would be used again and not be seen.
    rates = measured_rates(heaviest([run], 6), "cpu", NUM_THREADS, by_kernel)
    return {
        "forecast_bytes": weights + run.found.working_bytes,
        "measured_bytes": peak,
        "forecast_seconds": call_seconds(run.found.work, rates),
        "measured_seconds": took,
    }


def measured_calls(stage_call: Any) -> tuple[int, float]:
    """The stage's call with real numbers, twice: bytes of the first, seconds of the second."""
    import torch

    began = time.thread_time()

    def call() -> None:
        nonlocal began
        began = time.thread_time()
        stage_call.call({stage_call.component: module}, "cpu")

    libc = ctypes.CDLL(None)
    assert libc.mallopt(_MMAP_THRESHOLD, 1 << 20)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    # Linux keeps the peak itself; a thread that samples misses it on a busy machine.
    before = _status("VmRSS")
    module = stage_call.module().to_empty(device="cpu").eval().requires_grad_(False)
    for each in (*module.parameters(), *module.buffers()):
        each.fill_(1e-3) if each.is_floating_point() else each.zero_()
    call()
    peak = _status("VmHWM") - before
    # As glibc would have set it by now.
    assert libc.mallopt(_MMAP_THRESHOLD, 32 << 20)
    assert libc.mallopt(_TRIM_THRESHOLD, 64 << 20)
    call()
    took = time.thread_time() - began
    assert torch.get_num_threads() == NUM_THREADS
    return peak, took


def _status(name: str) -> int:
    """Bytes of one line of what Linux tells of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    line = next(line for line in lines if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
