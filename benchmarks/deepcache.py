"""What does a shallow step of Stable Video Diffusion's UNet cost, and how far off is its answer?

    python benchmarks/deepcache.py             # a part of the released sizes; four minutes

Our UNet with random weights, a fifth as wide as the released one. Whole and shallow calls take
turns, in float32 and bfloat16, with one thread (OMP_NUM_THREADS=1) and its processor time. The
error is that of one shallow call whose features are of a level one of 25 Karras steps before, over
the norm of the answer: random weights say what a step costs and nothing of a trained model's
quality.
"""

from __future__ import annotations

import statistics

import torch
from block_stacks import svd
from measuring import hardware, relative, seconds
from result_pages import compose_page, make_parser, publish, where
from torch import Tensor

from everyframe.fast_paths.modules.deep_features import DeepFeatures
from everyframe.hardware import machine_facts, pick_device
from everyframe.samplers import euler_karras

#: Whole steps of 25 for which the gain of a run is counted.
WHOLE = (13, 9, 5)


def row(dtype: torch.dtype, rounds: int) -> str:
    """One line of the table."""
    stack = svd((64, 128, 256, 256), 8, 32, 32, "cpu")
    model = stack.ours(dtype, ())
    given = stack.inputs(torch.float32)

    def call(x: Tensor) -> Tensor:
        return stack.call(model, (x, *given[1:]))

    sigmas = euler_karras.schedule(25, 0.002, 700.0)[11:13]
    noise = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(9))
    before, now = (
        (given[0] + float(sigma) * noise) / (1 + float(sigma) ** 2) ** 0.5 for sigma in sigmas
    )
    whole, shallow = list[float](), list[float]()
    with DeepFeatures(model) as features:
        for _ in range(rounds):
            for is_shallow, times in ((False, whole), (True, shallow)):
                features.begin()
                features.is_shallow = is_shallow
                times.append(seconds(lambda: call(now)))
        features.begin()
        features.is_shallow = False
        call(before)
        features.begin()
        features.is_shallow = True
        answer = call(now)
    error = relative(answer, call(now))
    share = statistics.median(b / a for a, b in zip(whole, shallow, strict=True))
    gains = " | ".join(f"{25 / (n + (25 - n) * share):.2f}" for n in WHOLE)
    name = str(dtype).removeprefix("torch.")
    return (
        f"| {name} | {statistics.median(whole):.2f} s | {statistics.median(shallow):.2f} s | "
        f"{share:.1%} | {gains} | {error:.1%} |"
    )


def main() -> None:
    args = make_parser(__doc__, rounds=5).parse_args()
    with torch.inference_mode():
        rows = [row(dtype, args.rounds) for dtype in (torch.float32, torch.bfloat16)]
    facts = machine_facts("cpu")
    device = pick_device(facts, "cpu")
    lines = "\n".join(rows)
    counts = " | ".join(f"x at {n} of 25 whole" for n in WHOLE)
    text = f"""
A fifth of the released width, 8 frames of 32x32 latents, two branches, random weights; medians of
{args.rounds} rounds by turns. The gain of a run counts its steps by these times. The error is one
shallow call's, a step after a whole one: of random weights, which says nothing of trained ones.

| dtype | whole | shallow | share | {counts} | error |
| --- | --- | --- | --- | --- | --- | --- | --- |
{lines}
"""
    title = f"DeepCache in Stable Video Diffusion's UNet on {where(device)}"
    page = compose_page(title, text, hardware(facts, device))
    publish("deepcache", page, is_page=args.is_page, device=device)


if __name__ == "__main__":
    main()
