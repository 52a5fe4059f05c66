"""Branches of guidance on different ranks give what one rank gives that has them all.

A few steps as a pipeline makes them, around diffusers' own transformers in float64: both branches
in one batch, and one after the other. Whole pipelines are in
`end_to_end/test_pipelines_distributed.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from everyframe.core.errors import CannotRunError
from everyframe.diffusers_pipelines.parallel import cfg_parallel, sequence_parallel
from everyframe.diffusers_pipelines.parallel.cfg_detection import CfgBranches
from everyframe.diffusers_pipelines.parallel.cfg_parallel import CfgParallel, DenoiserCall
from everyframe.diffusers_pipelines.parallel.lazy_tensor import LazyTensor
from everyframe.ops.attention import PLAIN, by_kernel
from everyframe.ops.call_override import ModuleCall
from everyframe.parallel.cfg_groups import CfgGroups
from everyframe.parallel.communicator import (
    Communicator,
    FakeCommunicator,
    ParallelContext,
    SingleRank,
)
from everyframe.parallel.rendezvous import new_group
from helpers.rank_pool import Group, group_of
from helpers.sharded_calls import RELATIVE, worst
from helpers.tiny_checkpoints.transformers import LONG, model_of, of_ltx, of_wan, randn

SCALE, STEPS = 5.0, 3
Steps = Callable[..., Tensor]


def batched(denoise: Any, num_steps: int = STEPS) -> Tensor:
    """LTX-Video's way: one call a step, with both branches in its batch."""
    given = of_ltx(3, 3, 5)
    x = randn(1, 45, 4, seed=7)
    for step in range(num_steps):
        given["timestep"] = torch.full((2,), 900.0 - 100 * step)
        given["hidden_states"] = torch.cat([x] * 2)
        without, with_it = denoise(**given, return_dict=False)[0].chunk(2)
        x = x - 0.1 * (without + SCALE * (with_it - without))
    return x


def in_turn(denoise: Any, num_steps: int = STEPS, looks: bool = False) -> Tensor:
    """Wan's way: two calls a step; the first step and what `looks` have one answer at a time."""
    x, texts = randn(1, 4, 3, 6, 10), [randn(1, LONG, 8, seed=seed) for seed in (3, 4)]
    for step in range(num_steps):
        given = of_wan(3, 6, 10, hidden_states=x, timestep=torch.tensor([900.0 - 100 * step]))
        answers = []
        for text in texts[: 1 if not step else 2]:
            answer = denoise(**{**given, "encoder_hidden_states": text}, return_dict=False)[0]
            answers.append(answer * 1 if looks else answer)
        with_it, without = answers[0], answers[-1]
        x = x - 0.1 * (without + SCALE * (with_it - without))
    return x


_ONE = pytree.tree_flatten((0,))[1]
#: The model, its steps, and what is known of its branches.
WAYS: dict[str, tuple[str, Steps, CfgBranches]] = {
    "together": (
        "ltx",
        batched,
        CfgBranches(
            2, is_together=True, answer=((2, 45, 4),), form=_ONE,
            rows={
                f"['{name}']": 1
                for name in ("hidden_states", "encoder_hidden_states", "timestep",
                             "encoder_attention_mask")
            },
        ),
    ),
    "in turn": ("wan", in_turn, CfgBranches(2, answer=((1, 4, 3, 6, 10),), form=_ONE, num_calls=2)),
}  # fmt: skip
WAYS["looked between"] = ("wan", partial(in_turn, looks=True), WAYS["in turn"][2])


@cache
def one_device(way: str) -> Tensor:
    name, steps, _ = WAYS[way]
    with torch.no_grad():
        return steps(model_of(name))


def parallel_of(video_group: Communicator, how: str = "ulysses") -> ParallelContext:
    """Two groups of these ranks."""
    groups = CfgGroups.of(video_group.weights, 2, 2)
    mine = groups.ranks[groups.number_of(video_group.rank)]
    inside: Communicator = SingleRank()
    if isinstance(video_group, FakeCommunicator):
        inside = FakeCommunicator(
            mine.index(video_group.rank), video_group.weights[mine.start : mine.stop]
        )
    elif video_group.size > 1:
        inside = new_group(video_group, [list(group) for group in groups.ranks])
    return ParallelContext(video_group, video_group, 2, how, branch_group=inside)


