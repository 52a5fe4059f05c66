"""The contract of families whose denoiser several ranks share: they give what one device gives.

In float64, so that a wrong cut can't hide behind rounding: two sums in another order differ by
1e-14 or so, whatever is wrong by far more. One rank is compared bit for bit. Inpainting shares
frames and no denoiser (`inpaint/test_distributed.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from everyframe.core.plan import Precision
from everyframe.fast_paths.apply import swap_modules
from everyframe.fast_paths.registry import CATALOGUE
from everyframe.parallel.communicator import Communicator, FakeCommunicator, SingleRank
from everyframe.precision import cast_hooks
from helpers.diagonals import diagonal
from helpers.rank_pool import FAST, SLOW, Group, ranks
from helpers.sharded_calls import RELATIVE, answered, worst
from helpers.sharded_denoisers import DENOISERS
from helpers.sharded_denoisers.base import compute_everything
from helpers.slow_rows import slow_unless

__all__ = ["ranks"]

every_denoiser = pytest.mark.parametrize("name", DENOISERS)


def sharded(
    group: Communicator, name: str, case: str, groups: int = 1, fault: str = "", count: bool = False
) -> dict[str, Any]:
    """One rank's answer, the bytes that left it and, with `count`, its operations."""
    planted = DENOISERS[name].faults[fault][0] if fault else None
    return DENOISERS[name].sharded(group, case, groups, planted, count)


#: Of the fast set: two samples on every number of ranks, the other cases on most of them.
CASES = [
    pytest.param(
        size, name, case,
        marks=()
        if case in denoiser.fast and size in (FAST if case == denoiser.guided else FAST[-1:])
        else pytest.mark.slow,
    )
    for name, denoiser in DENOISERS.items()
    for case in denoiser.cases
    for size in (*FAST, *SLOW)
]  # fmt: skip


@pytest.mark.parametrize(("size", "name", "case"), CASES)
def test_any_number_of_ranks_gives_the_answer_of_one(
    ranks: Group, size: int, name: str, case: str
) -> None:
    found = ranks.run(size, sharded, name, case)
    assert worst(found, DENOISERS[name].wanted(case)) < RELATIVE
    if size == 1:
        assert torch.equal(found[0]["out"], DENOISERS[name].bare(case))


@pytest.mark.parametrize(("size", "name"), diagonal([2, 3, 5], DENOISERS))
def test_each_guidance_branch_has_ranks_of_its_own(ranks: Group, size: int, name: str) -> None:
    """Also three for two."""
    denoiser = DENOISERS[name]
    found = ranks.run(size, sharded, name, denoiser.guided, groups=2)
    assert worst(found, denoiser.wanted(denoiser.guided)) < RELATIVE
    if size == 2:  # a branch each: the answer alone is sent
        sent = {what for each in found for what, number in each["sent"].items() if number}
        assert sent == {denoiser.gather}


@pytest.mark.parametrize("size", [2, 3])
def test_who_has_a_branch_alone_has_its_bits(ranks: Group, size: int) -> None:
    """Where texts have the same length; so the UNet alone."""
    unet = DENOISERS["svd"]
    found = ranks.run(size, sharded, "svd", unet.guided, groups=2)
    # One branch after the other, as a device with little memory computes them.
    x, t, picture, micro = unet.inputs(unet.guided).values()
    model = unet.model()
    with torch.inference_mode():
        context = model.context(picture, micro, x.shape[1])
        alone = [model(x[s:][:1], t[s:][:1], context.rows(slice(s, s + 1))) for s in (0, 1)]
    if size == 2:
        assert torch.equal(found[0]["out"], torch.cat(alone))
    else:  # one rank and two
        assert torch.equal(found[0]["out"][:1], alone[0])
        back = [each["sent"]["frames are given back"] for each in found]
        assert back[0] == 0 < min(back[1:])


@pytest.mark.parametrize("weights", [(24.0, 8.0), (1.0, 2.0, 0.5), (1.0, 0.0)])
@every_denoiser
def test_unequal_shares(ranks: Group, name: str, weights: tuple[float, ...]) -> None:
    denoiser = DENOISERS[name]
    found = ranks.run(len(weights), sharded, name, denoiser.guided, weights=weights)
    assert worst(found, denoiser.wanted(denoiser.guided)) < RELATIVE


def in_float32(group: Communicator, name: str, paths: Sequence[str]) -> dict[str, Any]:
    """One rank's answer in float32, with the modules of these fast paths."""
    denoiser = DENOISERS[name]
    model = copy.deepcopy(denoiser.model()).float()
    swap_modules(model, paths)
    inputs = cast_hooks.map_tensors(
        denoiser.inputs(denoiser.guided), lambda x: x.float() if x.is_floating_point() else x
    )
    patch = denoiser.apply(model, group, 1)
    return answered(group, patch, None, lambda: denoiser.answer(model, inputs), count=False)


@every_denoiser
def test_modules_of_fast_paths_are_shared_as_those_they_replace(ranks: Group, name: str) -> None:
    """With tokens of both samples on a rank; no further from float64 than twice plain float32."""
    native = [path for path in CATALOGUE if path.startswith("native-")]
    found = ranks.run(3, in_float32, name, native)
    wanted = DENOISERS[name].wanted(DENOISERS[name].guided)
    with torch.inference_mode():
        plain = in_float32(SingleRank(), name, ())
    assert worst(found, wanted) < 2 * worst([plain], wanted) + 1e-5


