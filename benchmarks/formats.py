"""What does it cost to load a component from another form than plain safetensors?

    python benchmarks/formats.py                     # four minutes; needs gguf
    python benchmarks/formats.py --layers 4          # a smaller transformer, on a busy machine

A transformer of LTX-Video's kind with random numbers, 170 million parameters in 10 layers, is
written in each form and loaded in bfloat16, each time in a process of its own: processor time of
the loading alone (one thread; files are in the page cache), the bytes of the loaded weights, and
the peak of resident memory above what the process had before. Forms take turns; ratios are to
bfloat16 safetensors of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
from result_pages import compose_page, make_parser, publish, versions_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
PLAIN = "safetensors, bfloat16"
#: Rows of blocks, for GGUF's kinds, have to be multiples of 256.
SIZES = {
    "in_channels": 128, "out_channels": 128, "num_attention_heads": 16, "attention_head_dim": 64,
    "cross_attention_dim": 1024, "num_layers": 10, "caption_channels": 1024,
}  # fmt: skip
KINDS = ("Q8_0", "Q5_K", "Q4_K")
#: Ends the name of a form whose blocks stay in memory (`--quantize gguf`).
RESIDENT = ", blocks kept"


def write_forms(folder: Path, layers: int) -> Iterator[tuple[str, Path]]:
    """(name, file) of each form."""
    from diffusers import LTXVideoTransformer3DModel

    from helpers.components import stored

    torch.manual_seed(0)
    module = LTXVideoTransformer3DModel(**{**SIZES, "num_layers": layers})
    module.save_config(folder)
    state = {name: each.detach() for name, each in module.state_dict().items()}
    half = {name: each.bfloat16() for name, each in state.items()}
    yield PLAIN, stored.write(folder / "half.safetensors", half)
    yield "safetensors, float32", stored.write(folder / "wide.safetensors", state)
    yield "fp8 without scales", stored.write(folder / "fp8.safetensors", stored.plain_fp8(half)[0])
    yield "fp8_scaled", stored.write(folder / "scaled.safetensors", stored.scaled(state)[0])
    for kind in KINDS:
        path = _gguf(folder / f"{kind}.gguf", half, kind)
        yield f"GGUF, {kind}", path
        yield f"GGUF, {kind}{RESIDENT}", path


def _gguf(path: Path, state: dict[str, torch.Tensor], kind: str) -> Path:
    """Random blocks for the matrices (the package can't make all kinds), F32 for the rest."""
    import gguf

    from helpers.components import stored

    writer, own = gguf.GGUFWriter(str(path), "ltxv"), gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[own]
    for name, each in state.items():
        if each.ndim == 2 and each.shape[1] % block == 0:
            blocks = stored.random_blocks(own, each.numel() // block)
            writer.add_tensor(name, blocks.reshape(len(each), -1), raw_dtype=own)
        else:
            writer.add_tensor(name, each.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loaded(folder: str, file: str, kind: str) -> tuple[float, int, int]:
    """(processor seconds of loading, peak bytes above before, bytes of the weights).

    `kind` is the storage of the linear layers' weights; empty for bfloat16.
    """
    import threading
    import time

    import psutil
    from accelerate import init_empty_weights  # noqa: F401
    from diffusers import LTXVideoTransformer3DModel  # noqa: F401

    from everyframe.adapters.component_file import match_component
    from everyframe.core.plan import Precision
    from everyframe.diffusers_pipelines.files.checkpoint import ComponentFolder
    from everyframe.diffusers_pipelines.files.component_tensors import load_from_file, module_table

    torch.set_num_threads(1)
    what = ("transformer", "diffusers", "LTXVideoTransformer3DModel", Path(folder))
    tensors = match_component(Path(file), module_table(ComponentFolder(*what)), "it").tensors
    part = ComponentFolder(*what, tensors=tensors)
    process, stop, peak = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def sample() -> None:
        while not stop.is_set():
            peak[0] = max(peak[0], process.memory_info().rss - before)
            time.sleep(0.005)

    watcher = threading.Thread(target=sample)
    watcher.start()
    began = time.thread_time()
    module = load_from_file(part, Precision("bfloat16", "bfloat16", (), kind))
    took = time.thread_time() - began
    stop.set()
    watcher.join()
    return took, peak[0], sum(each.nbytes for each in module.parameters())


def measured(rounds: int, layers: int) -> list[str]:
    """The lines of the table."""
    times: dict[str, list[float]] = {}
    peaks: dict[str, list[float]] = {}
    held: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        forms = dict(write_forms(Path(folder), layers))
        sizes = {name: path.stat().st_size for name, path in forms.items()}
        for _ in range(rounds):
            for name, path in forms.items():
                command = [sys.executable, __file__, "--load", folder, str(path),
                           "gguf" if name.endswith(RESIDENT) else ""]  # fmt: skip
                ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                took, peak, weights = json.loads(ended.stdout.splitlines()[-1])
                times.setdefault(name, []).append(took)
                peaks.setdefault(name, []).append(peak / 1e6)
                held[name] = weights / 1e6
    lines = []
    for name, own in times.items():
        ratios = [mine / plain for mine, plain in zip(own, times[PLAIN], strict=True)]
        lines.append(
            f"| {name} | {sizes[name] / 1e6:.0f} MB | {statistics.median(own):.2f} s "
            f"| {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f}) "
            f"| {held[name]:.0f} MB | {statistics.median(peaks[name]):.0f} MB |"
        )
    return lines


def main() -> None:
    """Measure, print, and write the page."""
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--load", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=SIZES["num_layers"])
    args = parser.parse_args()
    if args.load:
        print(json.dumps(loaded(*args.load)))
        return
    busy = os.getloadavg()[0]
    lines = measured(args.rounds, args.layers)
    text = f"""
A transformer of {args.layers} layers of LTX-Video's kind, loaded in bfloat16 in a process of its
own: processor time of the loading, medians of {args.rounds} rounds; ratios within a round, least
and most in brackets. The last columns are the bytes of the loaded weights, and the peak of resident
memory above what the process had before.

| form | file | loading | safetensors in bfloat16 = 1.0 | weights | peak |
| --- | --- | --- | --- | --- | --- |
{chr(10).join(lines)}
"""
    # After the measurement: what this process imports is in the memory of none that it starts.
    from everyframe.hardware import machine_facts

    facts = machine_facts("cpu")
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("gguf", "safetensors"))
    machine = (
        f"Hardware: {facts.cpu.name}, {facts.num_cores} cores, one thread; load average "
        f"{busy:.0f} at the beginning and\n{os.getloadavg()[0]:.0f} at the end, so times are "
        f"indications, and memory is not.\n{versions_of(facts)}, {packages}."
    )
    page = compose_page("Loading a component from each form", text, machine)
    publish("formats", page, is_page=args.is_page)


if __name__ == "__main__":
    main()
