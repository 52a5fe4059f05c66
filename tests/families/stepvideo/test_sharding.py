"""Step-Video's denoiser on several ranks gives what the bare one gives, with bytes and work of its
share; by heads and in a ring.

In float64, so that a wrong cut can't hide behind rounding: two sums in another order differ by
1e-15 or so, whatever is wrong by far more. One rank is compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from everyframe.core.plan import Precision
from everyframe.families.stepvideo import sharding
from everyframe.families.stepvideo.components import DENOISER_ISLANDS, rank_share
from everyframe.families.stepvideo.config import StepVideoModelConfig
from everyframe.families.stepvideo.model import StepVideoModel
from everyframe.families.stepvideo.sharding import Sharding
from everyframe.ops.attention import attention
from everyframe.parallel import ring_attention
from everyframe.parallel.communicator import Communicator, FakeCommunicator, SingleRank
from everyframe.parallel.head_partition import ATTENDING
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from everyframe.precision import cast_hooks
from helpers.rank_pool import Group, in_every_size, ranks
from helpers.sharded_calls import RELATIVE, answered, worst

__all__ = ["ranks"]

CONFIG = StepVideoModelConfig(
    num_attention_heads=3,
    attention_head_dim=16,
    in_channels=4,
    out_channels=4,
    num_layers=2,
    caption_channels=(12, 10),
)
LLM, CLIP = 6, 3

#: Latents (B, T, H, W), and text tokens of each sample, CLIP's three counted in.
CASES: dict[str, tuple[tuple[int, int, int, int], tuple[int, ...]]] = {
    "two branches, ragged texts": ((2, 3, 3, 5), (4, 9)),
    "one branch": ((1, 3, 4, 4), (9,)),
    "three samples, an empty text": ((3, 2, 1, 3), (0, 7, 5)),
    "a picture": ((2, 1, 3, 4), (5, 5)),
    "fewer tokens than ranks": ((1, 1, 1, 2), (4,)),
}


@lru_cache(maxsize=2)
def model_of(width: int = 16) -> StepVideoModel:
    """In float64, every parameter drawn, so that no branch is silent."""
    model = StepVideoModel(CONFIG).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * 0.2)
    return model.eval().requires_grad_(False)


def given(case: str) -> dict[str, Tensor]:
    (batch, frames, height, width), lengths = CASES[case]
    generator = torch.Generator().manual_seed(2)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "x": randn(batch, 4, frames, height, width),
        "t": torch.linspace(0.1, 0.9, batch).double(),
        "llm": randn(batch, LLM, 12),
        "clip": randn(batch, CLIP, 10),
        "mask": (torch.arange(LLM + CLIP) < torch.tensor(lengths)[:, None]).long(),
    }


def answer(model: StepVideoModel, inputs: dict[str, Tensor]) -> Tensor:
    context = model.context(inputs["llm"], inputs["clip"], inputs["mask"])
    out: Tensor = model(inputs["x"], inputs["t"], context)
    return out


def sharded(
    team: Communicator,
    way: str,
    case: str,
    groups: int = 1,
    fault: Callable[..., Any] | None = None,
    count: bool = False,
) -> dict[str, Any]:
    """One rank's answer, the bytes that left it and, with `count`, its operations."""
    model, inputs = model_of(), given(case)
    put_on = sharding.apply(model, team, groups, way)
    undo = fault(put_on, inputs, team) if fault is not None else None
    return answered(team, put_on, undo, lambda: answer(model, inputs), count=count)


def bare(case: str) -> Tensor:
    with torch.inference_mode():
        return answer(model_of(), given(case))


@in_every_size
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ATTENDING)
def test_any_number_of_ranks_gives_the_bare_models_answer(
    ranks: Group, size: int, way: str, case: str
) -> None:
    found, wanted = ranks.run(size, sharded, way, case), bare(case)
    assert worst(found, wanted) < RELATIVE
    if size == 1:
        assert torch.equal(found[0]["out"], wanted)


@pytest.mark.parametrize("way", ATTENDING)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_branches_apart(ranks: Group, size: int, way: str) -> None:
    """Ranks of their own for each sample; also three for two."""
    case = "two branches, ragged texts"
    found = ranks.run(size, sharded, way, case, groups=2)
    assert worst(found, bare(case)) < RELATIVE
    if size == 2:  # a branch each: the last projection alone is sent, and the bits are those
        assert {what for each in found for what, n in each["sent"].items() if n} == {
            "the last projection is gathered"
        }