def test_unsharded_a_rank_computes_alone_what_one_device_does() -> None:
    """Where a fault is looked for: nothing is sent, and the bits are those of the bare model."""
    for denoiser in DENOISERS.values():
        group, case = FakeCommunicator(2, (1.0,) * 3), denoiser.guided
        handle = denoiser.apply(denoiser.model(), group, 1)
        try:
            with torch.inference_mode(), handle.unsharded():
                out = denoiser.answer(denoiser.model(), denoiser.inputs(case))
        finally:
            handle.remove()
        assert torch.equal(out, denoiser.bare(case))
        assert not group.sent


@every_denoiser
def test_what_is_applied_is_removed_again(name: str) -> None:
    denoiser = DENOISERS[name]
    model = denoiser.model()

    def state() -> tuple[Any, ...]:
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        return {n: type(part) for n, part in model.named_modules()}, hooks

    before, names = state(), [n for n, _ in model.named_parameters()]
    handle = denoiser.apply(model, SingleRank(), 1)
    assert state() != before
    assert [n for n, _ in model.named_parameters()] == names
    handle.remove()
    assert state() == before


# ---------------------------------------------------------------- bytes and work


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("opensora-1.2", 2), ("opensora-1.2", 5), ("svd", 3),
        *(
            pytest.param(name, size, marks=pytest.mark.slow)
            for name, size in (
                ("opensora-1.2", 3), ("svd", 2), ("svd", 5), ("opensora-1.0", 3),
                ("stepvideo-ulysses", 3), ("stepvideo-ring", 3),
            )
        ),
    ],
)  # fmt: skip
def test_real_ranks_send_and_compute_what_imagined_ones_do(
    ranks: Group, name: str, size: int
) -> None:
    case = DENOISERS[name].guided
    for rank, found in enumerate(ranks.run(size, sharded, name, case, count=True)):
        imagined = sharded(FakeCommunicator(rank, (1.0,) * size), name, case, count=True)
        assert imagined["sent"] == found["sent"]
        assert imagined["operations"] == found["operations"]


#: Weights of ranks, and the groups that they are in.
DIVISIONS = [
    ((1.0,), 1), ((1.0,) * 3, 1), ((1.0,) * 3, 2), ((3.0, 1.0), 1), ((3.0, 1.0), 2),
    ((1.0,) * 7, 1), ((1.0,) * 7, 2), ((1.0,) * 12, 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "weights", "groups"),
    [
        # A third of them in the fast set: two or three divisions of each denoiser.
        pytest.param(name, *each, marks=() if (row + column) % 3 == 0 else pytest.mark.slow)
        for row, name in enumerate(DENOISERS)
        for column, each in enumerate(DIVISIONS)
    ],
)
def test_planned_bytes_are_those_that_are_counted(
    name: str, weights: tuple[float, ...], groups: int
) -> None:
    denoiser = DENOISERS[name]
    for rank in range(len(weights)):
        counted = sharded(FakeCommunicator(rank, weights), name, denoiser.guided, groups)["sent"]
        # float64 here, float32 in a run; a rank alone gathers nothing.
        last = counted.pop(denoiser.gather, 0) // 2
        assert denoiser.planned_bytes(weights, groups, rank) == sum(counted.values()) + last


@every_denoiser
def test_half_precision_sends_half_precision(name: str) -> None:
    """The stream is float32; what is exchanged of it has the dtype of the next product."""
    denoiser, sent = DENOISERS[name], {}
    inputs = {
        key: each.float() if torch.is_tensor(each) and each.is_floating_point() else each
        for key, each in denoiser.inputs(denoiser.single).items()
    }
    for dtype, islands in (("float32", ()), ("bfloat16", denoiser.islands)):
        model = denoiser.build().eval().requires_grad_(False)
        cast_hooks.add_cast_hooks(model, Precision(dtype, dtype, islands))
        group = FakeCommunicator(0, (1.0, 1.0))
        denoiser.apply(model, group, 1)
        with torch.inference_mode():
            assert denoiser.answer(model, inputs).dtype == torch.float32
        sent[dtype] = group.sent
    exchanged = {dtype: denoiser.exchanged(each) for dtype, each in sent.items()}
    assert exchanged["bfloat16"] * 2 == exchanged["float32"] > 0
    # The last layer is an island.
    assert sent["bfloat16"][denoiser.gather] == sent["float32"][denoiser.gather]


@pytest.mark.parametrize("size", slow_unless((3,), range(1, 9)))
@every_denoiser
def test_every_rank_does_its_share(name: str, size: int) -> None:
    denoiser = DENOISERS[name]
    whole = denoiser.operations(SingleRank())
    for rank in range(size):
        mine = denoiser.operations(FakeCommunicator(rank, (1.0,) * size))
        assert mine <= 1.1 * denoiser.share(size, rank, denoiser.large) * whole


# ---------------------------------------------------------------- planted faults


FAULTS = [(name, fault) for name, each in DENOISERS.items() for fault in each.faults]


@pytest.mark.parametrize(("planted", "size"), diagonal(FAULTS, [2, 3]), ids=str)
def test_a_planted_fault_is_seen(ranks: Group, planted: tuple[str, str], size: int) -> None:
    name, fault = planted
    case = DENOISERS[name].faults[fault][1]
    found = ranks.run(size, sharded, name, case, fault=fault)
    assert worst(found, DENOISERS[name].wanted(case)) > 100 * RELATIVE


@every_denoiser
def test_a_rank_that_computes_everything_is_seen(name: str) -> None:
    denoiser = DENOISERS[name]
    size, case = 3, denoiser.guided
    whole = sharded(SingleRank(), name, case, count=True)["operations"]
    group = FakeCommunicator(1, (1.0,) * size)
    found = denoiser.sharded(group, case, fault=compute_everything, count=True)
    assert worst([found], denoiser.wanted(case)) < RELATIVE
    assert found["operations"] > 1.1 * denoiser.share(size, 1, case) * whole
    assert not found["sent"]
