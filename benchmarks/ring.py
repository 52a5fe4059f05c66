"""What does attention in a ring cost beside one call for all keys?

    python benchmarks/ring.py                     # on a CPU, one thread; about a minute
    python benchmarks/ring.py --device cuda       # on a card; seconds

All ranks' work is computed here one rank after the other and nothing is sent: the queries of P
ranks by the keys of P ranks each, merged as `everyframe.parallel.ring_attention` merges them,
against one call of torch's attention. Both take turns; a ratio is the median over rounds. "Plain"
is the ring by matrix products, for kernels without a log-sum-exp.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from measuring import hardware, relative, seconds
from result_pages import compose_page, make_parser, publish, where
from torch import Tensor

from everyframe.hardware import machine_facts, pick_device
from everyframe.parallel.ring_attention import (
    Partial,
    merge,
    partial_attention,
    plain_partial_attention,
)

RANKS = (2, 4, 8)
#: Heads, tokens and channels per head, by kind of device.
SIZES = {"cpu": (4, 4096, 128), "cuda": (24, 16384, 128)}
DTYPES = ("float32", "bfloat16")

Part = Callable[[Tensor, Tensor, Tensor], Partial]


def ring(ranks: int, part: Part, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention (1, heads, tokens, D) as that many ranks compute it."""
    found = []
    for queries in q.chunk(ranks, dim=2):
        done: Partial | None = None
        for keys, values in zip(k.chunk(ranks, dim=2), v.chunk(ranks, dim=2), strict=True):
            here = part(queries, keys, values)
            done = here if done is None else merge(done, here)
        assert done is not None
        found.append(done.out.to(v.dtype))
    return torch.cat(found, dim=2)


def rows(device: str, turns: int) -> list[str]:
    """Rows of the page's table."""
    heads, tokens, width = SIZES[torch.device(device).type]
    table = []
    for name in DTYPES:
        torch.manual_seed(0)
        shape = (1, heads, tokens, width)
        q, k, v = (torch.randn(shape).to(device, getattr(torch, name)) for _ in range(3))
        ways: dict[str, Callable[[], Tensor]] = {
            "whole": partial(F.scaled_dot_product_attention, q, k, v)
        }
        for ranks in RANKS:
            ways[f"fused {ranks}"] = partial(ring, ranks, partial_attention, q, k, v)
            ways[f"plain {ranks}"] = partial(ring, ranks, plain_partial_attention, q, k, v)
        answers = {way: run() for way, run in ways.items()}
        took: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(turns):
            for way, run in ways.items():
                took[way].append(seconds(run, device))
        for way in list(ways)[1:]:
            ratio = statistics.median(
                mine / whole for mine, whole in zip(took[way], took["whole"], strict=True)
            )
            kernel, ranks_of = way.split()
            error = relative(answers[way], answers["whole"])
            table.append(f"| {name} | {ranks_of} | {kernel} | {ratio:.2f} | {error:.1e} |")
    return table


def main() -> None:
    """Measure, print and write the page."""
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1 if args.device == "cpu" else torch.get_num_threads())
    facts = machine_facts(args.device)
    device = pick_device(facts, args.device)
    heads, tokens, width = SIZES[torch.device(args.device).type]
    lines = rows(args.device, args.turns)
    text = "\n".join([
        f"{tokens} tokens, {heads} heads of {width}. Time of all ranks' work as a multiple of one",
        "call for all keys, the median of its turns; error as a norm against that call.", "",
        "| dtype | ranks | kernel | time | error |", "| --- | --- | --- | --- | --- |", *lines,
    ])  # fmt: skip
    page = compose_page(f"Attention in a ring on {where(device)}", text, hardware(facts, device))
    publish("ring", page, is_page=args.is_page, device=device)


if __name__ == "__main__":
    with torch.no_grad():
        main()
