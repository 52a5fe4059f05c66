"""Offloaded weights give the same bits, and no more than they should is on the device."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from everyframe.checkpoints.key_map import KeyMap
from everyframe.core.errors import CheckpointError
from everyframe.core.plan import ComponentPlan, Precision
from everyframe.precision import cast_hooks
from everyframe.precision.upcast import Upcast, held_in
from everyframe.runtime.loading import load_component
from everyframe.runtime.memory import offload
from everyframe.runtime.memory.prefetch import LocalWeightsProvider
from helpers import config_only_models
from helpers.tiny_checkpoints import opensora as tiny_opensora

WIDE = Precision("float32", "float32")


class Block(nn.Module):
    """A block with a parameter of its own beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8))
        self.inner = nn.Linear(8, 8)
        self.text = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        assert all(p.is_contiguous() for p in self.parameters())
        out: Tensor = self.inner(x) * self.table
        return out


class Model(nn.Module):
    """Blocks of which one layer is called from outside of them, as texts are projected."""

    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(1))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        texts = [block.text(x) for block in self.blocks]
        for block, text in zip(self.blocks, texts, strict=True):
            x = block(x) + text
        return x * self.scale


def test_units_are_the_blocks() -> None:
    names = set(offload.units(Model(12)))
    assert names == {f"blocks.{i}" for i in range(12)}
    # Parts that are too large come in pieces; what is no layer's stays.
    assert "blocks.0.inner" in offload.units(Model(2))


def test_resident_bytes_are_those_of_two_units_and_of_what_is_no_unit_s() -> None:
    model = Model(12)
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    assert offload.resident_bytes(model, WIDE) == 2 * block + model.scale.nbytes
    offloaded = offload.apply(model, "cpu")
    model(torch.randn(2, 8))
    # One computes, the next one is on its way.
    assert offloaded.most_bytes == 2 * block


def test_the_same_bits_and_the_weights_go_back() -> None:
    torch.manual_seed(0)
    model, x = Model(12), torch.randn(2, 8)
    before = {name: p.clone() for name, p in model.named_parameters()}
    expected = model(x)
    waiting = {id(p) for p in model.blocks.parameters()}
    offloaded = offload.apply(model, "cpu")
    for _ in range(2):
        assert torch.equal(model(x), expected)
    # The very same tensors wait on the host again.
    assert {id(p) for p in model.blocks.parameters()} == waiting
    offloaded.remove()
    offloaded.remove()
    assert torch.equal(model(x), expected)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_failing_block_lets_its_weights_go() -> None:
    model = Model()
    offloaded = offload.apply(model, "cpu")
    with pytest.raises(RuntimeError):
        model.blocks[0](torch.randn(2, 9))
    assert offloaded._waiting == {}
    assert offloaded._bytes == 0


