"""The video UNet on several ranks gives what diffusers' own gives on one device.

In float64, so that a wrong cut can't hide behind rounding: sums in another order differ by 1e-14 or
so through some forty layers, whatever is wrong by far more. One rank is compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from diffusers import UNetSpatioTemporalConditionModel
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from everyframe.core.plan import Precision
from everyframe.families.svd import sharding, unet
from everyframe.families.svd.components import level_sizes, sent_bytes
from everyframe.families.svd.sharding import ShardedFrames, Sharding
from everyframe.parallel import distributed_moments
from everyframe.parallel.communicator import Communicator, FakeCommunicator, SingleRank
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from everyframe.precision import cast_hooks
from everyframe.runtime.meta_init import build_on_meta
from helpers.rank_pool import Group, in_every_size, ranks
from helpers.sharded_calls import RELATIVE, answered, worst
from helpers.tiny_checkpoints import opensora as tiny_opensora

__all__ = ["ranks"]

LEVELS = 3
SIZES: dict[str, Any] = {
    "block_out_channels": (32, 64, 64), "layers_per_block": 1, "cross_attention_dim": 16,
    "num_attention_heads": (1, 2, 2), "projection_class_embeddings_input_dim": 24,
    "addition_time_embed_dim": 8, "num_frames": 3, "transformer_layers_per_block": (1, 2, 1),
    "down_block_types": (
        "CrossAttnDownBlockSpatioTemporal", "CrossAttnDownBlockSpatioTemporal",
        "DownBlockSpatioTemporal",
    ),
    "up_block_types": (
        "UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal",
        "CrossAttnUpBlockSpatioTemporal",
    ),
}  # fmt: skip

#: Latents (B, T, H, W). At 5x7 the levels have 35, 12 and 4 places, at 3x2 6, 2 and 1.
CASES: dict[str, tuple[int, int, int, int]] = {
    "guided, odd sides": (2, 5, 5, 7),
    "fewer frames than ranks": (1, 2, 3, 6),
    "fewer places than ranks": (2, 3, 3, 2),
    "one frame": (2, 1, 4, 6),
    "three samples": (3, 2, 4, 4),
    "one sample": (1, 7, 6, 4),
}


@lru_cache(maxsize=1)
def model() -> unet.VideoUNet:
    """In float64, every parameter drawn, so that no branch is silent."""
    made = build_on_meta(lambda: unet.build(SIZES))
    made.load_state_dict(tiny_opensora.randomised(made, 0), assign=True)
    return made.double().eval().requires_grad_(False)


@lru_cache(maxsize=1)
def diffusers_own() -> Any:
    theirs = build_on_meta(lambda: UNetSpatioTemporalConditionModel(**SIZES))
    theirs.load_state_dict(tiny_opensora.randomised(theirs, 0), assign=True)
    return theirs.double().eval().requires_grad_(False)


def given(case: str) -> list[Tensor]:
    """Scaled latents, times, pictures, what is told: each sample's own."""
    batch, frames, height, width = CASES[case]
    generator = torch.Generator().manual_seed(2)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    told = torch.tensor([[6.0, 127.0, 0.02]], dtype=torch.float64) + torch.arange(batch)[:, None]
    times = torch.linspace(-1.2, 1.6, batch, dtype=torch.float64)
    return [randn(batch, frames, 8, height, width), times, randn(batch, 16), told]


@cache
def wanted(case: str) -> Tensor:
    """What diffusers' own class answers."""
    x, t, picture, told = given(case)
    with torch.no_grad():
        answer: Tensor = diffusers_own()(x, t, picture[:, None], told, return_dict=False)[0]
    return answer


def answer(inputs: list[Tensor]) -> Tensor:
    x, t, picture, told = inputs
    context = model().context(picture, told, x.shape[1])
    with torch.no_grad():
        out: Tensor = model()(x, t, context)
    return out


