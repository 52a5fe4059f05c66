"""How fast is one forward of SVD's UNet, and one whole tiny pipeline, beside diffusers' own?

    python benchmarks/svd.py               # the sizes of the result pages; half an hour
    python benchmarks/svd.py --rounds 3    # fewer rounds; some ten minutes
    python benchmarks/svd.py --no-compile  # without torch.compile; a few minutes
    python benchmarks/svd.py --no-compile --no-pipeline --profile --rounds 3   # the UNet alone
    python benchmarks/svd.py --busy        # on a machine that does other things as well
    python benchmarks/svd.py --device cuda --no-compile --released   # on a card; a minute

The same random weights in diffusers' `UNetSpatioTemporalConditionModel`, eager and compiled, in
float32 and bfloat16 (on a card float16 too), and in ours, in float32 and in what the policy has for
the others there. On a card diffusers' float32 is measured whole and with torch's defaults, by which
its convolutions are TF32; ours is always whole. All take turns, round after round, with the best
matrix product between them, so that a busy machine slows each alike; ratios and shares are medians
over rounds. A CPU without instructions for bfloat16 computes it many times as slowly as float32:
there float32 alone is measured, and the page says so. Ours makes its context (what depends on no
latents) before, once, as in a real run. The pipeline is a tiny one from disk; of ours the loading
is left out, as diffusers' is loaded before. `--busy` takes one thread and its processor time.
Writes a dated page into `benchmarks/results/` unless told not to.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLTemporalDecoder,
    EulerDiscreteScheduler,
    StableVideoDiffusionPipeline,
    UNetSpatioTemporalConditionModel,
)
from measuring import clock, hardware, peak, publish, relative, seconds, where
from PIL import Image
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

from everyframe.core.events import ComponentLoaded, Note, Planned, WeightsReady
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision
from everyframe.core.request import Request
from everyframe.engine.run import stream
from everyframe.families.svd import unet
from everyframe.families.svd.components import UNET_ISLANDS
from everyframe.fast_paths import cpu_modules
from everyframe.fast_paths.apply import apply_fast_paths, swap_modules
from everyframe.hardware import machine_facts, pick_device
from everyframe.precision import cast_hooks
from everyframe.precision.policy import ComponentNeeds, choose
from everyframe.precision.strict_float32 import strict_float32

#: The names of dtypes as options have them.
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
#: What every ratio is to.
BASE = "diffusers float32"
#: What ours has on a CPU where it is certified; see `everyframe fast-paths`.
PATHS = ("attention-flash", *cpu_modules.KINDS)
#: How a candidate by them is named.
FAST = ", fast paths"
#: With torch's defaults, by which a card's convolutions are TF32.
DEFAULTS = "diffusers float32 with TF32"


@dataclass(frozen=True)
class Sizes:
    """Of one forward; `side` is the latents' height and width, guidance makes two of a batch."""

    widths: tuple[int, ...]
    frames: int
    side: int
    branches: int = 2

    @property
    def config(self) -> dict[str, Any]:
        """diffusers' arguments; heads are 64 wide, as released."""
        heads = tuple(max(1, width // 64) for width in self.widths)
        return {
            "block_out_channels": self.widths,
            "num_attention_heads": heads,
            "num_frames": self.frames,
        }

    def __str__(self) -> str:
        return (
            f"block_out_channels {self.widths}, {self.frames} frames, "
            f"{self.side}x{self.side} latents, batch {self.branches}"
        )


#: The released model: 14 frames of as many tokens as 1024x576 has.
RELEASED = Sizes((320, 640, 1280, 1280), 14, 96)


def dtypes(device: DeviceFacts) -> tuple[str, ...]:
    """Those that this device multiplies in hardware; never float16 on a CPU."""
    found = ["float32"]
    if device.has_fast_bf16:
        found.append("bfloat16")
    if device.kind != "cpu" and device.has_fast_fp16:
        found.append("float16")
    return tuple(found)


@dataclass
class Inputs:
    """Latents with the picture's, time, CLIP's embedding, what is told beside the time."""

    x: Tensor
    t: Tensor
    picture: Tensor
    told: Tensor


@dataclass
class Measured:
    """Seconds by round of each candidate; GFLOP/s of the best product of each dtype by round."""

    times: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, list[float]] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    compiling: dict[str, float] = field(default_factory=dict)

    def ratio(self, name: str, to: str = BASE) -> float:
        """How many times as fast as another."""
        pairs = zip(self.times[to], self.times[name], strict=True)
        return statistics.median(base / own for base, own in pairs)

    def share(self, name: str, dtype: str) -> float:
        """Of the matrix-product peak in that dtype, by the products that this one computes."""
        pairs = zip(self.times[name], self.peaks[dtype], strict=True)
        return statistics.median(self.flops[name] / took / best for took, best in pairs)


def inputs(sizes: Sizes, device: str) -> Inputs:
    """The unconditional branch sees zeros in place of the picture."""
    generator = torch.Generator().manual_seed(1)
    shape = (sizes.branches, sizes.frames, 8, sizes.side, sizes.side)
    picture = torch.randn(sizes.branches, 1024, generator=generator)
    picture[: sizes.branches - 1] = 0
    told = torch.tensor([[6.0, 127.0, 0.02]] * sizes.branches)
    t = torch.full((sizes.branches,), 1.3)
    x = torch.randn(shape, generator=generator)
    return Inputs(*(each.to(device) for each in (x, t, picture, told)))


def fill(module: nn.Module) -> nn.Module:
    """The same random weights for every candidate, of sizes that keep values near 1."""
    generator = torch.Generator(next(module.parameters()).device).manual_seed(0)
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.8 * parameter[0].numel() ** -0.5, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(std=0.05, generator=generator)
    return module.eval().requires_grad_(False)


def theirs(
    sizes: Sizes, dtype: str, device: str
) -> tuple[nn.Module, Callable[[nn.Module, Inputs], Tensor]]:
    """diffusers' own, all of it in one dtype, as its users have it."""
    with torch.device(device):
        model = fill(UNetSpatioTemporalConditionModel(**sizes.config))
    wanted = getattr(torch, dtype)
    model.to(device, wanted)  # a blending factor is made on the CPU, whatever device is asked

    def call(model: nn.Module, given: Inputs) -> Tensor:
        x, picture, told = (each.to(wanted) for each in (given.x, given.picture, given.told))
        answer: Tensor = model(x, given.t, picture[:, None], told, return_dict=False)[0]
        return answer

    return model, call


def ours(
    sizes: Sizes, given: Inputs, precision: Precision, paths: tuple[str, ...] = ()
) -> tuple[nn.Module, Callable[[nn.Module, Inputs], Tensor]]:
    """Ours in that precision, by these fast paths, with its context made."""
    with torch.device(given.x.device):
        model = fill(unet.build(sizes.config))
    model.to(given.x.device)
    swap_modules(model, paths)
    cast_hooks.add_cast_hooks(model, precision, ("conv_out",))
    apply_fast_paths(model, paths or None)
    context = model.context(given.picture, given.told, sizes.frames)

    def call(model: nn.Module, given: Inputs) -> Tensor:
        answer: Tensor = model(given.x, given.t, context)
        return answer

    return model, call


def precision_of(device: DeviceFacts, dtype: str) -> Precision:
    """What the policy has for SVD's UNet, at its released size, there; `dtype` may be auto."""
    if dtype == "float32":
        return Precision("float32", "float32")
    needs = ComponentNeeds("unet", 1_524_623_082, UNET_ISLANDS, prefers="float16")
    return choose(device, dtype, needs)[0]


def candidates(
    sizes: Sizes, given: Inputs, device: DeviceFacts, compiled: bool, peers: bool = False
) -> dict[str, Callable[[], Tensor]]:
    """What takes turns, by name."""
    runs: dict[str, Callable[[], Tensor]] = {}
    for dtype in dtypes(device):
        model, call = theirs(sizes, dtype, device.torch_name)
        runs[f"diffusers {dtype}"] = run = partial(call, model, given)
        if device.kind == "cuda" and dtype == "float32":
            runs[BASE], runs[DEFAULTS] = partial(_whole, run), run
        if compiled:
            faster: Any = torch.compile(model)
            runs[f"diffusers {dtype} compiled"] = partial(call, faster, given)
    policy = precision_of(device, "auto").compute
    for dtype in dtypes(device):
        model, call = ours(sizes, given, precision_of(device, dtype))
        is_picked = dtype == policy and dtype != "float32"
        name = f"ours {dtype}" + " (the policy's)" * is_picked
        runs[name] = partial(_whole, partial(call, model, given))
        if device.kind == "cpu":
            model, call = ours(sizes, given, precision_of(device, dtype), PATHS)
            runs[f"{name}{FAST}"] = partial(_whole, partial(call, model, given))
    if peers:
        runs |= {
            f"OpenVINO {dtype}": openvino(sizes, given, dtype) for dtype in dtypes(device)
        }  # fmt: skip
    return runs


def openvino(sizes: Sizes, given: Inputs, dtype: str) -> Callable[[], Tensor]:
    """diffusers' UNet converted by OpenVINO for these sizes, on as many threads as torch has."""
    import openvino as ov

    model, _ = theirs(sizes, "float32", "cpu")

    class Called(nn.Module):
        def forward(self, x: Tensor, t: Tensor, picture: Tensor, told: Tensor) -> Tensor:
            answer: Tensor = model(x, t, picture, told, return_dict=False)[0]
            return answer

    call = Called()
    call.model = model
    example = (given.x, given.t, given.picture[:, None], given.told)
    converted = ov.convert_model(call, example_input=example)
    places = zip(converted.inputs, example, strict=True)
    converted.reshape({place: list(each.shape) for place, each in places})
    options = {
        "INFERENCE_PRECISION_HINT": SHORT[dtype].replace("fp", "f"),
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    compiled = ov.Core().compile_model(converted, "CPU", options)
    request = compiled.create_infer_request()
    arrays = [each.numpy() for each in example]
    return lambda: torch.from_numpy(request.infer(arrays)[0])


def _whole(run: Callable[[], Tensor]) -> Tensor:
    """As the engine computes: without TF32, and no sums in half precision."""
    with strict_float32():
        return run()


def dtype_of(name: str) -> str:
    """The dtype in which a candidate multiplies."""
    return next(dtype for dtype in ("bfloat16", "float16", "float32") if dtype in name)


def count_flops(run: Callable[[], Tensor]) -> int:
    """Two for each multiply-add of matrix products and convolutions; nothing else."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def measure_forward(
    sizes: Sizes, rounds: int, device: DeviceFacts, compiled: bool, peers: bool = False
) -> Measured:
    """All candidates, round after round."""
    there = device.torch_name
    given, found = inputs(sizes, there), Measured()
    runs = candidates(sizes, given, device, compiled, peers)
    answers: dict[str, Tensor] = {}
    for name, run in runs.items():
        began = clock(there)
        answers[name] = run()  # which warms up, and compiles
        # Products of compilers and of oneDNN are not counted; they are those of the same without.
        plain = name.removesuffix(" compiled").removesuffix(FAST)
        if name.startswith("OpenVINO"):
            found.flops[name] = found.flops[BASE]
        elif plain != name:
            found.flops[name] = found.flops[plain]
        if name.endswith("compiled"):
            found.compiling[name] = clock(there) - began
        elif name not in found.flops:
            found.flops[name] = count_flops(run)
        found.errors[name] = relative(answers[name], answers[BASE])
        found.times[name] = []
    for _ in range(rounds):
        for dtype in dtypes(device):
            found.peaks.setdefault(dtype, []).append(peak(dtype, there))
        for name, run in runs.items():
            found.times[name].append(seconds(run, there))
    return found


def tiny_pipeline(folder: Path) -> Path:
    """A whole random pipeline, saved by diffusers."""
    vision = CLIPVisionConfig(
        hidden_size=64, projection_dim=32, num_hidden_layers=2, num_attention_heads=4,
        image_size=224, intermediate_size=128, patch_size=56,
    )  # fmt: skip
    StableVideoDiffusionPipeline(
        vae=fill(
            AutoencoderKLTemporalDecoder(
                block_out_channels=(32,) * 4, down_block_types=("DownEncoderBlock2D",) * 4
            )
        ),
        image_encoder=fill(CLIPVisionModelWithProjection(vision)),
        unet=fill(
            UNetSpatioTemporalConditionModel(
                block_out_channels=(64, 128),
                num_attention_heads=(1, 2),
                cross_attention_dim=32,
                down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
                up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            )
        ),
        scheduler=EulerDiscreteScheduler(
            prediction_type="v_prediction",
            timestep_type="continuous",
            use_karras_sigmas=True,
            timestep_spacing="leading",
            sigma_min=0.002,
            sigma_max=700.0,
        ),
        feature_extractor=CLIPImageProcessor(crop_size=224, size=224),
    ).save_pretrained(folder)
    return folder


def measure_pipeline(
    side: int, frames: int, steps: int, rounds: int, device: DeviceFacts
) -> dict[str, list[float]]:
    """Seconds of whole runs by round, from a picture to frames."""
    shape = {"height": side, "width": side, "num_frames": frames, "num_inference_steps": steps}
    picture = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = tiny_pipeline(Path(place, "tiny"))
        runs: dict[str, Callable[[], float]] = {}
        for dtype in dtypes(device):
            pipe = StableVideoDiffusionPipeline.from_pretrained(folder, dtype=getattr(torch, dtype))
            pipe.to(device.torch_name)
            pipe.set_progress_bar_config(disable=True)
            image = Image.fromarray(picture)
            runs[f"diffusers {dtype}"] = partial(
                seconds, partial(pipe, image, output_type="np", **shape), device.torch_name
            )
            request = {
                "model": str(folder), "image": picture, "seed": 1, "dtype": SHORT[dtype],
                "device": device.torch_name, **shape,
            }  # fmt: skip
            runs[f"ours {dtype}"] = partial(whole_run, request, device.torch_name)
        for run in runs.values():
            run()
        for _ in range(rounds):
            for name, run in runs.items():
                found.setdefault(name, []).append(run())
    return found


def whole_run(request: Mapping[str, Any], device: str) -> float:
    """Seconds of one run, planning and loading left out; on the clock that `seconds` goes by."""
    total, before = 0.0, clock(device)
    for event in stream(Request(**request), num_threads=torch.get_num_threads()):
        now = clock(device)
        # What ends in one of these was planning, hashing and loading.
        if not isinstance(event, (Planned, Note, WeightsReady, ComponentLoaded)):
            total += now - before
        before = now
    return total


def page(
    sizes: Sizes, found: Measured, whole: Mapping[str, list[float]], device: DeviceFacts
) -> str:
    """The result as Markdown."""
    facts, rounds = machine_facts(device.kind), len(found.times[BASE])
    command = shlex.join(["python", "benchmarks/svd.py", *sys.argv[1:]])
    rows = [
        f"| {name} | {statistics.median(times):.3g} s | **{found.ratio(name):.2f}** | "
        f"{found.flops[name] / 1e12:.2f} | {found.share(name, dtype_of(name)):.0%} | "
        f"{found.errors[name]:.1e} | {_compiled(found, name)} |"
        for name, times in found.times.items()
    ]
    lines = "\n".join
    return f"""# Stable Video Diffusion on {where(device)}, {date.today().isoformat()}

## One forward of the UNet

{sizes}.

| what | one call | times as fast as {BASE} | TFLOP | share of peak | error | first call |
| --- | --- | --- | --- | --- | --- | --- |
{lines(rows)}

The error is the norm of the difference from {BASE} over the norm (random
weights). TFLOP are those of matrix products and convolutions that this candidate computes; the peak
is the best square product in its dtype, measured in each round. Times, ratios and shares are
medians of {rounds} rounds.

{_of_whole(whole)}{_said_of(device)}
{hardware(facts, device)}

Command: `{command}`
"""


def _of_whole(whole: Mapping[str, list[float]]) -> str:
    if not whole:
        return ""
    rows = "\n".join(
        f"| {name} | {statistics.median(times):.3g} s | "
        f"{statistics.median(b / a for a, b in zip(times, whole[BASE], strict=True)):.2f} |"
        for name, times in whole.items()
    )
    return f"""## A whole tiny pipeline

| what | one run | times as fast as {BASE} |
| --- | --- | --- |
{rows}
"""


def profile(sizes: Sizes, device: DeviceFacts) -> str:
    """Operators of ours by their own time, and what is left for kernels in C, in Markdown."""
    given, tables = inputs(sizes, device.torch_name), []
    for dtype in dtypes(device):
        paths = PATHS if device.kind == "cpu" else ()
        model, call = ours(sizes, given, precision_of(device, dtype), paths)
        call(model, given)
        with torch.profiler.profile(record_shapes=False) as result:
            call(model, given)
        rows = sorted(result.key_averages(), key=lambda row: -row.self_cpu_time_total)[:10]
        whole = sum(row.self_cpu_time_total for row in result.key_averages())
        shares = "\n".join(
            f"| {row.key} | {row.self_cpu_time_total / whole:.0%} | {row.count} |" for row in rows
        )
        tables.append(f"""
## Where the time of ours goes, {dtype}

| operator | share | calls |
| --- | --- | --- |
{shares}

Kernels in C stand under the operators that hand them their memory (`aten::empty_like`, `empty`).
""")
    return "".join(tables)


def _said_of(device: DeviceFacts) -> str:
    if device.kind == "cuda":
        return f"""
float32 is whole, without TF32, but for "{DEFAULTS}", as torch has it by default; diffusers'
half precision has torch's defaults too, ours sums in float32. The policy picks
{precision_of(device, "auto").compute}.
"""
    if device.has_fast_bf16:
        return ""
    return """
This CPU has no instructions for bfloat16, so nothing was measured in it, and the policy picks
float32.
"""


def _compiled(found: Measured, name: str) -> str:
    return f"{found.compiling[name]:.0f} s" if name in found.compiling else ""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--widths", type=int, nargs=4, default=(128, 256, 512, 512), help="block_out_channels"
    )
    for name, default in (("frames", 14), ("side", 32), ("rounds", 5), ("pipeline-side", 128)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--device", default="cpu", help="cpu, or a card such as cuda")
    parser.add_argument(
        "--released", action="store_true", help="the released model's widths and tokens"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--openvino", action="store_true", help="beside OpenVINO (pip install it)")
    parser.add_argument("--no-pipeline", action="store_true", help="leave the whole runs out")
    parser.add_argument("--profile", action="store_true", help="where the time of ours goes")
    parser.add_argument("--busy", action="store_true", help="one thread, processor time")
    parser.add_argument("--no-page", action="store_true", help="print only")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    device = pick_device(machine_facts(asked.device), asked.device)
    torch.set_num_threads(1 if asked.busy else machine_facts("cpu").num_cores)
    sizes = Sizes(tuple(asked.widths), asked.frames, asked.side)
    if asked.released:
        sizes = replace(RELEASED, frames=asked.frames)
    with torch.no_grad():
        found = measure_forward(sizes, asked.rounds, device, not asked.no_compile, asked.openvino)
        whole = {}
        if not asked.no_pipeline:
            whole = measure_pipeline(asked.pipeline_side, asked.frames, 5, asked.rounds, device)
        profiles = profile(sizes, device) if asked.profile else ""
    text = page(sizes, found, whole, device) + profiles
    publish(text, "svd", device, is_page=not asked.no_page)


if __name__ == "__main__":
    main()
