"""Weights that come to a CUDA card block by block: the same bits, and no more memory than planned.

On a card work is only queued: whoever counts what Python holds does not see what the card still
needs. So blocks here take long, and what the allocator has handed out is what is looked at.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from everyframe.checkpoints.key_map import KeyMap
from everyframe.core.plan import ComponentPlan, Precision
from everyframe.runtime.loading import load_component
from everyframe.runtime.memory import offload
from everyframe.runtime.memory.offload import take_turns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

NUM_BLOCKS, WIDTH = 16, 1024
#: A block's weights are 8 MB in float32.
BLOCK = 2 * WIDTH * WIDTH * 4
#: Cycles of a card's clock: some 20 ms, many times as long as a block takes to come.
LONG = 30_000_000


class Block(nn.Module):
    """Two layers, and a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            torch.cuda._sleep(LONG)
        out: Tensor = x + self.second(torch.tanh(self.first(x)))
        return out


class Model(nn.Module):
    """Blocks, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().requires_grad_(False)


def inputs() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()


def on_the_card(model: Model) -> Tensor:
    answer: Tensor = model.cuda()(inputs())
    model.cpu()
    torch.cuda.synchronize()
    return answer


def peak(model: nn.Module, times: int, want: Tensor) -> int:
    """The most bytes that were there at once, beside what was there before."""
    x = inputs()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(times):
        assert torch.equal(model(x), want)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@torch.inference_mode()
def test_blocks_come_and_go_with_the_card_s_work(model: Model) -> None:
    want = on_the_card(model)
    offloaded = offload.apply(model, "cuda")
    assert offloaded.most_bytes == 0
    # One computes, one is on its way, and one may not be given back yet.
    assert peak(model, 3, want) < 3.5 * BLOCK
    assert offloaded.most_bytes == 2 * BLOCK


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_blocks_that_are_read_from_files(model: Model, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(dict(model.state_dict()), path)

    def loaded(**fields: bool) -> nn.Module:
        count = sum(p.numel() for p in model.parameters())
        part = ComponentPlan(
            "model", "model", "denoise", "here", count, "cuda:0", Precision(dtype, dtype),
            count * 4, 0, **fields,
        )  # fmt: skip
        return load_component(part, Model, path, KeyMap())

    want = loaded()(inputs())
    for fields in ({"block_offload": True}, {"block_offload": True, "from_disk": True}):
        assert peak(loaded(**fields), 2, want) < 3.5 * BLOCK


@torch.inference_mode()
def test_of_two_models_one_is_there(model: Model) -> None:
    other = Model().requires_grad_(False)
    wants = [on_the_card(each) for each in (model, other)]
    turns = take_turns([model, other], "cuda")
    whole = NUM_BLOCKS * BLOCK
    for _ in range(2):
        for each, want in zip((model, other), wants, strict=True):
            assert peak(each, 1, want) < 1.3 * whole
    assert turns.most_bytes == whole
