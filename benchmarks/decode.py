"""What does decoding a video's latents take on a CPU, beside diffusers' eager float32?

    OMP_NUM_THREADS=1 python benchmarks/decode.py               # all of them; ten minutes
    python benchmarks/decode.py --model wan --profile           # one of them, and its operators
    python benchmarks/decode.py --disable winograd              # without a fast path

The decoders of Stable Video Diffusion (diffusers' AutoencoderKLTemporalDecoder), Wan 2.1, Open-Sora
1.2, CogVideoX, Mochi, HunyuanVideo (1.5 as well) and LTX, as wide as released, with random weights
and few small frames. Open-Sora has no diffusers class: there the base is our module as written.
"Exact" is without any fast path, "fast paths" with all that find a place in the decoder;
`everyframe fast-paths` may refuse some. All take turns, round after round; ratios are medians over
rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import torch
from block_stacks import fill
from measuring import hardware, relative, seconds
from result_pages import compose_page, make_parser, publish
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from everyframe.core.facts import DeviceFacts
from everyframe.fast_paths.apply import applies_to, apply_fast_paths, places_of, swap_modules
from everyframe.fast_paths.registry import for_device, kernel_of
from everyframe.hardware import machine_facts, pick_device
from everyframe.precision.strict_float32 import strict_float32


@dataclass(frozen=True)
class Decoder:
    """An autoencoder, with what decodes its latents.

    Attributes:
        name: of the model, with its sizes.
        build: makes it without values.
        latents: their shape.
        decode: latents to pixels.
    """

    name: str
    build: Callable[[], nn.Module]
    latents: tuple[int, ...]
    decode: Callable[[Any, Tensor], Tensor]


def svd() -> Decoder:
    widths = (128, 256, 512, 512)
    levels = ("DownEncoderBlock2D",) * len(widths)

    def decode(vae: Any, latents: Tensor) -> Tensor:
        pixels: Tensor = vae.decode(latents, num_frames=len(latents)).sample
        return pixels

    return Decoder(
        "SVD, 8 frames of 128x128",
        lambda: diffusers.AutoencoderKLTemporalDecoder(
            block_out_channels=widths, down_block_types=levels, layers_per_block=2
        ),
        (8, 4, 16, 16),
        decode,
    )


def of_diffusers(name: str, class_name: str, latents: tuple[int, ...]) -> Decoder:
    """An autoencoder of diffusers by its defaults, which are those of the released one."""

    def decode(vae: Any, latents: Tensor) -> Tensor:
        pixels: Tensor = vae.decode(latents).sample
        return pixels

    return Decoder(name, getattr(diffusers, class_name), latents, decode)


def opensora() -> Decoder:
    from everyframe.families.opensora.vae import VideoVAE
    from everyframe.families.opensora.vae_config import VideoVAEConfig

    return Decoder(
        "Open-Sora 1.2, 17 frames of 128x128",
        lambda: VideoVAE(VideoVAEConfig()),
        (1, 4, 5, 16, 16),
        lambda vae, latents: vae.decode(latents, 17),
    )


MODELS: dict[str, Callable[[], Decoder]] = {
    "svd": svd,
    "wan": partial(
        of_diffusers, "Wan 2.1, 9 frames of 128x128", "AutoencoderKLWan", (1, 16, 3, 16, 16)
    ),
    "opensora": opensora,
    "cogvideox": partial(
        of_diffusers, "CogVideoX, 9 frames of 128x128", "AutoencoderKLCogVideoX", (1, 16, 3, 16, 16)
    ),
    "mochi": partial(
        of_diffusers, "Mochi, 7 frames of 128x128", "AutoencoderKLMochi", (1, 12, 2, 16, 16)
    ),
    "hunyuanvideo": partial(
        of_diffusers, "HunyuanVideo, 5 frames of 128x128", "AutoencoderKLHunyuanVideo",
        (1, 16, 2, 16, 16),
    ),
    "hunyuanvideo15": partial(
        of_diffusers, "HunyuanVideo 1.5, 5 frames of 128x128", "AutoencoderKLHunyuanVideo15",
        (1, 32, 2, 8, 8),
    ),
    "ltx": partial(
        of_diffusers, "LTX, 17 frames of 256x384", "AutoencoderKLLTXVideo", (1, 128, 3, 8, 12)
    ),
}  # fmt: skip


def paths_of(decoder: Decoder, device: DeviceFacts, disabled: list[str]) -> tuple[str, ...]:
    """Rounding fast paths that find a place in it, other than half precision and compiling."""
    with torch.device("meta"):
        probe = decoder.build()
    kinds = [
        path for path in for_device(device)
        if path.group not in ("precision", "compile", "products") and path.name not in disabled
    ]  # fmt: skip
    return tuple(each.name for each in kinds if applies_to(each.name, probe))


def prepared(decoder: Decoder, paths: tuple[str, ...] | None) -> Callable[[], Tensor]:
    """A call of the decoder as written (None), or by ours with these fast paths."""
    latents = torch.randn(decoder.latents, generator=torch.Generator().manual_seed(1))
    module = fill(decoder.build())
    if paths is None:
        return lambda: decoder.decode(module, latents)
    swap_modules(module, paths)
    apply_fast_paths(module, paths)

    def run() -> Tensor:
        with strict_float32():
            return decoder.decode(module, latents)

    return run


def operators(run: Callable[[], Tensor]) -> str:
    """The heaviest operators of a call; a kernel of ours in C is part of what calls it."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        run()
    return str(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=14))