def run(
    video_group: Communicator,
    way: str,
    how: str = "ulysses",
    fault: Any = None,
    count: bool = False,
) -> dict[str, Any]:
    """One rank's steps: what came of them, how often it computed, what left it."""
    name, steps, branches = WAYS[way]
    model, parallel = model_of(name), parallel_of(video_group, how)
    counter, calls = FlopCounterMode(display=False), list[int]()
    with ExitStack() as stack:
        if fault is not None:
            stack.callback(fault(video_group))
        for each in sequence_parallel.apply_to_all({"transformer": model}, parallel).values():
            stack.callback(each.remove)
        hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
        stack.callback(hook.remove)
        stack.enter_context(CfgParallel({"transformer": model}, branches, parallel))
        if count:
            stack.enter_context(by_kernel(PLAIN))
            stack.enter_context(counter)
        stack.enter_context(torch.no_grad())
        out = steps(model)
    sent = dict(video_group.sent)
    video_group.sent.clear()
    return {
        "out": out, "calls": len(calls), "sent": sent, "operations": counter.get_total_flops()
    }  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Any:
    yield from group_of((3,))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("size", "how"),
    [
        (1, "ulysses"),
        (3, "ulysses"),
        pytest.param(2, "ulysses", marks=pytest.mark.slow),
        pytest.param(3, "ring", marks=pytest.mark.slow),
    ],
)
def test_ranks_with_a_branch_each_give_what_one_rank_gives(
    ranks: Group, way: str, size: int, how: str
) -> None:
    """Two branches on three ranks too: one has a branch, two share the other's tokens."""
    found = ranks.run(size, run, way, how, whole=True)
    assert worst(found, one_device(way)) < RELATIVE
    assert all(torch.equal(each["out"], found[0]["out"]) for each in found)
    if size == 1 or (size == 2 and way != "together"):
        assert torch.equal(found[0]["out"], one_device(way))
    if way == "together":
        assert [each["calls"] for each in found] == [STEPS] * size
    else:
        # Five calls, of which the first group has the first, the third and the fifth.
        assert [each["calls"] for each in found] == ([5] if size == 1 else [3, 2, 2][:size])


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(24.0, 8.0, 8.0), (1.0, 2.0, 4.0)])
@pytest.mark.parametrize("way", WAYS)
def test_unequal_ranks(ranks: Group, way: str, weights: tuple[float, ...]) -> None:
    found = ranks.run(3, run, way, weights=weights)
    assert worst(found, one_device(way)) < RELATIVE