@pytest.mark.parametrize("weights", [(24.0, 8.0), (1.0, 2.0, 0.5), (1.0, 0.0)])
@pytest.mark.parametrize("way", ATTENDING)
def test_unequal_shares(ranks: Group, way: str, weights: tuple[float, ...]) -> None:
    case = "two branches, ragged texts"
    found = ranks.run(len(weights), sharded, way, case, weights=weights)
    assert worst(found, bare(case)) < RELATIVE


# ---------------------------------------------------------------- bytes and work


@pytest.mark.slow
@pytest.mark.parametrize("way", ATTENDING)
def test_real_ranks_send_and_compute_what_imagined_ones_do(ranks: Group, way: str) -> None:
    case = "two branches, ragged texts"
    for rank, found in enumerate(ranks.run(3, sharded, way, case, count=True)):
        imagined = sharded(FakeCommunicator(rank, (1.0,) * 3), way, case, count=True)
        assert imagined["sent"] == found["sent"]
        assert imagined["operations"] == found["operations"]


@pytest.mark.parametrize(("way", "size"), [("ulysses", 3), ("ring", 3), ("ring", 6)])
def test_bytes_are_those_of_the_formula(way: str, size: int) -> None:
    """Four units a block by heads, where a unit is tokens * width * bytes * (P - 1) / P^2."""
    CASES["counted"] = ((1, 3, 4, 6), (9,))
    tokens = 72
    unit = Fraction(tokens * CONFIG.hidden_size * 8 * (size - 1), size**2)
    wanted = {"ulysses": 4 * unit, "ring": 2 * unit * size}
    try:
        sent = sharded(FakeCommunicator(0, (1.0,) * size), way, "counted")["sent"]
        last = sent.pop("the last projection is gathered")
        assert sum(sent.values()) == CONFIG.num_layers * wanted[way]
        assert last == tokens // size * 4 * 8 * (size - 1)
    finally:
        del CASES["counted"]


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0, 1.0), (3.0, 1.0), (1.0,) * 7])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("way", ATTENDING)
def test_the_plans_bytes_are_those_that_are_counted(
    way: str, weights: tuple[float, ...], groups: int
) -> None:
    groups = min(groups, len(weights))
    deal = TokenPartition(TokenGrid(2, CONFIG.num_attention_heads, 3 * 3 * 5), weights, groups)
    for rank in {0, len(weights) - 1}:
        team = FakeCommunicator(rank, weights)
        counted = sharded(team, way, "two branches, ragged texts", groups)["sent"]
        # float64 here, float32 in a run; a rank alone gathers nothing.
        last = counted.pop("the last projection is gathered", 0) // 2
        part = rank_share(CONFIG, deal, way, rank, 8)
        assert part.sent_bytes == sum(counted.values()) + last


def test_half_precision_sends_half_precision() -> None:
    sent: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        model = StepVideoModel(CONFIG).eval()
        cast_hooks.add_cast_hooks(
            model, Precision(dtype, dtype, DENOISER_ISLANDS if dtype != "float32" else ())
        )
        for way in ATTENDING:
            team = FakeCommunicator(0, (1.0, 1.0))
            put_on = sharding.apply(model, team, way=way)
            context = model.context(
                torch.zeros(1, LLM, 12), torch.zeros(1, CLIP, 10), torch.ones(1, LLM + CLIP)
            )
            with torch.inference_mode():
                model(torch.zeros(1, 4, 4, 4, 4), torch.zeros(1), context)
            put_on.remove()
            last = team.sent.pop("the last projection is gathered")
            sent[dtype, way] = (team.sent.total(), last)
    for way in ATTENDING:
        assert sent["bfloat16", way][0] * 2 == sent["float32", way][0] > 0
        assert sent["bfloat16", way][1] == sent["float32", way][1]  # the last layer is an island


@pytest.mark.parametrize(
    "size", [pytest.param(n, marks=[pytest.mark.slow] * (n != 3)) for n in range(1, 9)]
)
@pytest.mark.parametrize("way", ATTENDING)
def test_every_rank_does_its_share(size: int, way: str) -> None:
    """Of what belongs to tokens, and the timestep's embedding, which all have."""
    CASES["large"] = ((2, 5, 4, 8), (9, 4))
    try:
        whole = sharded(SingleRank(), way, "large", count=True)["operations"]
        for rank in {0, size - 1}:
            team = FakeCommunicator(rank, (1.0,) * size)
            mine = sharded(team, way, "large", count=True)["operations"]
            assert mine <= 1.1 * whole / size
    finally:
        del CASES["large"]


