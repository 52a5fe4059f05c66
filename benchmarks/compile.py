"""What does it take to compile a model's blocks, what does the next process take, and is it faster?

    python benchmarks/compile.py                  # Wan's and STDiT3's blocks; some minutes
    python benchmarks/compile.py --model wan      # one of them
    python benchmarks/compile.py --device cuda    # on a card, at the released sizes

Random weights in the stacks of `block_stacks.py`. The first process has an empty store: it compiles
each kind of block, tries it, and saves the packages. The second one loads the folder and
gives its first result; that is timed from the import of torch on, and the plain model's first
call in a process like it beside. Speed is by turns, compiled and as written, the median over
rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from result_pages import compose_page, make_parser, publish, where


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--model", action="append", choices=("wan", "opensora", "svd"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--fixed", action="store_true", help="a package for each size")
    parser.add_argument("--role", choices=("first", "second", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args: argparse.Namespace) -> dict[str, Any]:
    """What one process does; its times."""
    import torch
    from block_stacks import SIZES
    from measuring import finish, relative, seconds

    import everyframe
    from everyframe.fast_paths.compilation.module_compilation import compiled_blocks
    from everyframe.precision.strict_float32 import strict_float32

    if args.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count() or 1)
    imported = time.perf_counter()
    stack = SIZES[args.model[0]][args.device](args.device)
    dtype = getattr(torch, args.dtype)
    found: dict[str, Any] = {"name": stack.name}
    with torch.inference_mode(), strict_float32():
        model, given = stack.ours(dtype, ()), stack.inputs(dtype)
        began, used = time.perf_counter(), time.process_time()
        if args.role == "second":
            everyframe.load_compiled(args.folder, model)
        elif args.role == "first":
            everyframe.compile(model, dynamic=not args.fixed)
        found["prepare"] = time.perf_counter() - began
        answer = stack.call(model, given)
        finish(args.device)
        found["first call"] = time.perf_counter() - began
        found["processor"] = time.process_time() - used
        blocks = compiled_blocks(model)
        packages = {
            name: each for block in blocks.values() for name, each in block.report.packages.items()
        }
        found["notes"] = sorted({note for block in blocks.values() for note in block.report.notes})
        found["packages"] = [
            [each.block, each.seconds, each.gain, each.error] for each in packages.values()
        ]
        if args.role == "first" and packages:
            folder = everyframe.save_compiled(model, args.folder)
            found["bytes"] = sum(path.stat().st_size for path in folder.iterdir())
        if args.role == "second":
            plain = stack.ours(dtype, ())
            found["error"] = relative(answer, stack.call(plain, given))
            whole = stack.ours(torch.float32, ())
            wide = stack.inputs(torch.float32)
            true = stack.call(whole, wide)
            found["errors"] = [relative(answer, true), relative(stack.call(plain, given), true)]
            del whole
            times: dict[str, list[float]] = {"plain": [], "compiled": []}
            for _ in range(args.rounds):
                for name, each in (("plain", plain), ("compiled", model)):
                    times[name].append(seconds(partial(stack.call, each, given), args.device))
            found["times"] = {name: statistics.median(each) for name, each in times.items()}
            pairs = zip(times["plain"], times["compiled"], strict=True)
            found["gain"] = statistics.median(a / b for a, b in pairs)
        found["loaded"] = imported
    return found


def process(role: str, model: str, args: argparse.Namespace, cache: str) -> dict[str, Any]:
    """One role in a process of its own."""
    own = ["--role", role, "--model", model, "--device", args.device, "--dtype", args.dtype,
           "--rounds", str(args.rounds), "--folder", str(Path(cache, model))]  # fmt: skip
    own += ["--fixed"] if args.fixed else []
    began = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, __file__, *own], check=False, capture_output=True, text=True,
        env={**os.environ, "EVERYFRAME_CACHE": str(Path(cache, "store"))},
    )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(ended.stderr[-3000:])
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    found["whole process"] = time.perf_counter() - began
    return found


def section(model: str, args: argparse.Namespace, cache: str) -> str:
    first = process("first", model, args, cache)
    lines = [f"## {first['name']}, {args.dtype}", ""]
    rows = "\n".join(
        f"| {name.rpartition('.')[2]} | {took:.0f} s | {gain:.2f} | {error:.1e} |"
        for name, took, gain, error in first["packages"]
    )
    notes = "".join(f"\n- runs as written: {note}" for note in first["notes"])
    if not first["packages"]:
        return "\n".join([*lines, f"Nothing was compiled.{notes}"])
    second = process("second", model, args, cache)
    plain = process("plain", model, args, cache)
    cold, warm = first["first call"], second["processor"] - plain["processor"]
    ours, theirs = second["errors"]
    return "\n".join([
        *lines,
        "| kind of block | compiled in | x as written | error to float32 |",
        "| --- | --- | --- | --- |",
        rows,
        "",
        f"- Cold: {cold:.1f} s to the first result. {first['bytes'] / 1e6:.1f} MB without weights.",
        f"- **Next process: loaded in {second['prepare']:.2f} s**, first result after "
        f"{second['first call']:.2f} s; as written {plain['first call']:.2f} s. Loading and one "
        f"comparison of each kind: {warm:.2f} s of processor time, "
        f"**1/{cold / max(warm, 0.01):.0f} of the cold compile**.",
        f"- Whole call: {second['times']['plain']:.3g} s as written, "
        f"{second['times']['compiled']:.3g} s compiled, **{second['gain']:.2f} times as fast**; "
        f"error to float32 {ours:.2e}, as written {theirs:.2e}.{notes}",
    ])  # fmt: skip


def main() -> None:
    args = arguments()
    if args.role:
        print(json.dumps(work(args)))
        return
    from measuring import hardware

    from everyframe.hardware import machine_facts, pick_device

    facts = machine_facts(args.device)
    device = pick_device(facts, args.device)
    sections = []
    with tempfile.TemporaryDirectory() as cache:
        for model in args.model or ("wan", "opensora"):
            try:
                sections.append(section(model, args, cache))
            except RuntimeError as error:
                sections.append(f"## {model}\n\nFailed: {str(error).splitlines()[-1]}")
            print(sections[-1], flush=True)
    title = f"Compiled blocks on {where(device)}"
    text = compose_page(title, "\n".join(sections), hardware(facts, device))
    publish("compile", text, is_page=args.is_page, device=device)


if __name__ == "__main__":
    main()
