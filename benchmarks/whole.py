"""What does a whole run take, from the command to the file, beside a script of diffusers?

    python benchmarks/whole.py                  # videos of a small Wan; some minutes
    python benchmarks/whole.py --device cuda    # a larger one, on a card; five minutes

A Wan 2.1 pipeline with random weights is written to disk first: its transformer as wide as asked,
a small text encoder and autoencoder. Then each command is a process of its own, started with
nothing loaded, and ends with an .mp4: a script of diffusers in float32 and in bfloat16, with its
blocks compiled where that is asked, and `everyframe generate` as it is, exact (no fast path), and
with compiled blocks that `everyframe compile` made before, whose time stands apart. All take turns,
round after round. Wall time and processor time with all child processes; the median over rounds.
Writes a dated page into `benchmarks/results/` unless told not to.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

#: What a user of diffusers writes.
SCRIPT = """
import sys
import av
import numpy as np
import torch
from diffusers import WanPipeline

folder, device, dtype, compiled, output, height, width, frames, steps = sys.argv[1:]
pipe = WanPipeline.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
if compiled == "True":
    pipe.transformer.compile_repeated_blocks()
video = pipe(
    "a red ball", height=int(height), width=int(width), num_frames=int(frames),
    num_inference_steps=int(steps), generator=torch.Generator().manual_seed(1),
)
with av.open(output, "w") as file:
    stream = file.add_stream("libx264", rate=16)
    stream.width, stream.height, stream.pix_fmt = int(width), int(height), "yuv420p"
    for frame in (video.frames[0] * 255).round().astype(np.uint8):
        file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
    file.mux(stream.encode(None))
"""


@dataclass
class Times:
    """Wall and processor seconds by round."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def pipeline(folder: Path, heads: int, layers: int) -> None:
    """A Wan 2.1 pipeline with random weights."""
    import torch
    from diffusers import (
        AutoencoderKLWan,
        UniPCMultistepScheduler,
        WanPipeline,
        WanTransformer3DModel,
    )
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    words = {word: number for number, word in enumerate(("<pad>", "</s>", "<unk>", "a", "red"))}
    bare = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = UMT5Config(
        vocab_size=16, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    WanPipeline(
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=bare, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        ),
        text_encoder=UMT5EncoderModel(encoder),
        transformer=WanTransformer3DModel(
            num_attention_heads=heads, num_layers=layers, ffn_dim=heads * 128 * 4, text_dim=64
        ),
        vae=AutoencoderKLWan(base_dim=16, num_res_blocks=1),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    ).save_pretrained(folder)


