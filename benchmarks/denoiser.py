"""How much of a device's matrix-product peak does one forward of STDiT3 reach?

    python benchmarks/denoiser.py              # the sizes of the result pages; about two minutes
    python benchmarks/denoiser.py --device cuda --depth 28 --side 64   # on a card; half a minute
    python benchmarks/denoiser.py --busy       # on a machine that does other things as well
    python benchmarks/denoiser.py --profile    # where the time goes, operator by operator

In float32 and in bfloat16: the time of one denoiser call, as a share of what the best matrix
product reaches in the same minute, and against the same model with plain attention that writes its
scores out. Products and models run by turns, round after round, so that a busy machine slows both;
a share is the median over rounds. The text's keys and values are made before, once, as in a real
run. `--busy` takes one thread and its processor time, which waiting for others doesn't add to; its
shares are those of one core.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from functools import partial

import torch
from measuring import SQUARES, hardware, peak, relative, seconds
from result_pages import compose_page, make_parser, publish, where
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision
from everyframe.families.opensora.components import DENOISER_ISLANDS
from everyframe.families.opensora.config import STDiT3Config
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.fast_paths.apply import apply_fast_paths, swap_modules
from everyframe.hardware import machine_facts, pick_device
from everyframe.ops.attention import AttentionCore
from everyframe.ops.text_context import TextContext
from everyframe.precision import cast_hooks
from everyframe.precision.strict_float32 import strict_float32

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Sizes:
    """What is run. `side` is the latents' height and width; a patch is 2 x 2 of them."""

    hidden: int
    heads: int
    depth: int
    frames: int
    side: int
    text: int
    paths: tuple[str, ...] = ()

    @property
    def config(self) -> STDiT3Config:
        return STDiT3Config(
            hidden_size=self.hidden,
            num_heads=self.heads,
            depth=self.depth,
            model_max_length=self.text,
            caption_channels=self.hidden,
        )

    def __str__(self) -> str:
        return (
            f"hidden {self.hidden}, {self.heads} heads, {self.depth}+{self.depth} blocks, "
            f"{self.frames} latent frames x {(self.side // 2) ** 2} tokens, "
            f"{self.text} text tokens, batch 1"
            + (f", by {', '.join(self.paths)}" if self.paths else "")
        )


@dataclass
class Times:
    """Seconds by round of one dtype; the peak in FLOP a second of the best product by round."""

    ours: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)

    def share(self, flops: int) -> float:
        pairs = zip(self.ours, self.peak, strict=True)
        return statistics.median(flops / seconds / peak for seconds, peak in pairs)

    def speedup(self) -> float:
        return statistics.median(b / a for a, b in zip(self.ours, self.plain, strict=True))


