"""Weights that ranks keep between them: the same bits, about 1/N on each, read once.

What is compared is the module with all of its weights, bit for bit: nothing is summed otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from everyframe.checkpoints.key_map import KeyMap
from everyframe.checkpoints.tensor_file import TensorFile
from everyframe.core.plan import ComponentPlan, Precision
from everyframe.families.opensora import sharding as of_opensora
from everyframe.families.opensora.components import build_model
from everyframe.families.opensora.config import STDiT3Config
from everyframe.families.stepvideo import sharding as of_stepvideo
from everyframe.families.stepvideo.config import StepVideoModelConfig
from everyframe.families.stepvideo.model import StepVideoModel
from everyframe.families.svd import sharding as of_svd
from everyframe.families.svd import unet
from everyframe.parallel.communicator import Communicator, ParallelContext
from everyframe.precision.quantization import QuantizedLinear
from everyframe.precision.upcast import Upcast
from everyframe.runtime.loading import load_component
from everyframe.runtime.memory import offload, weight_sharding
from everyframe.runtime.memory.weight_sharding import (
    WEIGHTS,
    ShardedWeightsProvider,
    assign_units,
    sharded_bytes,
)
from helpers.rank_pool import Group, group_of, in_every_size, sizes_of, supply_of
from helpers.tiny_checkpoints import opensora as tiny_opensora

WIDE = Precision("float32", "float32")
DEPTH, WIDTH = 12, 8


class Block(nn.Module):
    """A block with a parameter of its own beside its layers; one of them is called from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.text = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * self.table
        return out


class Model(nn.Module):
    """Blocks in an order that may be turned round, so that what was sent for is not wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor, is_turned: bool = False) -> Tensor:
        blocks = list(reversed(self.blocks)) if is_turned else list(self.blocks)
        texts = [block.text(x) for block in blocks]
        for block, text in zip(blocks, texts, strict=True):
            x = block(x) + text
        return x * self.scale


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Group]:
    yield from group_of(sizes_of(request), supplied=True)


# ---------------------------------------------------------------- who keeps what


def test_each_unit_has_one_holder_and_all_have_about_as_much() -> None:
    sizes = {"a": 3, "b": 10, "c": 4, "d": 4, "e": 2}
    assert assign_units(sizes, [1]) == dict.fromkeys(sizes, 0)
    found = assign_units(sizes, [1, 1])
    assert found == assign_units(dict(sizes), [3, 3])
    kept = [sum(sizes[unit] for unit in sizes if found[unit] == rank) for rank in range(2)]
    assert sorted(kept) == [11, 12]
    # Of ranks with unequal room each has its part of it, and one without room none.
    found = assign_units(dict.fromkeys("abcdefghijkl", 5), [3, 0, 1])
    assert [list(found.values()).count(rank) for rank in range(3)] == [9, 0, 3]
    # More ranks than units: some keep nothing, and none of them is missed.
    assert sorted(assign_units(sizes, [1] * 7).values()) == [0, 1, 2, 3, 4]


def stored(folder: Path) -> tuple[Model, Path]:
    torch.manual_seed(0)
    model, path = Model(), folder / "model.safetensors"
    save_file(model.state_dict(), path)
    return model, path


def loaded(
    group: Communicator, path: str, dtype: str = "float32", kind: str = ""
) -> tuple[Any, list[str]]:
    """The model on this rank of those that keep it between them, and the tensors that it read."""
    read: list[str] = []
    original = TensorFile.load

    def noted(self: Any, name: str, *given: Any) -> Tensor:
        read.append(name)
        return original(self, name, *given)

    plan = ComponentPlan(
        "model", "model", "denoise", "here", 0, "cpu", Precision(dtype, dtype, weight_dtype=kind),
        0, 0, num_weight_shards=group.size,
    )  # fmt: skip
    TensorFile.load = noted  # type: ignore[method-assign]
    try:
        return load_component(plan, Model, Path(path), KeyMap(), supply=supply_of(group)), read
    finally:
        TensorFile.load = original  # type: ignore[method-assign]


def held(group: Communicator, path: str, fault: Any = None) -> dict[str, Any]:
    """One rank's answers, what it has of the weights, and what it read and sent for them."""
    undo = fault() if fault is not None else None
    try:
        model, read = loaded(group, path)
    finally:
        if undo is not None:
            undo()
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    turned = [model(x, is_turned) for is_turned in (False, False, True)]
    return {
        "out": turned,
        "read": read,
        "kept": sum(p.nbytes for p in model.blocks.parameters() if not p.is_meta),
        "here": sum(p.nbytes for p in model.parameters() if not p.is_meta),
    }