def timed(command: list[str], cache: Path) -> tuple[float, float]:
    """Wall and processor seconds of a command with all that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True,
        env={**os.environ, "EVERYFRAME_CACHE": str(cache), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        raise RuntimeError(f"{shlex.join(command[:4])}: {ended.stderr.strip()[-600:]}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, used


def commands(asked: argparse.Namespace, place: Path) -> dict[str, list[str]]:
    folder, output = str(place / "wan"), str(place / "out.mp4")
    script = place / "diffusers_script.py"
    script.write_text(SCRIPT)
    sizes = [str(each) for each in (asked.height, asked.width, asked.frames, asked.steps)]
    found: dict[str, list[str]] = {}
    for dtype in ("float32", "bfloat16"):
        theirs = [sys.executable, str(script), folder, asked.device, dtype]
        found[f"diffusers {dtype}"] = [*theirs, "False", output, *sizes]
        if asked.compiled:
            found[f"diffusers {dtype}, compiled"] = [*theirs, "True", output, *sizes]
    height, width, frames, steps = sizes
    ours = [
        sys.executable, "-m", "everyframe", "generate", "a red ball", "--model", folder,
        "--device", asked.device, "--height", height, "--width", width, "--num-frames", frames,
        "--num-inference-steps", steps, "--seed", "1", "--run-dir", "off", "-o", output,
    ]  # fmt: skip
    off = [each for name in asked.off for each in ("--disable", name)]
    found["everyframe, no fast path"] = [*ours, *off, "--dtype", "fp32"]
    found["everyframe"] = [*ours, "--disable", "compile"]
    found["everyframe, compiled before"] = ours
    return found


def measure(asked: argparse.Namespace, place: Path) -> tuple[dict[str, Times], dict[str, str], str]:
    from everyframe.fast_paths.registry import CATALOGUE

    asked.off = list(CATALOGUE)
    pipeline(place / "wan", asked.heads, asked.layers)
    runs = commands(asked, place)
    ahead = [
        sys.executable, "-m", "everyframe", "compile", *runs["everyframe"][6:-4],
        "--prompt", "a red ball", "-o", str(place / "compiled"),
    ]  # fmt: skip
    ahead = [each for each in ahead if each not in ("--seed", "--run-dir", "off")]
    skipped, cache = {}, place / "cache"
    prepared = ""
    results: dict[str, Times] = {name: Times() for name in runs}
    for number in range(asked.rounds + 1):
        for name, command in runs.items():
            if name in skipped:
                continue
            if number == 0 and name == "everyframe, compiled before":
                try:
                    prepared = f"{timed(ahead, cache)[0]:.0f} s"
                except RuntimeError as error:
                    skipped[name] = str(error).splitlines()[-1]
                    continue
            try:
                wall, processor = timed(command, cache)
            except RuntimeError as error:
                skipped[name] = str(error).splitlines()[-1]
                continue
            # The first round fills caches: certificates, torch's compiler, the files' pages.
            print(f"{number} {name}: {wall:.1f} s, processor {processor:.1f} s", flush=True)
            if number:
                results[name].wall.append(wall)
                results[name].processor.append(processor)
    return {name: each for name, each in results.items() if each.wall}, skipped, prepared


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--compiled", action="store_true", help="diffusers with compiled blocks too"
    )
    parser.add_argument("--rounds", type=int, default=2)
    for name in ("heads", "layers", "height", "width", "frames", "steps"):
        parser.add_argument(f"--{name}", type=int, help="default: by device")
    parser.add_argument("--no-page", action="store_true", help="print only")
    asked = parser.parse_args()
    sizes: dict[str, Any] = {"heads": 4, "layers": 6, "height": 128, "width": 192, "frames": 17,
                             "steps": 8}  # fmt: skip
    if asked.device != "cpu":
        sizes = {"heads": 12, "layers": 10, "height": 480, "width": 832, "frames": 17, "steps": 10}
    for name, value in sizes.items():
        setattr(asked, name, getattr(asked, name) or value)
    return asked


def main() -> None:
    asked = arguments()
    with tempfile.TemporaryDirectory() as place:
        results, skipped, prepared = measure(asked, Path(place))
    from measuring import hardware, result_page, where

    from everyframe.hardware import machine_facts, pick_device

    facts = machine_facts(asked.device)
    device = pick_device(facts, asked.device)
    if not results:
        raise SystemExit("nothing could be measured: " + "; ".join(skipped.values()))
    base = results.get("diffusers float32") or next(iter(results.values()))
    rows = []
    for name, own in results.items():
        wall = statistics.median(a / b for a, b in zip(base.wall, own.wall, strict=False))
        used = statistics.median(a / b for a, b in zip(base.processor, own.processor, strict=False))
        rows.append(
            f"| {name} | {statistics.median(own.wall):.1f} s | {wall:.2f} | "
            f"{statistics.median(own.processor):.1f} s | {used:.2f} |"
        )
    lines = "".join(f"\n- {name}: not measured ({why})" for name, why in skipped.items())
    command = shlex.join(["python", "benchmarks/whole.py", *sys.argv[1:]])
    text = f"""# From the command to the file on {where(device)}, {date.today().isoformat()}

Wan 2.1, random weights, {asked.heads} heads of 128, {asked.layers} blocks; {asked.frames} frames
of {asked.width}x{asked.height}, {asked.steps} steps, guided. Medians of {asked.rounds} rounds.

| command | wall | x diffusers float32 | processor | x diffusers float32 |
| --- | --- | --- | --- | --- |
{chr(10).join(rows)}

`everyframe compile` took {prepared or "no time, as it wasn't run"}, once, before.{lines}

{hardware(facts, device)}

Command: `{command}`
"""
    print(text)
    if not asked.no_page:
        result_page("whole", device).write_text(text)


if __name__ == "__main__":
    main()
