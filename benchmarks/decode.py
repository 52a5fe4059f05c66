"""What does decoding a video's latents take on a CPU, beside diffusers' eager float32?

    OMP_NUM_THREADS=1 python benchmarks/decode.py               # all of them; half an hour
    python benchmarks/decode.py --model wan --profile           # one of them, and its operators
    EVERYFRAME_DISABLE=winograd python benchmarks/decode.py     # without a fast path

The decoders of Stable Video Diffusion (diffusers' AutoencoderKLTemporalDecoder), Wan 2.1, Open-Sora
1.2, CogVideoX, Mochi, HunyuanVideo (1.5 as well) and LTX, as wide as released, with random weights
and few small frames. Open-Sora has no diffusers class: there the base is our module as written.
"Exact" is without any fast path, "fast paths" with those that their trials certify here first, in
each dtype. Where the CPU computes faster in bfloat16, diffusers' module in it is a candidate, and
ours with a decoder in bfloat16 and all else in float32, as runs have it. All take turns, round
after round; ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch
from block_stacks import fill
from certified_paths import certified_paths, list_paths
from decoders import MODELS, Decoder, dry_run_call, outputs, precision_in
from measuring import hardware, relative, seconds
from result_pages import compose_page, make_parser, publish
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from everyframe.core.facts import DeviceFacts
from everyframe.fast_paths.apply import apply_fast_paths, swap_modules
from everyframe.hardware import machine_facts, pick_device
from everyframe.precision.cast_hooks import add_cast_hooks
from everyframe.precision.strict_float32 import strict_float32

#: The candidate that all are compared with.
BASE = "as written"
#: Seconds for trials of fast paths in one dtype.
TRIALS = 120.0


def certify_decoder(model: str, dtype: str, device: DeviceFacts) -> tuple[tuple[str, ...], str]:
    """Certified fast paths in a dtype, and lines about them."""
    gains, reasons = certified_paths(
        dry_run_call(model), precision_in(model, dtype), device, TRIALS
    )
    return tuple(gains), list_paths(dtype, gains, reasons)


def theirs(decoder: Decoder, dtype: torch.dtype) -> Callable[[], Tensor]:
    """A call of the decoder as written, whole in a dtype."""
    module, latents = fill(decoder.build()).to(dtype), make_latents(decoder)
    return lambda: decoder.decode(module, latents.to(dtype)).float()


def ours(model: str, dtype: str, paths: tuple[str, ...]) -> Callable[[], Tensor]:
    """A call of the decoder by ours, with these fast paths."""
    decoder = MODELS[model]()
    module, latents = fill(decoder.build()), make_latents(decoder)
    swap_modules(module, paths)
    ends = outputs("vae", module)
    add_cast_hooks(module, precision_in(model, dtype), ends)
    apply_fast_paths(module, paths, ends)

    def run() -> Tensor:
        with strict_float32():
            return decoder.decode(module, latents)

    return run


def make_latents(decoder: Decoder) -> Tensor:
    """The same latents for every candidate."""
    return torch.randn(decoder.latents, generator=torch.Generator().manual_seed(1))


def operators(run: Callable[[], Tensor]) -> str:
    """The heaviest operators of a call; a kernel of ours in C is part of what calls it."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        run()
    return str(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=14))


def measure(model: str, device: DeviceFacts, args: argparse.Namespace) -> str:
    """The section of one decoder."""
    decoder = MODELS[model]()
    paths, lines = certify_decoder(model, "float32", device)
    runs = {
        BASE: theirs(decoder, torch.float32),
        "ours, exact": ours(model, "float32", ()),
        "ours, fast paths": ours(model, "float32", paths),
    }
    if device.has_fast_bf16:
        paths, more = certify_decoder(model, "bfloat16", device)
        lines += more
        runs["as written, bfloat16"] = theirs(decoder, torch.bfloat16)
        runs["ours, bfloat16, fast paths"] = ours(model, "bfloat16", paths)
    answers = {name: run() for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            times[name].append(seconds(run))
    rows = []
    for name, took in times.items():
        ratio = statistics.median(a / b for a, b in zip(times[BASE], took, strict=True))
        error = relative(answers[name], answers[BASE])
        rows.append(f"| {name} | {statistics.median(took):.3g} s | {ratio:.2f} | {error:.1e} |")
    for name in runs if args.profile else ():
        print(name, operators(runs[name]), sep="\n", flush=True)
    return f"""## {decoder.name}

| candidate | decode | x as written | error |
| --- | --- | --- | --- |
{chr(10).join(rows)}
{lines}"""


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--model", action="append", choices=tuple(MODELS))
    parser.add_argument("--profile", action="store_true", help="print the heaviest operators")
    args = parser.parse_args()
    facts = machine_facts("cpu")
    device = pick_device(facts, "cpu")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or facts.num_cores)
    sections = []
    for name in args.model or MODELS:
        sections.append(measure(name, device, args))
        print(sections[-1], flush=True)
    text = f"""
Random weights, by turns, medians of {args.rounds} rounds. As written: diffusers' eager module, of
Open-Sora ours. Error: norm of the difference to it over its norm.

{chr(10).join(sections)}
"""
    page = compose_page("Decoding latents on a CPU", text, hardware(facts, device))
    publish("decode", page, is_page=args.is_page, device=device)


if __name__ == "__main__":
    main()