@pytest.mark.parametrize("way", ["together", "in turn"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_does_its_share(way: str, size: int) -> None:
    whole = run(SingleRank(), way, count=True)["operations"]
    parallel = [parallel_of(FakeCommunicator(rank, (1.0,) * size)) for rank in range(size)]
    for rank in range(size):
        mine = run(FakeCommunicator(rank, (1.0,) * size), way, count=True)["operations"]
        # Of five calls the first group has three.
        calls = 1 / 2 if way == "together" else (3 if rank == 0 else 2) / 5
        assert mine <= 1.1 * whole * calls / parallel[rank].denoiser_group.size


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_real_ranks_send_and_compute_what_imagined_ones_do(ranks: Group, way: str) -> None:
    for rank, found in enumerate(ranks.run(3, run, way, count=True)):
        imagined = run(FakeCommunicator(rank, (1.0,) * 3), way, count=True)
        assert imagined["calls"] == found["calls"]
        assert imagined["operations"] == found["operations"]
        if way == "together":
            assert imagined["sent"] == found["sent"]


# ---------------------------------------------------------------- planted faults


def everything(video_group: Communicator) -> Callable[[], None]:
    """A rank computes what is not its own, and hands nothing on that is wrong for it."""
    original = CfgParallel._answer_call

    def called(self: Any, name: str, call: ModuleCall) -> Any:
        return call.compute()

    CfgParallel._answer_call = called  # type: ignore[method-assign]
    return lambda: setattr(CfgParallel, "_answer_call", original)


def other_branch(video_group: Communicator) -> Callable[[], None]:
    """The last rank takes the first branch of a batch, and has the first answer for its own."""
    original = cfg_parallel._of_branches, cfg_parallel.CfgParallel._exchange_tensors

    def of_branches(leaf: Tensor, one: int, count: int, mine: range, path: str) -> Tensor:
        return original[0](leaf, one, count, range(len(mine)), path)

    def exchanged(self: Any, mine: Any, facts: Any) -> Any:
        parts = original[1](self, mine, facts)
        return [parts[0]] * len(parts) if all(facts) else parts

    if video_group.rank == video_group.size - 1:
        cfg_parallel._of_branches = of_branches
        CfgParallel._exchange_tensors = exchanged  # type: ignore[method-assign]

    def undo() -> None:
        cfg_parallel._of_branches, CfgParallel._exchange_tensors = original  # type: ignore[method-assign]

    return undo


def nothing_is_brought(video_group: Communicator) -> Callable[[], None]:
    """An answer is looked at before it came."""
    original = LazyTensor.of

    def of(known: Any) -> Any:
        return original(lambda: torch.full((1, 4, 3, 6, 10), torch.nan, dtype=torch.float64))

    LazyTensor.of = of  # type: ignore[method-assign]
    return lambda: setattr(LazyTensor, "of", staticmethod(original))


@pytest.mark.parametrize("way", ["together", "in turn"])
def test_a_rank_that_computes_everything_is_seen(way: str) -> None:
    whole = run(SingleRank(), way, count=True)["operations"]
    found = run(FakeCommunicator(0, (1.0,) * 2), way, fault=everything, count=True)
    assert torch.equal(found["out"], run(SingleRank(), way, count=True)["out"])
    assert found["operations"] > 1.1 * 0.6 * whole
    assert not found["sent"]


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        ("together", other_branch),
        pytest.param("in turn", other_branch, marks=pytest.mark.slow),
        ("in turn", nothing_is_brought),
    ],
)
def test_a_planted_fault_is_seen(ranks: Group, way: str, fault: Any) -> None:
    found = ranks.run(3, run, way, fault=fault)
    assert not worst(found, one_device(way)) < 100 * RELATIVE


# ---------------------------------------------------------------- what has another form


def part_of(**given: Any) -> Any:
    """The second rank's part of a call."""
    _, _, branches = WAYS["together"]
    parallel = parallel_of(FakeCommunicator(1, (1.0, 1.0)))
    call = DenoiserCall(model_of("ltx"), type(model_of("ltx")), (), given, "transformer")
    return CfgParallel({}, branches, parallel)._part(call, range(1, 2))


def test_a_rank_is_given_its_own_rows_and_all_that_is_of_no_branch() -> None:
    given = of_ltx(3, 3, 5)
    part = part_of(**given)
    for name in ("hidden_states", "encoder_hidden_states", "timestep"):
        assert torch.equal(part.kwargs[name], given[name][1:])
    assert part.kwargs["num_frames"] == 3
    assert part.kwargs["rope_interpolation_scale"] == (1 / 3, 32, 32)


def test_a_call_about_one_branch_is_left_whole() -> None:
    one = {name: each[:1] for name, each in of_ltx(3, 3, 5).items() if isinstance(each, Tensor)}
    assert part_of(**one) is None


def test_another_batch_than_in_the_dry_run_is_refused() -> None:
    three = {name: each[[0, 1, 1]] for name, each in of_ltx(1, 1, 2).items()
             if isinstance(each, Tensor)}  # fmt: skip
    with pytest.raises(CannotRunError, match="another batch than in its dry run"):
        part_of(**three)


def test_rows_that_nobody_can_tell_apart_are_refused() -> None:
    """Three of each branch, one behind the other: not where the branches take turns."""
    texts = torch.tensor([[0.0], [1.0]])
    right = texts.repeat_interleave(3, 0)
    found = cfg_parallel._of_branches(right, 3, 2, range(1, 2), "text")
    assert torch.equal(found, texts[1:].expand(3, 1))
    with pytest.raises(CannotRunError, match="the rows of its denoiser's text can't be"):
        cfg_parallel._of_branches(texts.repeat(3, 1), 3, 2, range(1, 2), "text")