def check_kept(found: list[dict[str, Any]], source: Model) -> None:
    """Each has about 1/N of the units, between them they have each once, and read nothing else."""
    unit = sum(p.nbytes for p in source.blocks[0].parameters())
    for each in found:
        assert each["kept"] <= -(-DEPTH // len(found)) * unit
        assert each["here"] == each["kept"] + source.scale.nbytes
    assert sum(each["kept"] for each in found) == DEPTH * unit
    read = sorted(name for each in found for name in each["read"] if name.startswith("blocks"))
    assert read == sorted(name for name in source.state_dict() if name.startswith("blocks"))


@in_every_size
def test_the_same_bits_from_a_part_of_the_weights(ranks: Group, size: int, tmp_path: Path) -> None:
    source, path = stored(tmp_path)
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    wanted = [source(x, is_turned) for is_turned in (False, False, True)]
    found = ranks.run(size, held, str(path))
    for each in found:
        assert all(torch.equal(a, b) for a, b in zip(each["out"], wanted, strict=True))
    check_kept(found, source)


def held_by_room(group: Communicator, path: str, room: list[float]) -> dict[str, Any]:
    """As `held`, of ranks that have unequal room."""
    own, group.weights = group.weights, tuple(room)
    try:
        return held(group, path)
    finally:
        group.weights = own


def test_ranks_of_unequal_room_keep_unequal_parts(ranks: Group, tmp_path: Path) -> None:
    source, path = stored(tmp_path)
    unit = sum(p.nbytes for p in source.blocks[0].parameters())
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    wanted = [source(x, is_turned) for is_turned in (False, False, True)]
    found = ranks.run(2, held_by_room, str(path), [3.0, 1.0])
    assert [each["kept"] // unit for each in found] == [9, 3]
    for each in found:
        assert all(torch.equal(a, b) for a, b in zip(each["out"], wanted, strict=True))


def _first_keeps_all() -> Any:
    original = weight_sharding.assign_units
    weight_sharding.assign_units = lambda sizes, room: dict.fromkeys(sizes, 0)
    return lambda: setattr(weight_sharding, "assign_units", original)


def test_a_rank_that_keeps_everything_is_seen(ranks: Group, tmp_path: Path) -> None:
    source, path = stored(tmp_path)
    found = ranks.run(2, held, str(path), _first_keeps_all)
    with pytest.raises(AssertionError):
        check_kept(found, source)


def in_eight_bits(group: Communicator, path: str, kind: str) -> dict[str, Any]:
    """One rank's answer by weights in eight bits, and what it keeps of them."""
    model, _ = loaded(group, path, kind=kind)
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    kept = sum(p.nbytes for p in model.blocks.parameters() if not p.is_meta)
    kinds = {type(block.inner) for block in model.blocks}
    return {"out": [model(x), model(x, is_turned=True)], "kept": kept, "kinds": kinds}


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_weights_in_eight_bits_are_kept_by_ranks_too(
    ranks: Group, tmp_path: Path, kind: str
) -> None:
    """The same bits as of one rank that has all of them in eight bits, and not those of floats."""
    source, path = stored(tmp_path)
    (whole,) = ranks.run(1, in_eight_bits, str(path), kind)
    found = ranks.run(3, in_eight_bits, str(path), kind)
    expected = sharded_bytes(source, Precision("float32", "float32", weight_dtype=kind), [1] * 3)
    for each, kept in zip(found, expected, strict=True):
        assert each["kinds"] == {QuantizedLinear}
        assert all(torch.equal(a, b) for a, b in zip(each["out"], whole["out"], strict=True))
        assert each["kept"] == kept
    assert sum(expected) == whole["kept"] < 0.6 * sum(p.nbytes for p in source.blocks.parameters())
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    assert not torch.equal(found[0]["out"][0], source(x))


def sent(group: Communicator, path: str) -> dict[str, Any]:
    """What leaves this rank in a pass, and the most that came at once."""
    supply = supply_of(group)
    model = Model().requires_grad_(False)
    provider = ShardedWeightsProvider(model, supply, torch.device("cpu"))
    offloaded = offload.apply(model, "cpu", provider)
    x, counts = torch.zeros(1, WIDTH), []
    for _ in range(3):
        before = supply.sent[WEIGHTS]
        model(x)
        counts.append(supply.sent[WEIGHTS] - before)
    offloaded.remove()
    return {"sent": counts, "most": offloaded.most_bytes}


def test_what_is_sent_is_what_is_reported(ranks: Group, tmp_path: Path) -> None:
    """Every unit once a pass, to each of the others; texts come beside, so layers of them again."""
    model = Model()
    unit = sum(p.nbytes for p in model.blocks[0].parameters())
    text = sum(p.nbytes for p in model.blocks[0].text.parameters())
    found = ranks.run(3, sent, "")
    expected = sharded_bytes(model, WIDE, [1] * 3)
    assert sum(expected) == DEPTH * unit
    for each, kept in zip(found, expected, strict=True):
        # What comes first is sent for by the end of the pass before, from the second one on.
        assert each["sent"][2] == 2 * (kept + DEPTH // 3 * text)
        assert unit <= each["most"] <= 2 * unit


def raised(group: Communicator, path: str) -> list[Any]:
    """Answers, and the precision that a block computes in: as it is, raised, as it was."""
    model, _ = loaded(group, path, "bfloat16")
    seen: list[torch.dtype] = []
    model.blocks[5].inner.register_forward_pre_hook(lambda part, _: seen.append(part.weight.dtype))
    x = torch.ones(1, WIDTH)
    out = [model(x)]
    repair = Upcast(model.blocks[5], torch.float32)
    out.append(model(x))
    repair.undo()
    return [*out, model(x), seen]


def test_what_is_raised_comes_raised_from_whoever_keeps_it(ranks: Group, tmp_path: Path) -> None:
    _, path = stored(tmp_path)
    (wanted,) = ranks.run(1, raised, str(path))
    assert wanted[-1] == [torch.bfloat16, torch.float32, torch.bfloat16]
    for found in ranks.run(2, raised, str(path)):
        assert found[-1] == wanted[-1]
        assert all(torch.equal(a, b) for a, b in zip(found[:-1], wanted[:-1], strict=True))


# ---------------------------------------------------------------- the families' denoisers


def randn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def opensora() -> tuple[Any, Callable[[Any], Tensor], Callable[..., Any]]:
    """Two branches of 3 frames of 2x2 places, one of them the null text."""
    sizes: dict[str, Any] = {"hidden_size": 32, "depth": 3, "num_heads": 2}
    model = build_model(STDiT3Config(**sizes, caption_channels=12, model_max_length=6))

    def answer(model: Any) -> Tensor:
        text = torch.cat([randn(1, 6, 12), model.null_text()[None]])
        context = model.context(text, torch.ones(2, 6, dtype=torch.bool))
        x = randn(1, 4, 3, 4, 4).expand(2, -1, -1, -1, -1)
        out: Tensor = model(x, torch.ones(2).double(), context, fps=12.0, height=32.0, width=32.0)
        return out

    return model, answer, of_opensora.Sharding


def stepvideo() -> tuple[Any, Callable[[Any], Tensor], Callable[..., Any]]:
    """Two branches of 12 tokens."""
    model = StepVideoModel(
        StepVideoModelConfig(
            num_attention_heads=3,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            caption_channels=(12, 10),
        )
    )

    def answer(model: Any) -> Tensor:
        context = model.context(randn(2, 6, 12), randn(2, 3, 10), torch.ones(2, 9).long())
        out: Tensor = model(randn(2, 4, 3, 2, 2), torch.tensor([0.1, 0.9]).double(), context)
        return out

    return model, answer, of_stepvideo.Sharding


def svd() -> tuple[Any, Callable[[Any], Tensor], Callable[..., Any]]:
    """One branch of 2 frames of 3x2 and of 2x1 pixels: some ranks have no frames, or no pixels."""
    sizes: dict[str, Any] = {
        "block_out_channels": (32, 64), "layers_per_block": 1, "num_attention_heads": 2,
        "cross_attention_dim": 16, "projection_class_embeddings_input_dim": 24,
        "addition_time_embed_dim": 8,
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    }  # fmt: skip
    model = unet.build(sizes)

    def answer(model: Any) -> Tensor:
        context = model.context(randn(1, 16), randn(1, 3), 2)
        out: Tensor = model(randn(1, 2, 8, 3, 2), torch.tensor([0.4]).double(), context)
        return out

    return model, answer, of_svd.Sharding


MODELS = {"opensora": opensora, "stepvideo": stepvideo, "svd": svd}


def answers(group: Communicator, name: str) -> dict[str, Any]:
    """A denoiser on this rank with all of its weights, then with its part of them, twice."""
    model, answer, put = MODELS[name]()
    model.load_state_dict(tiny_opensora.randomised(model, 0))
    model = model.double().eval().requires_grad_(False)
    whole = sum(p.nbytes for p in model.parameters())
    patch = put(model, ParallelContext(group, group))
    before = answer(model)
    patch.remove()
    provider = ShardedWeightsProvider(model, supply_of(group), torch.device("cpu"))
    for each in provider.elsewhere:
        part, _, own = each.rpartition(".")
        layer = model.get_submodule(part)
        layer._parameters[own] = nn.Parameter(layer._parameters[own].to("meta"), False)
    offloaded = offload.apply(model, "cpu", provider)
    patch = put(model, ParallelContext(group, group))
    after = [answer(model) for _ in range(2)]
    here = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    with patch.unsharded():  # as when a fault is looked for
        alone = answer(model)
    return {
        "same": [torch.equal(each, before) for each in after],
        "alone": alone,
        "share": (here + offloaded.most_bytes) / whole,
    }


FAST = {("opensora", 2), ("stepvideo", 3), ("svd", 3)}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if (name, size) in FAST else pytest.mark.slow)
        for name in MODELS
        for size in range(2, 9)
    ],
)
def test_a_denoiser_on_ranks_is_the_same_with_a_part_of_its_weights(
    ranks: Group, name: str, size: int
) -> None:
    """In float64, so that what differs by a bit is seen; ranks without tokens among them."""
    model, answer, _ = MODELS[name]()
    model.load_state_dict(tiny_opensora.randomised(model, 0))
    with torch.no_grad():
        wanted = answer(model.double().eval())
    for each in ranks.run(size, answers, name):
        assert all(each["same"])
        assert torch.equal(each["alone"], wanted), "one device, to the bit"
        assert each["share"] < 1 / size + 0.35
