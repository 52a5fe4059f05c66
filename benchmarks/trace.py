"""What does recording a trace cost, in time and in bytes?

    python benchmarks/trace.py                 # the sizes of the result pages; about two minutes

One forward of a denoiser with hooks and without, by turns, one thread, in processor time (which
waiting for other programs doesn't add to): a small one, whose time is mostly the overhead of
operations, and one of Open-Sora 1.2's width with two of its 28 layers. The share is the median over
rounds; weights, which are looked at once in a run, have a column of their own. Bytes are those of
the file, for a run of 10 calls.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measuring import seconds
from result_pages import compose_page, make_parser, publish, versions_of
from torch import Tensor, nn

from everyframe.hardware import machine_facts
from everyframe.numerics.trace import file
from everyframe.numerics.trace.fingerprint import fingerprint
from everyframe.numerics.trace.recorder import Recorder

#: Name -> hidden size, heads, layers, tokens.
SIZES = {
    "small": (128, 4, 4, 256),
    "Open-Sora 1.2's width": (1152, 16, 2, 512),
}
CALLS = 10


class Block(nn.Module):
    """A transformer's block with the modules of one that is written for watching."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.act, self.fc2 = (
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )  # fmt: skip
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        fed: Tensor = self.fc2(self.act(self.fc1(self.norm2(x))))
        return x + fed


@torch.inference_mode()
def measured(name: str, rounds: int) -> str:
    """One row of the table."""
    width, heads, layers, tokens = SIZES[name]
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, heads) for _ in range(layers))).eval()
    x = torch.randn(2, tokens, width)
    model(x)
    plain, traced, weights = [], [], []
    for _ in range(rounds):
        plain.append(seconds(lambda: model(x)))
        recorder = Recorder()
        recorder.watch("model", model)
        model(x)  # the weights are looked at here
        traced.append(seconds(lambda: model(x)))
        recorder.remove()
        weights.append(seconds(lambda: [fingerprint(each) for each in model.parameters()]))
    recorder = Recorder()
    recorder.watch("model", model)
    for call in range(CALLS):
        model(x + 0.1 * call)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.trace")
        trace = recorder.trace({}, {})
        file.write(trace, path)
        size = path.stat().st_size
    share = statistics.median(b / a for a, b in zip(plain, traced, strict=True)) - 1
    once = statistics.median(weights) * 1e3
    return (
        f"| {name} | {statistics.median(plain) * 1e3:.0f} ms | {share:.0%} | "
        f"{once:.0f} ms | {len(trace.seen) // CALLS} | {size / 1e6:.2f} MB | "
        f"{size / len(trace.seen):.0f} bytes |"
    )


def main() -> None:
    """Print the table, and write the page."""
    args = make_parser(__doc__, rounds=5).parse_args()
    torch.set_num_threads(1)
    table = "\n".join([
        "| model | one call | recording adds | weights, once | tensors a call | file | each |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(measured(name, args.rounds) for name in SIZES),
    ])  # fmt: skip
    facts = machine_facts("cpu")
    machine = (
        f"On {facts.devices[0].name}, one thread, processor time; {versions_of(facts)}. The file "
        f"is that of {CALLS} calls. A tensor that equals another one, as what a block gives and "
        "the next is given, is stored once."
    )
    publish("trace", compose_page("What a trace costs", table, machine), is_page=args.is_page)


if __name__ == "__main__":
    main()