def measure(decoder: Decoder, device: DeviceFacts, args: argparse.Namespace) -> str:
    """The section of one decoder."""
    paths = paths_of(decoder, device, args.disable)
    kinds: dict[str, tuple[str, ...] | None] = {
        "as written": None, "ours, exact": (), "ours, fast paths": paths,
    }  # fmt: skip
    runs = {name: prepared(decoder, own) for name, own in kinds.items()}
    answers = {name: run() for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            times[name].append(seconds(run))
    rows = []
    base = "as written"
    for name, took in times.items():
        ratio = statistics.median(a / b for a, b in zip(times[base], took, strict=True))
        error = relative(answers[name], answers[base])
        rows.append(f"| {name} | {statistics.median(took):.3g} s | {ratio:.2f} | {error:.1e} |")
    with torch.device("meta"):
        probe = decoder.build()
    own = ", ".join(
        f"`{path}`" if kernel_of(path) else f"`{path}` ({len(places_of(path, probe))})"
        for path in paths
    )
    for name in runs if args.profile else ():
        print(name, operators(runs[name]), sep="\n", flush=True)
    return f"""## {decoder.name}

| candidate | decode | x as written | error |
| --- | --- | --- | --- |
{chr(10).join(rows)}

Fast paths, with the modules of the autoencoder that each replaces: {own}.
"""


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--model", action="append", choices=tuple(MODELS))
    parser.add_argument("--disable", action="append", default=[], help="a fast path")
    parser.add_argument("--profile", action="store_true", help="print the heaviest operators")
    args = parser.parse_args()
    facts = machine_facts("cpu")
    device = pick_device(facts, "cpu")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or facts.num_cores)
    sections = []
    for name in args.model or MODELS:
        sections.append(measure(MODELS[name](), device, args))
        print(sections[-1], flush=True)
    text = f"""
Random weights, by turns, medians of {args.rounds} rounds. As written: diffusers' eager module, of
Open-Sora ours. Error: norm of the difference to it over its norm.

{chr(10).join(sections)}
"""
    page = compose_page("Decoding latents on a CPU in float32", text, hardware(facts, device))
    publish("decode", page, is_page=args.is_page, device=device)


if __name__ == "__main__":
    main()