class PlainCore(nn.Module):
    """Attention that writes its scores out: what there is without a fused kernel."""

    def forward(
        self, q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        q_BHQD, k_BHLD = q_BHQD.to(v_BHLD.dtype), k_BHLD.to(v_BHLD.dtype)
        scores = q_BHQD @ k_BHLD.transpose(-2, -1) * q_BHQD.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        out: Tensor = scores.softmax(dim=-1) @ v_BHLD
        return out


def with_plain_attention(model: STDiT3) -> STDiT3:
    """The same model, with every attention core inside swapped for a plain one."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, AttentionCore):
                setattr(parent, name, PlainCore())
    return model


def build(sizes: Sizes, dtype: str, plain: bool, device: str) -> STDiT3:
    """The model with the same random parameters for every dtype and attention."""
    torch.manual_seed(0)
    with torch.device(device):
        model = STDiT3(sizes.config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.normal_(std=0.02)
    if plain:
        with_plain_attention(model)
    islands = () if dtype == "float32" else DENOISER_ISLANDS
    paths = () if plain else sizes.paths
    swap_modules(model, paths)
    cast_hooks.add_cast_hooks(model, Precision(dtype, dtype, islands))
    apply_fast_paths(model, paths or None)
    return model


def inputs(sizes: Sizes, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Latents, timestep and text states in float32."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 4, sizes.frames, sizes.side, sizes.side, generator=generator)
    text = torch.randn(1, sizes.text, sizes.hidden, generator=generator)
    return latents.to(device), torch.tensor([637.5], device=device), text.to(device)


def call(model: STDiT3, latents: Tensor, t: Tensor, context: TextContext) -> Tensor:
    pixels = latents.shape[-1] * 8
    out: Tensor = model(latents, t, context, fps=24.0, height=pixels, width=pixels)
    return out


def count_flops(sizes: Sizes) -> int:
    """Two for each multiply-add of the matrix products, attention's included; nothing else."""
    with torch.device("meta"):
        model = with_plain_attention(STDiT3(sizes.config)).requires_grad_(False)
    latents, t, text = inputs(sizes, "meta")
    context = model.context(text)
    with FlopCounterMode(display=False) as counter:
        call(model, latents, t, context)
    return int(counter.get_total_flops())


def measure(sizes: Sizes, rounds: int, device: str) -> tuple[dict[str, Times], float]:
    """Times by dtype, and bfloat16's error against float32 (norm of difference over norm)."""
    models = {(d, plain): build(sizes, d, plain, device) for d in DTYPES for plain in (False, True)}
    latents, t, text = inputs(sizes, device)
    contexts = {key: model.context(text) for key, model in models.items()}
    runs = {key: partial(call, model, latents, t, contexts[key]) for key, model in models.items()}
    outputs = {key: run() for key, run in runs.items()}  # which warms up as well
    check_same_function(outputs)
    times = {dtype: Times() for dtype in DTYPES}
    for _ in range(rounds):
        for dtype in DTYPES:
            before = peak(dtype, device)
            times[dtype].ours.append(seconds(runs[dtype, False], device))
            times[dtype].peak.append(max(before, peak(dtype, device)))
            times[dtype].plain.append(seconds(runs[dtype, True], device))
    return times, relative(outputs["bfloat16", False], outputs["float32", False])


def check_same_function(outputs: dict[tuple[str, bool], Tensor]) -> None:
    """A fast model that computes something else is not fast: 1e-4 is rounding, and not more."""
    error = relative(outputs["float32", True], outputs["float32", False])
    if not error < 1e-4:
        raise RuntimeError(f"plain and fused attention differ by {error:.1e}")


def page(
    sizes: Sizes, flops: int, times: dict[str, Times], error: float, device: DeviceFacts
) -> str:
    """The result as Markdown."""
    facts, rounds = machine_facts(device.kind), len(times["float32"].ours)
    rows = []
    for dtype, of in times.items():
        ours, peak_ = statistics.median(of.ours), statistics.median(of.peak)
        rows.append(
            f"| {dtype} | {ours:.3g} s | {flops / ours / 1e9:.0f} | {peak_ / 1e9:.0f} | "
            f"**{of.share(flops):.0%}** | {statistics.median(of.plain):.3g} s | "
            f"{of.speedup():.2f} |"
        )
    by_round = "\n".join(
        f"- {dtype}: "
        + ", ".join(f"{flops / s / p:.0%}" for s, p in zip(of.ours, of.peak, strict=True))
        for dtype, of in times.items()
    )
    text = f"""
{sizes}. Matrix products alone: {flops / 1e12:.3f} TFLOP.

| dtype | one call | GFLOP/s | peak GFLOP/s | share of peak | plain attention | plain / ours |
| --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

bfloat16 differs from float32 by {error:.2%} of the prediction's norm (random parameters).

Peak is the best of square products of {", ".join(map(str, SQUARES[device.kind]))}, measured
before and after each call in the same run. Times are medians of {rounds} rounds, shares medians of
the rounds' own shares:

{by_round}
"""
    return compose_page(f"One STDiT3 forward on {where(device)}", text, hardware(facts, device))


def profile(sizes: Sizes, device: str) -> str:
    """The operators by their own time, for each dtype."""
    latents, t, text = inputs(sizes, device)
    kind, activities = torch.device(device).type, torch.profiler.ProfilerActivity
    tables = []
    for dtype in DTYPES:
        model = build(sizes, dtype, plain=False, device=device)
        context = model.context(text)
        call(model, latents, t, context)
        with torch.profiler.profile(activities=[getattr(activities, kind.upper())]) as result:
            call(model, latents, t, context)
        averages = result.key_averages()
        tables.append(f"{dtype}\n{averages.table(sort_by=f'self_{kind}_time_total', row_limit=16)}")
    return "\n".join(tables)


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=5)
    for name, default in (
        ("hidden", 1152), ("heads", 16), ("depth", 2), ("frames", 16), ("side", 32),
        ("text", 120),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--path", action="append", default=[], help="a fast path of `everyframe "
                        "paths`, besides attention-flash; may be repeated")  # fmt: skip
    parser.add_argument("--device", default="cpu", help="cpu, or a card such as cuda")
    parser.add_argument("--busy", action="store_true", help="one thread, processor time")
    parser.add_argument("--profile", action="store_true", help="operators by time, and stop")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args = arguments()
    device = pick_device(machine_facts(args.device), args.device)
    torch.set_num_threads(1 if args.busy else machine_facts("cpu").num_cores)
    paths = ("attention-flash", *args.path) if args.path else ()
    sizes = Sizes(args.hidden, args.heads, args.depth, args.frames, args.side, args.text, paths)
    with strict_float32():
        if args.profile:
            print(profile(sizes, device.torch_name))
            return
        measured = measure(sizes, args.rounds, device.torch_name)
    text = page(sizes, count_flops(sizes), *measured, device)
    publish("denoiser", text, is_page=args.is_page, device=device)


if __name__ == "__main__":
    main()