# ---------------------------------------------------------------- planted faults


def other_noise(put_on: Sharding, inputs: dict[str, Tensor], team: Communicator) -> None:
    """The last rank begins with other noise, in one number."""
    if team.rank == team.size - 1:
        inputs["x"][-1, 0, -1, -1, -1] += 1e-6


def dropped_mask(put_on: Sharding, inputs: dict[str, Tensor], team: Communicator) -> None:
    """The first rank looks at all text tokens."""
    if team.rank == 0:
        inputs["mask"][:] = 1


def wrong_samples(put_on: Sharding, inputs: dict[str, Tensor], team: Communicator) -> None:
    """The last rank takes the texts of the samples for each other's."""
    if team.rank == team.size - 1:
        for name in ("llm", "clip", "mask"):
            inputs[name] = inputs[name].flip(0)


def own_positions(put_on: Sharding, inputs: dict[str, Tensor], team: Communicator) -> Any:
    """The last rank counts positions from its own first token."""
    handle = model_of().rope.register_forward_hook(
        lambda rope, args, table: table._replace(
            cos=table.cos.roll(1, 0) if team.rank == team.size - 1 else table.cos
        )
    )
    return handle.remove


def padding(put_on: Sharding, inputs: dict[str, Tensor], team: Communicator) -> Any:
    """The first rank's attention sees a key of zeros behind the others."""
    if team.rank:
        return None
    inner = ring_attention.partial_attention

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2)

    def partial(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Any:
        return inner(q, padded(k), padded(v), mask)

    ring_attention.partial_attention = partial  # type: ignore[attr-defined]
    core = model_of().transformer_blocks[0].attn1.core.inner  # type: ignore[union-attr]
    kept = type(core).forward

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        return attention(q, padded(k), padded(v)) if self is core else kept(self, q, k, v, mask)

    type(core).forward = forward  # type: ignore[method-assign]

    def undo() -> None:
        ring_attention.partial_attention = inner  # type: ignore[attr-defined]
        type(core).forward = kept  # type: ignore[method-assign]

    return undo


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", ATTENDING)
@pytest.mark.parametrize(
    "fault", [other_noise, dropped_mask, wrong_samples, own_positions, padding]
)
def test_a_planted_fault_is_seen(ranks: Group, size: int, way: str, fault: Any) -> None:
    case = "two branches, ragged texts"
    found = ranks.run(size, sharded, way, case, fault=fault)
    assert worst(found, bare(case)) > 100 * RELATIVE


def everything(put_on: Sharding, inputs: dict[str, Tensor], team: Communicator) -> None:
    """A rank computes it all by itself: the answer is right."""
    put_on.team = SingleRank()


def test_a_rank_that_computes_everything_is_seen() -> None:
    case = "two branches, ragged texts"
    whole = sharded(SingleRank(), "ulysses", case, count=True)["operations"]
    found = sharded(FakeCommunicator(1, (1.0,) * 3), "ulysses", case, fault=everything, count=True)
    assert worst([found], bare(case)) < RELATIVE
    assert found["operations"] > 1.1 * whole / 3
    assert not found["sent"]


@pytest.mark.parametrize("way", ATTENDING)
def test_apart_a_rank_computes_alone_what_one_device_does(way: str) -> None:
    """Where a fault is looked for: nothing is sent, and the bits are those of the bare model."""
    case, team = "two branches, ragged texts", FakeCommunicator(2, (1.0,) * 3)
    put_on = sharding.apply(model_of(), team, way=way)
    try:
        with torch.inference_mode(), put_on.apart():
            out = answer(model_of(), given(case))
    finally:
        put_on.remove()
    assert torch.equal(out, bare(case))
    assert not team.sent


def test_it_is_taken_off_again() -> None:
    model = model_of()
    before = {name: type(part) for name, part in model.named_modules()}
    put_on = sharding.apply(model, SingleRank())
    assert {name: type(part) for name, part in model.named_modules()} != before
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in StepVideoModel(CONFIG).named_parameters()
    ]
    put_on.remove()
    assert {name: type(part) for name, part in model.named_modules()} == before
    assert not any(p._forward_hooks or p._forward_pre_hooks for p in model.modules())
