"""What is it worth to compute a prompt's keys and values once a video, in diffusers' Wan?

    python benchmarks/constants.py             # three video sizes; six minutes

The same module with and without `cached-constants`, by turns, in float32 with one thread
(OMP_NUM_THREADS=1) and its processor time: a step after the first two, guided, four blocks as wide
as Wan 2.1 1.3B. The larger the video, the smaller is the text's share. Answers are compared bit by
bit.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch
from block_stacks import wan
from measuring import hardware, seconds
from result_pages import compose_page, make_parser, publish, where

from everyframe.fast_paths.modules.constant_results import CachedConstants
from everyframe.hardware import machine_facts, pick_device

#: Frames, height and width of latents, which are 4 and 8 times as many in pixels.
SIZES = ((1, 16, 16), (5, 16, 16), (5, 32, 32))


def row(size: tuple[int, int, int], rounds: int) -> str:
    """One line of the table."""
    stack = wan(12, 4, *size, "cpu")
    model = stack.theirs(torch.float32)
    given = stack.inputs(torch.float32)
    call = partial(stack.call, model, given)
    plain, cached = [], []
    want = call()
    for _ in range(rounds):
        plain.append(seconds(call))
        with CachedConstants(model):
            for _ in range(3):  # found, stored, confirmed
                call()
            cached.append(seconds(call))
            is_same = torch.equal(call(), want)
    gain = statistics.median(a / b for a, b in zip(plain, cached, strict=True))
    tokens = size[0] * size[1] * size[2] // 4
    ours = statistics.median(cached)
    return (
        f"| {4 * size[0] - 3} frames of {8 * size[2]}x{8 * size[1]} | {tokens} | "
        f"{statistics.median(plain):.2f} s | {ours:.2f} s | {gain:.2f} | "
        f"{'the same' if is_same else 'DIFFERENT'} |"
    )


def main() -> None:
    args = make_parser(__doc__, rounds=5).parse_args()
    with torch.inference_mode():
        rows = [row(size, args.rounds) for size in SIZES]
    facts = machine_facts("cpu")
    device = pick_device(facts, "cpu")
    lines = "\n".join(rows)
    text = f"""
Wan 2.1, four blocks of 12 heads of 128, random weights, two branches with
512 tokens of text; one step, medians of {args.rounds} rounds by turns.

| video | tokens | as written | cached | times as fast | bits |
| --- | --- | --- | --- | --- | --- |
{lines}
"""
    title = f"A prompt's keys and values once a video on {where(device)}"
    page = compose_page(title, text, hardware(facts, device))
    publish("constants", page, is_page=args.is_page, device=device)


if __name__ == "__main__":
    main()
