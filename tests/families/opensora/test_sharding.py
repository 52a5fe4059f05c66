"""A denoiser on several ranks gives what the bare one gives, with the bytes and work of its share.

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
from torch import Tensor, nn

from everyframe.core.plan import Precision
from everyframe.families.opensora import sharding
from everyframe.families.opensora.components import build_model, sent_bytes
from everyframe.families.opensora.config import STDiT3Config, STDiTConfig
from everyframe.families.opensora.sharding import Sharding
from everyframe.parallel.communicator import Communicator, FakeCommunicator, SingleRank
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from everyframe.precision import cast_hooks
from helpers.rank_pool import Group, in_every_size, ranks
from helpers.sharded_calls import RELATIVE, answered, worst

__all__ = ["ranks"]

HIDDEN, DEPTH, LENGTH, CAPTION = 32, 2, 6, 12
KINDS = {"1.0": STDiTConfig, "1.2": STDiT3Config}

#: Latents (B, T, H, W), real text tokens of each sample, frames that are given: the first of them
#: to every sample, the second to the last one.
CASES: dict[str, tuple[tuple[int, int, int, int], tuple[int, ...], tuple[int, ...]]] = {
    "16 frames": ((2, 16, 6, 8), (6, 6), ()),
    "15 frames, odd sides, ragged texts": ((2, 15, 5, 7), (2, 6), ()),
    "three samples, an empty text": ((3, 2, 4, 6), (0, 3, 5), ()),
    "a given frame": ((2, 4, 6, 4), (3, 4), (0, 2)),
    "a picture": ((2, 1, 6, 6), (5, 5), ()),
    "one sample": ((1, 5, 6, 6), (4,), (0, 4)),
    "one token a frame": ((1, 3, 2, 2), (3,), ()),
}


@lru_cache(maxsize=4)
def model_of(version: str) -> Any:
    """In float64, every parameter drawn, so that no branch is silent."""
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "depth": DEPTH, "num_heads": 2}
    model = build_model(
        KINDS[version](**sizes, caption_channels=CAPTION, model_max_length=LENGTH)
    ).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval().requires_grad_(False)


def given(version: str, case: str) -> dict[str, Any]:
    (batch, frames, height, width), lengths, kept = CASES[case]
    generator = torch.Generator().manual_seed(2)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs: dict[str, Any] = {
        "x": randn(batch, 4, frames, height, width),
        "t": torch.linspace(10, 900, batch).double(),
        "text": randn(batch, LENGTH, CAPTION),
        "mask": torch.arange(LENGTH) < torch.tensor(lengths)[:, None],
    }
    if version == "1.2":
        inputs["fps"], inputs["width"] = 12.0, 96.0
        inputs["height"] = torch.linspace(64, 128, batch)  # positions of each sample's own
        if kept:
            mask = torch.ones(batch, frames, dtype=torch.bool)
            mask[:, kept[0]] = mask[-1, kept[1]] = False
            inputs["x_mask"] = mask
    return inputs


def answer(model: Any, inputs: dict[str, Any]) -> Tensor:
    rest = {k: v for k, v in inputs.items() if k not in ("x", "t", "text", "mask")}
    context = model.context(inputs["text"], inputs["mask"])
    out: Tensor = model(inputs["x"], inputs["t"], context, **rest)
    return out


def sharded(
    team: Communicator,
    version: str,
    case: str,
    groups: int = 1,
    fault: Callable[..., Any] | None = None,
    count: bool = False,
) -> dict[str, Any]:
    """One rank's answer, the bytes that left it and, with `count`, its operations."""
    model, inputs = model_of(version), given(version, case)
    put_on = sharding.apply(model, team, groups)
    undo = fault(model, put_on, inputs, team) if fault is not None else None
    return answered(team, put_on, undo, lambda: answer(model, inputs), count=count)


def bare(version: str, case: str) -> Tensor:
    with torch.inference_mode():
        return answer(model_of(version), given(version, case))


@in_every_size
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", KINDS)
def test_any_number_of_ranks_gives_the_bare_models_answer(
    ranks: Group, size: int, version: str, case: str
) -> None:
    found, wanted = ranks.run(size, sharded, version, case), bare(version, case)
    assert worst(found, wanted) < RELATIVE
    if size == 1:
        assert torch.equal(found[0]["out"], wanted)