def ready(model: Any, component: str, dtype: str) -> Any:
    """A component of a family with random weights, in a precision, on the CPU."""
    module = model.dry_run_calls(config_only_models.settings(32, 32, 4))
    module = next(each for each in module if each.component == component).module()
    module = module.to_empty(device="cpu").requires_grad_(False)
    state = tiny_opensora.randomised(module, 0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(state[name])
    islands = () if dtype == "float32" else needs(model, component).islands
    cast_hooks.add_cast_hooks(module, Precision(dtype, dtype, islands))
    return module


def needs(model: Any, component: str) -> Any:
    parts = model.components(config_only_models.settings(32, 32, 4))
    return next(each.needs for each in parts if each.name == component)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_offloaded_denoiser_of_opensora_gives_the_same_bits(dtype: str) -> None:
    model = ready(config_only_models.opensora("1.2"), "denoiser", dtype)
    torch.manual_seed(0)
    x, text = torch.randn(1, 4, 2, 4, 4), torch.randn(1, 24, 16)

    def answer() -> Tensor:
        out: Tensor = model(
            x, torch.tensor([500.0]), model.context(text), fps=24.0, height=32.0, width=32.0
        )
        return out

    with torch.no_grad():
        expected = answer()
        offloaded = offload.apply(model, "cpu")
        assert torch.equal(answer(), expected)
    assert 0 < offloaded.most_bytes < sum(p.nbytes for p in model.parameters()) / 2


def test_an_offloaded_unet_of_svd_gives_the_same_bits() -> None:
    model = ready(config_only_models.svd(), "unet", "float32")
    torch.manual_seed(0)
    x = torch.randn(1, 4, 8, 8, 8)

    def answer() -> Tensor:
        context = model.context(torch.ones(1, 16), torch.ones(1, 3), num_frames=4)
        out: Tensor = model(x, torch.tensor([1.0]), context)
        return out

    with torch.no_grad():
        expected = answer()
        offloaded = offload.apply(model, "cpu")
        assert torch.equal(answer(), expected)
    assert offloaded.most_bytes < sum(p.nbytes for p in model.parameters()) / 3


def test_it_makes_no_cycle_of_the_module() -> None:
    model = Model()
    offload.apply(model, "cpu")
    model(torch.randn(2, 8))
    gone = weakref.ref(model.blocks[0])
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def stored(model: nn.Module, folder: Path) -> Path:
    path = folder / "model.safetensors"
    save_file({name: each.contiguous() for name, each in model.state_dict().items()}, path)
    return path


def plan_of(model: nn.Module, dtype: str = "float32", **fields: bool) -> ComponentPlan:
    count = sum(p.numel() for p in model.parameters())
    return ComponentPlan(
        "model", "model", "denoise", "here", count, "cpu", Precision(dtype, dtype),
        count * 4, 0, block_offload=True, **fields,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_stay_in_their_files_give_the_same_bits(dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = Model(12)
    path, x = stored(source, tmp_path), torch.randn(2, 8)
    held, streamed = (
        load_component(plan_of(source, dtype, from_disk=streams), lambda: Model(12), path, KeyMap())
        for streams in (False, True)
    )
    assert streamed.blocks[3].inner.weight.is_meta
    assert not streamed.scale.is_meta
    for _ in range(3):
        assert torch.equal(streamed(x), held(x))
    assert all(p.is_meta for p in streamed.blocks.parameters())


def test_a_file_that_is_wrong_is_reported_before_anything_runs(tmp_path: Path) -> None:
    source = Model(12)
    path = stored(source, tmp_path)
    tensors = load_file(path)
    del tensors["blocks.7.inner.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"blocks\.7\.inner\.weight"):
        load_component(plan_of(source, from_disk=True), lambda: Model(12), path, KeyMap())


def test_a_file_that_is_cut_short_under_a_run_is_reported(tmp_path: Path) -> None:
    """Also where it is read in another thread, for a part that comes later."""
    source = Model(12)
    path = stored(source, tmp_path)
    model = load_component(plan_of(source, from_disk=True), lambda: Model(12), path, KeyMap())
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="truncated"):
        model(torch.randn(2, 8))


def test_what_is_raised_while_it_waits_comes_raised(tmp_path: Path) -> None:
    """What was sent for in the old precision is not taken."""
    torch.manual_seed(0)
    source = Model(12)
    path, x = stored(source, tmp_path), torch.randn(2, 8)
    wide: list[Tensor] = []
    for streams in (False, True):
        plan = plan_of(source, "bfloat16", from_disk=streams)
        model = load_component(plan, lambda: Model(12), path, KeyMap())
        model(x)
        raised = Upcast(model.blocks[0], torch.float32)
        seen: list[Tensor] = []
        model.blocks[0].inner.register_forward_pre_hook(
            lambda part, _, seen=seen: seen.append(part.weight.clone())
        )
        model(x)
        raised.undo()
        model(x)
        assert [each.dtype for each in seen] == [torch.float32, torch.bfloat16]
        wide.append(seen[0])
    # The file has more digits, and raising brings none back.
    assert torch.equal(wide[0], wide[1])


def test_what_is_raised_while_it_is_on_the_device_is_raised_at_its_next_turn_too() -> None:
    """Two experts that take turns: the copy of one is freed when the other is called."""
    torch.manual_seed(0)
    one, other = (nn.Linear(8, 8).half().requires_grad_(False) for _ in range(2))
    wanted, x = [each.clone() for each in one.parameters()], torch.randn(2, 8).half()
    turns = offload.take_turns([one, other], "cpu")
    for _ in range(2):
        one(x)
        raised = Upcast(one, torch.float32)
        for _ in range(2):
            assert (one(x).dtype, held_in(one.weight)) == (torch.float32, torch.float16)
            other(x)
        one(x)
        raised.undo()
        assert one(x).dtype == torch.float16
        other(x)
    assert all(map(torch.equal, one.parameters(), wanted))
    turns.remove()
    assert all(map(torch.equal, one.parameters(), wanted))


def test_the_next_part_is_on_its_way_while_one_computes() -> None:
    model = Model(12)
    came: list[str] = []

    def noted(name: str, waiting: nn.Parameter) -> Tensor:
        came.append(name)
        return waiting.detach().clone()

    offload.apply(model, "cpu", LocalWeightsProvider(noted, torch.device("cpu")))
    seen: list[bool] = []

    def look(*_: object) -> None:
        deadline = time.monotonic() + 120
        while not (there := "blocks.6.table" in came) and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(there)

    model.blocks[5].inner.register_forward_pre_hook(look)
    model(torch.randn(2, 8))
    assert seen == [True]


def test_weights_of_the_second_card_come_in_a_thread_that_uses_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread begins on the first card, and what it does there takes hundreds of MB of it."""
    current: dict[str, int] = {}
    second = torch.device("cuda:1")

    class Event:
        def synchronize(self) -> None:
            pass

    class Stream(Event):
        device = second

        def __init__(self, device: torch.device) -> None:
            assert device == second

        def record_event(self) -> Event:
            return Event()

    @contextmanager
    def in_stream(_: Stream) -> Iterator[None]:
        yield
        here = threading.current_thread().name
        current.setdefault(here, 0)  # torch selects the card that was current before

    def select(card: int) -> None:
        current[threading.current_thread().name] = card

    for name, planted in {
        "Stream": Stream, "stream": in_stream, "current_stream": Stream, "set_device": select,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, planted)
    provider = LocalWeightsProvider(lambda _, waiting: waiting.detach(), second)
    coming = provider.send_for({"weight": nn.Parameter(torch.ones(1))})
    assert coming is not None
    coming.cancel()
    assert list(current.values()) == [1]