def sharded(
    team: Communicator,
    case: str,
    groups: int = 1,
    fault: Callable[..., Any] | None = None,
    count: bool = False,
) -> dict[str, Any]:
    """One rank's answer, the bytes that left it and, with `count`, its operations."""
    inputs = given(case)
    put_on = sharding.apply(model(), team, groups)
    undo = fault(put_on, inputs, team) if fault is not None else None
    return answered(team, put_on, undo, lambda: answer(inputs), count=count)


#: Those that are run by default with the number of ranks that is.
_FAST = ("guided, odd sides", "fewer frames than ranks")


@in_every_size
@pytest.mark.parametrize(
    "case",
    [case if case in _FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_any_number_of_ranks_gives_diffusers_answer(ranks: Group, size: int, case: str) -> None:
    found = ranks.run(size, sharded, case)
    assert worst(found, wanted(case)) < RELATIVE
    if size == 1:
        assert torch.equal(found[0]["out"], answer(given(case)))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_branches_apart(ranks: Group, size: int) -> None:
    """Ranks of their own for each sample, also three for two; who has one alone has its bits."""
    case = "guided, odd sides"
    found = ranks.run(size, sharded, case, groups=2)
    assert worst(found, wanted(case)) < RELATIVE
    # One branch after the other, as a device with little memory computes them.
    x, t, picture, told = given(case)
    context = model().context(picture, told, x.shape[1])
    alone = [model()(x[s:][:1], t[s:][:1], context.rows(slice(s, s + 1))) for s in (0, 1)]
    if size == 2:
        assert torch.equal(found[0]["out"], torch.cat(alone))
        sent = [{what: n for what, n in each["sent"].items() if n} for each in found]
        assert [set(each) for each in sent] == [{"the answer is gathered"}] * 2
    if size == 3:  # one rank and two
        assert torch.equal(found[0]["out"][:1], alone[0])
        back = [each["sent"]["frames are given back"] for each in found]
        assert back[0] == 0 < min(back[1:])


@pytest.mark.parametrize("weights", [(24.0, 8.0), (1.0, 2.0, 0.5), (1.0, 0.0)])
def test_unequal_shares(ranks: Group, weights: tuple[float, ...]) -> None:
    case = "guided, odd sides"
    assert worst(ranks.run(len(weights), sharded, case, weights=weights), wanted(case)) < RELATIVE


# ---------------------------------------------------------------- bytes and work


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_two_units_a_temporal_block(size: int) -> None:
    """A unit is tokens * width * bytes * (P - 1) / P^2 at the block's level.

    One batch of frames and places that divide; counted by ranks that `sharded` imagines. That real
    ones send the same is tested below.
    """
    CASES["counted"] = (1, 4, 8, 8)
    sent = sharded(FakeCommunicator(0, (1.0,) * size), "counted")["sent"]
    del CASES["counted"]
    # Numbers a pixel that are dealt with in time: resnets, then layers of attention, by level. Two
    # resnets on the way up for each one on the way down; two more in the middle with one attention.
    wide = {64: 32 * 3 + 32 * 3, 16: 64 * 3 + 64 * 3 * 2, 4: 64 * 3 + 64 * 2 + 64 * 1}
    tokens = 4 * sum(places * width for places, width in wide.items())
    unit = Fraction(tokens * 8 * (size - 1), size**2)
    assert sent["frames are gathered"] == sent["frames are given back"] == unit
    # Two norms in each of 11 resnets, a mean and a variance of 32 groups, to each other rank.
    assert sent["statistics are merged"] == 11 * 2 * 2 * 32 * 8 * (size - 1)
    assert sent["the answer is gathered"] == 4 * 4 * 64 * 8 * (size - 1) // size


@pytest.mark.parametrize("size", [2, 3, 5])
def test_real_ranks_send_what_imagined_ones_do(ranks: Group, size: int) -> None:
    case = "guided, odd sides"
    for rank, found in enumerate(ranks.run(size, sharded, case, count=True)):
        imagined = sharded(FakeCommunicator(rank, (1.0,) * size), case, count=True)
        assert imagined["sent"] == found["sent"]
        assert imagined["operations"] == found["operations"]


def share(size: int, rank: int, shape: tuple[int, int, int, int]) -> float:
    """What a rank has to do: its frames, or its places at some level where that is more."""
    branches, frames, height, width = shape
    deals = [
        TokenPartition(TokenGrid(branches, frames, h * w), (1.0,) * size)
        for h, w in level_sizes(height, width, LEVELS)
    ]
    places = [len(deal.columns[rank]) / (branches * deal.grid.places) for deal in deals]
    return max(*places, len(deals[0].rows[rank]) / (branches * frames))


def operations(team: Communicator, shape: tuple[int, int, int, int]) -> int:
    """Those of one rank, counted on tensors without numbers."""
    batch, frames, height, width = shape
    made = build_on_meta(lambda: unet.build(SIZES)).eval().requires_grad_(False).to("meta")
    sizes = ((batch, frames, 8, height, width), (batch,), (batch, 16), (batch, 3))
    x, t, picture, told = (torch.empty(size, device="meta") for size in sizes)
    sharding.apply(made, team)
    with FlopCounterMode(display=False) as counter:
        made(x, t, made.context(picture, told, frames))
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "size", [pytest.param(n, marks=[pytest.mark.slow] * (n != 3)) for n in range(1, 9)]
)
def test_every_rank_does_its_share(size: int) -> None:
    shape = (2, 12, 8, 12)
    whole = operations(SingleRank(), shape)
    for rank in {0, size - 1}:
        mine = operations(FakeCommunicator(rank, (1.0,) * size), shape)
        assert mine <= 1.1 * share(size, rank, shape) * whole


def test_half_precision_sends_half_precision() -> None:
    """The stream is float32; what is exchanged of it has the dtype of the next product."""
    sent = {}
    for dtype in ("float32", "bfloat16"):
        made = unet.build(SIZES)
        made.load_state_dict(tiny_opensora.randomised(made, 0))
        islands = ("conv_in", "conv_out", "*norm*") if dtype != "float32" else ()
        cast_hooks.add_cast_hooks(
            made.eval().requires_grad_(False), Precision(dtype, dtype, islands)
        )
        team = FakeCommunicator(0, (1.0, 1.0))
        sharding.apply(made, team)
        x, t, picture, told = (each.float() for each in given("one sample"))
        with torch.no_grad():
            assert made(x, t, made.context(picture, told, 7)).dtype == torch.float32
        sent[dtype] = team.sent["frames are gathered"] + team.sent["frames are given back"]
    assert sent["bfloat16"] * 2 == sent["float32"] > 0


@pytest.mark.parametrize(
    ("weights", "groups"),
    [((1.0,), 1), ((1.0, 1.0, 1.0), 1), ((3.0, 1.0), 2), ((1.0,) * 7, 1), ((1.0,) * 12, 2)],
)
def test_the_plans_bytes_are_those_that_are_counted(
    weights: tuple[float, ...], groups: int
) -> None:
    case = "guided, odd sides"
    branches, frames, height, width = CASES[case]
    deal = TokenPartition(TokenGrid(branches, frames, height * width), weights, groups)
    for rank in range(len(weights)):
        counted = sharded(FakeCommunicator(rank, weights), case, groups)["sent"]
        # float64 here, float32 in a run; a rank alone gathers nothing.
        last = counted.pop("the answer is gathered", 0) // 2
        told = sent_bytes(model(), (height, width), deal, rank, element_bytes=8)
        assert told == sum(counted.values()) + last


# ---------------------------------------------------------------- planted faults


def _undo(owner: Any, name: str, value: Any) -> Callable[[], None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, kept)


def other_noise(put_on: Sharding, inputs: list[Tensor], team: Communicator) -> None:
    """The last rank begins with other noise, in one number."""
    if team.rank == team.size - 1:
        inputs[0][-1, -1, 0, -1, -1] += 1e-6


def norm_of_its_own_frames(put_on: Sharding, inputs: list[Tensor], team: Communicator) -> Any:
    """Each rank takes the statistics of its own part for those of the whole."""

    def of_its_own(self: Any, x: Tensor, dim: int, groups: int) -> Any:
        parts = x.split(list(self.parts), dim) if self.parts else ()
        own = [distributed_moments._moments(part, groups) for part in parts]
        found = torch.stack(own) if own else x.new_empty(0, 2, groups)
        return None if self.is_whole else tuple(found.unbind(1))

    return _undo(distributed_moments.DistributedMoments, "merged", of_its_own)


def positions_from_nought(put_on: Sharding, inputs: list[Tensor], team: Communicator) -> Any:
    """The last rank counts frames from another one on."""
    kept = unet._attention_context

    def rolled(*given: Any) -> Any:
        made = kept(*given)
        frames = made.frames.roll(1, 0) if team.rank == team.size - 1 else made.frames
        return unet.AttentionContext(made.spatial, made.temporal, frames, made.mix)

    return _undo(unet, "_attention_context", rolled)


def wrong_samples(put_on: Sharding, inputs: list[Tensor], team: Communicator) -> None:
    """The last rank takes the pictures of the samples for each other's."""
    if team.rank == team.size - 1:
        inputs[2] = inputs[2].flip(0)


def padding(put_on: Sharding, inputs: list[Tensor], team: Communicator) -> Any:
    """Frames get a pixel of zeros behind their own, so that they divide; attention sees it."""
    kept = unet.attention

    def padded(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        more = [torch.cat([each, torch.zeros_like(each[:, :, :1])], 2) for each in (k, v)]
        return kept(q, *more, **named)

    return _undo(unet, "attention", padded)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "fault",
    [other_noise, norm_of_its_own_frames, positions_from_nought, wrong_samples, padding],
)
def test_a_planted_fault_is_seen(ranks: Group, size: int, fault: Any) -> None:
    # One sample where the fault is in what ranks with a sample each have no need of.
    case = "guided, odd sides" if fault is not norm_of_its_own_frames else "one sample"
    found = ranks.run(size, sharded, case, fault=fault)
    assert worst(found, wanted(case)) > 100 * RELATIVE


def everything(put_on: Sharding, inputs: list[Tensor], team: Communicator) -> None:
    """A rank computes it all by itself: the answer is right."""
    put_on.team = SingleRank()


def test_a_rank_that_computes_everything_is_seen() -> None:
    size, case = 3, "guided, odd sides"
    whole = sharded(SingleRank(), case, count=True)["operations"]
    found = sharded(FakeCommunicator(1, (1.0,) * size), case, fault=everything, count=True)
    assert worst([found], wanted(case)) < RELATIVE
    assert found["operations"] > 1.1 * share(size, 1, CASES[case]) * whole
    assert not found["sent"]


def test_it_is_taken_off_again_and_leaves_nothing() -> None:
    put_on = sharding.apply(model(), FakeCommunicator(0, (1.0, 1.0)))
    with put_on.apart():
        assert torch.equal(answer(given("one frame")), _bare("one frame"))
    put_on.remove()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model().modules())


def _bare(case: str) -> Tensor:
    made = unet.build(SIZES)
    made.load_state_dict(tiny_opensora.randomised(made, 0))
    made = made.double().eval().requires_grad_(False)
    x, t, picture, told = given(case)
    out: Tensor = made(x, t, made.context(picture, told, x.shape[1]))
    return out


def test_ranks_beyond_the_frames_have_pixels_only() -> None:
    dealt = ShardedFrames((1, 2), [12, 6], FakeCommunicator(3, (1.0,) * 5), 1)
    assert dealt.take(torch.zeros(1, 2, 8, 3, 4)).shape == (1, 0, 8, 3, 4)
    assert dealt.over_time(torch.zeros(1, 0, 12, 4)).shape == (1, 2, 2, 4)