@pytest.mark.parametrize("version", KINDS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_branches_apart(ranks: Group, size: int, version: str) -> None:
    """Ranks of their own for each sample; also three for two."""
    case = "15 frames, odd sides, ragged texts"
    found = ranks.run(size, sharded, version, case, groups=2)
    assert worst(found, bare(version, case)) < RELATIVE
    if size == 2:
        assert all(each["sent"]["frames are gathered"] == 0 for each in found)


@pytest.mark.parametrize("weights", [(24.0, 8.0), (1.0, 2.0, 0.5), (1.0, 0.0)])
@pytest.mark.parametrize("version", KINDS)
def test_unequal_shares(ranks: Group, version: str, weights: tuple[float, ...]) -> None:
    case = "a given frame"
    found = ranks.run(len(weights), sharded, version, case, weights=weights)
    assert worst(found, bare(version, case)) < RELATIVE


# ---------------------------------------------------------------- bytes and work


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_bytes_are_two_units_a_pair(size: int) -> None:
    """A unit is tokens * width * bytes * (P - 1) / P^2; counted by ranks that `sharded` imagines.

    That real ones send the same is tested with `FakeCommunicator` itself. Sizes that divide by all.
    """
    grid, pairs = TokenGrid(1, 12, 36), DEPTH
    CASES["counted"] = ((1, 12, 12, 12), (6,), ())
    unit = Fraction(grid.num_tokens * HIDDEN * 8 * (size - 1), size**2)
    for version in KINDS:
        sent = sharded(FakeCommunicator(0, (1.0,) * size), version, "counted")["sent"]
        last = sent.pop("the last projection is gathered")
        assert sum(sent.values()) == 2 * pairs * unit
        # 8 channels of a 1x2x2 patch, once, of this rank's tokens, to each other one.
        assert last == grid.num_tokens // size * 32 * 8 * (size - 1)
    del CASES["counted"]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_real_ranks_send_what_imagined_ones_do(ranks: Group, size: int) -> None:
    case = "15 frames, odd sides, ragged texts"
    for rank, found in enumerate(ranks.run(size, sharded, "1.2", case, count=True)):
        imagined = sharded(FakeCommunicator(rank, (1.0,) * size), "1.2", case, count=True)
        assert imagined["sent"] == found["sent"]
        assert imagined["operations"] == found["operations"]


def test_half_precision_sends_half_precision() -> None:
    """The stream is float32; what is exchanged of it has the dtype of the next product."""
    sent = {}
    for dtype in ("float32", "bfloat16"):
        model = build_model(
            STDiT3Config(hidden_size=HIDDEN, depth=1, num_heads=2, caption_channels=CAPTION)
        ).eval()
        cast_hooks.add_cast_hooks(
            model, Precision(dtype, dtype, ("final_layer",) if dtype != "float32" else ())
        )
        team = FakeCommunicator(0, (1.0, 1.0))
        sharding.apply(model, team)
        context = model.context(torch.zeros(1, 3, CAPTION))
        with torch.inference_mode():
            model(torch.zeros(1, 4, 4, 4, 4), torch.zeros(1), context, fps=8, height=64, width=64)
        sent[dtype] = team.sent["frames are gathered"] + team.sent["frames are given back"]
    assert sent["bfloat16"] * 2 == sent["float32"] > 0


def share(size: int, rank: int, case: str) -> float:
    """What a rank has to do: its columns, or its rows where that is more."""
    (batch, frames, height, width), _, _ = CASES[case]
    grid = TokenGrid(batch, frames, -(-height // 2) * -(-width // 2))
    deal = TokenPartition(grid, (1.0,) * size)
    columns = len(deal.columns[rank]) / (grid.samples * grid.places)
    return max(columns, len(deal.rows[rank]) / (grid.samples * grid.frames))


@pytest.mark.parametrize(
    "size", [pytest.param(n, marks=[pytest.mark.slow] * (n != 3)) for n in range(1, 9)]
)
@pytest.mark.parametrize("version", KINDS)
def test_every_rank_does_its_share(size: int, version: str) -> None:
    case = "16 frames"
    whole = sharded(SingleRank(), version, case, count=True)["operations"]
    for rank in range(size):
        mine = sharded(FakeCommunicator(rank, (1.0,) * size), version, case, count=True)[
            "operations"
        ]
        assert mine <= 1.1 * share(size, rank, case) * whole


# ---------------------------------------------------------------- planted faults


def other_noise(model: Any, put_on: Sharding, inputs: dict[str, Any], team: Communicator) -> None:
    """The last rank begins with other noise, in one number."""
    if team.rank == team.size - 1:
        inputs["x"][-1, 0, 0, -1, -1] += 1e-6


def padding(model: Any, put_on: Sharding, inputs: dict[str, Any], team: Communicator) -> Any:
    """Frames get a place of zeros behind their own, so that they divide; attention sees it."""

    def pad(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (torch.cat([args[0], torch.zeros_like(args[0][:, :, :1])], dim=2), *args[1:])

    def cut(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return out[:, :, :-1]

    blocks = getattr(model, "blocks", None) or model.spatial_blocks
    attention = blocks[0].attn
    before = attention.register_forward_pre_hook(pad)
    after = attention.register_forward_hook(cut, prepend=True)

    def undo() -> None:
        before.remove()
        after.remove()

    return undo


def dropped_mask(model: Any, put_on: Sharding, inputs: dict[str, Any], team: Communicator) -> None:
    """The first rank looks at all text tokens."""
    if team.rank == 0:
        inputs["mask"][:] = True


def dropped_frames_mask(
    model: Any, put_on: Sharding, inputs: dict[str, Any], team: Communicator
) -> None:
    """The first rank does not know which frames are given."""
    if team.rank == 0:
        inputs["x_mask"][:] = True


def wrong_samples(model: Any, put_on: Sharding, inputs: dict[str, Any], team: Communicator) -> None:
    """The last rank takes the texts of the samples for each other's."""
    if team.rank == team.size - 1:
        inputs["text"], inputs["mask"] = inputs["text"].flip(0), inputs["mask"].flip(0)


FAULTS = [
    *((fault, version) for fault in (other_noise, padding, dropped_mask, wrong_samples)
      for version in KINDS),
    (dropped_frames_mask, "1.2"),
]  # fmt: skip


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("fault", "version"), FAULTS)
def test_a_planted_fault_is_seen(ranks: Group, size: int, version: str, fault: Any) -> None:
    case = "a given frame"
    found = ranks.run(size, sharded, version, case, fault=fault)
    assert worst(found, bare(version, case)) > 100 * RELATIVE


def everything(model: Any, put_on: Sharding, inputs: dict[str, Any], team: Communicator) -> None:
    """A rank computes it all by itself: the answer is right."""
    put_on.team = SingleRank()


def test_a_rank_that_computes_everything_is_seen() -> None:
    size, case = 3, "16 frames"
    whole = sharded(SingleRank(), "1.2", case, count=True)["operations"]
    found = sharded(FakeCommunicator(1, (1.0,) * size), "1.2", case, fault=everything, count=True)
    assert worst([found], bare("1.2", case)) < RELATIVE
    assert found["operations"] > 1.1 * share(size, 1, case) * whole
    assert not found["sent"]


@pytest.mark.parametrize(
    ("weights", "groups"),
    [((1.0,), 1), ((1.0, 1.0, 1.0), 1), ((3.0, 1.0), 2), ((1.0,) * 7, 1), ((1.0,) * 7, 2)],
)
@pytest.mark.parametrize("version", KINDS)
def test_the_plans_bytes_are_those_that_are_counted(
    version: str, weights: tuple[float, ...], groups: int
) -> None:
    case = "15 frames, odd sides, ragged texts"
    deal = TokenPartition(TokenGrid(2, 15, 3 * 4), weights, groups)
    for rank in range(len(weights)):
        counted = sharded(FakeCommunicator(rank, weights), version, case, groups)["sent"]
        # float64 here, float32 in a run; a rank alone gathers nothing.
        last = counted.pop("the last projection is gathered", 0) // 2
        told = sent_bytes(model_of(version).config, deal, rank, element_bytes=8)
        assert told == sum(counted.values()) + last
