"""Attention of all tokens to all among ranks is torch's own on one device, by heads and in a ring.

In float64, so that a wrong cut can't hide behind rounding. Bytes are counted by the tests
themselves, where torch.distributed is called.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from everyframe.ops.attention import attention
from everyframe.parallel import ring_attention
from everyframe.parallel.communicator import Communicator, FakeCommunicator
from everyframe.parallel.head_partition import SEQUENCE_BACKENDS, HeadPartition, sent_vectors
from everyframe.parallel.sharded_modules import sequence_attention
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from helpers.rank_pool import FAST, SLOW, Group, in_every_size, ranks

__all__ = ["ranks"]

RELATIVE = 1e-12
WIDTH = 4

#: Samples, heads, tokens; and which keys may be looked at: "keys" of each sample, "places" of each
#: query, "scores" that are added for each head.
CASES: dict[str, tuple[tuple[int, int, int], str]] = {
    "heads and tokens that divide by much": ((1, 6, 30), ""),
    "fewer heads than ranks, padding": ((1, 2, 17), "keys"),
    "two branches, padding of each": ((2, 3, 7), "keys"),
    "three samples, who sees whom": ((3, 5, 4), "places"),
    "scores of each head": ((2, 3, 5), "scores"),
    "fewer tokens than ranks": ((1, 3, 2), "keys"),
    "one head, one token": ((2, 1, 1), ""),
}


def given(case: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and mask of the whole, (B, heads, N, D) in float64."""
    (samples, heads, tokens), kind = CASES[case]
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(
        3, samples, heads, tokens, WIDTH, generator=generator, dtype=torch.float64
    )
    mask = None
    if kind == "keys":  # the last keys are padding: whole ranks have nothing else
        lengths = torch.tensor([max(1, tokens // 2 - sample) for sample in range(samples)])
        mask = (torch.arange(tokens) < lengths[:, None])[:, None, None]
    if kind == "places":
        mask = torch.ones(tokens, tokens).tril().bool().expand(samples, 1, -1, -1)
    if kind == "scores":
        mask = torch.randn(1, heads, tokens, tokens, generator=generator, dtype=torch.float64)
    return q, k, v, mask


def attended(
    group: Communicator,
    backend: str,
    case: str,
    groups: int = 1,
    fault: Callable[..., Any] | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """One rank's answers sample by sample, and the bytes that left it."""
    import torch.distributed as dist

    q, k, v, mask = given(case)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    (samples, heads, tokens), _ = CASES[case]
    partition = TokenPartition(
        TokenGrid(samples, heads, tokens), group.weights, min(groups, group.size, samples)
    )
    parts = partition.segments(group.rank)
    mine = partition.samples(group.rank)

    def take(x: Tensor) -> Tensor:
        return torch.cat([x[mine][p.samples, :, p.places] for p in parts], dim=2)

    sent, before = 0, dist.all_to_all_single

    def counting(out: Tensor, x: Tensor, receive: Any, send: list[int], **named: Any) -> Any:
        nonlocal sent
        sent += sum(send) - send[group.rank]
        return before(out, x, receive, send, **named)

    core, undo = attention, None
    if fault is not None:
        core, mask, undo = fault(group, mask)
    dist.all_to_all_single = counting
    try:
        out = sequence_attention(backend, partition, group).attend(
            core, take(q), take(k), take(v), mask
        )
    finally:
        dist.all_to_all_single = before
        if undo is not None:
            undo()
    found = [(h.sample, h.places, out[h.row, :, h.here]) for h in partition.held[group.rank]]
    return {"found": found, "sent": sent, "counted": group.sent.total(), "dtype": out.dtype}


def wanted(case: str) -> Tensor:
    q, k, v, mask = given(case)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def worst(answers: list[dict[str, Any]], case: str) -> float:
    """The largest error relative to the largest value; every token must be there once."""
    whole = wanted(case)
    found = torch.full_like(whole, torch.nan)
    num_tokens = 0
    for each in answers:
        for sample, places, out in each["found"]:
            found[sample, :, places.start : places.stop] = out
            num_tokens += len(places)
    assert num_tokens == whole.shape[0] * whole.shape[2]
    error = (found - whole).abs().max() / whole.abs().max()
    return float(error.nan_to_num(nan=torch.inf))


@in_every_size
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", SEQUENCE_BACKENDS)
def test_any_number_of_ranks_gives_torch_s_own_attention(
    ranks: Group, size: int, backend: str, case: str
) -> None:
    for groups in (1, 2):
        answers = ranks.run(size, attended, backend, case, groups)
        assert worst(answers, case) < RELATIVE
        for each in answers:
            assert each["sent"] == each["counted"]


@pytest.mark.parametrize("weights", [(24.0, 8.0), (1.0, 0.0, 2.0), (1.0, 5.0, 1.0, 1.0, 1.0)])
@pytest.mark.parametrize("backend", SEQUENCE_BACKENDS)
def test_unequal_shares(ranks: Group, backend: str, weights: tuple[float, ...]) -> None:
    case = "two branches, padding of each"
    found = ranks.run(len(weights), attended, backend, case, weights=weights)
    assert worst(found, case) < RELATIVE


@pytest.mark.parametrize("backend", SEQUENCE_BACKENDS)
def test_a_sample_that_lies_on_one_rank_has_the_bits_of_one_device(
    ranks: Group, backend: str
) -> None:
    """Two ranks for two branches: torch's kernel on each, and nothing is sent."""
    case = "two branches, padding of each"
    q, k, v, mask = given(case)
    assert mask is not None
    for sample, each in enumerate(ranks.run(2, attended, backend, case)):
        one = slice(sample, sample + 1)
        alone = F.scaled_dot_product_attention(q[one], k[one], v[one], attn_mask=mask[one])
        assert each["found"][0][0] == sample
        assert torch.equal(each["found"][0][2], alone[0])
        assert each["sent"] == 0


@pytest.mark.parametrize("backend", SEQUENCE_BACKENDS)
def test_half_precision_is_sent_as_such_and_summed_in_float32(ranks: Group, backend: str) -> None:
    """Answers are rounded once, at the end: 2^-9 of the largest value, and inputs the same."""
    case = "heads and tokens that divide by much"
    narrow = ranks.run(3, attended, backend, case, dtype=torch.bfloat16)
    wide = ranks.run(3, attended, backend, case)
    assert all(each["dtype"] == torch.bfloat16 for each in narrow)
    assert [4 * each["sent"] for each in narrow] == [each["sent"] for each in wide]
    assert worst(narrow, case) < 2**-7


# ---------------------------------------------------------------- bytes and work


@pytest.mark.parametrize("size", [2, 3, 5])
def test_bytes_are_those_of_the_formula(ranks: Group, size: int) -> None:
    """Sizes that divide, so that formulas are whole: queries, keys, values there, answers back."""
    case = "counted"
    CASES[case] = ((1, size, 4 * size), "")
    numbers = CASES[case][0][1] * CASES[case][0][2] * WIDTH * 8  # bytes of one of the four
    try:
        for backend, formula in (
            ("ulysses", Fraction(4 * numbers * (size - 1), size**2)),
            ("ring", Fraction(2 * numbers * (size - 1), size)),
        ):
            found = ranks.run(size, _counted, backend, size)
            assert [each["sent"] for each in found] == [formula] * size
    finally:
        del CASES[case]


def _counted(group: Communicator, backend: str, size: int) -> dict[str, Any]:
    CASES["counted"] = ((1, size, 4 * size), "")
    return attended(group, backend, "counted")


@pytest.mark.parametrize("case", CASES)
def test_the_plan_s_bytes_are_those_that_are_sent(ranks: Group, case: str) -> None:
    (samples, heads, tokens), _ = CASES[case]
    partition = TokenPartition(TokenGrid(samples, heads, tokens), (1.0,) * 5)
    expected = {
        "ulysses": [HeadPartition(partition).num_sent(rank) for rank in range(5)],
        "ring": [sent_vectors(partition, rank) for rank in range(5)],
    }
    for backend in SEQUENCE_BACKENDS:
        found = ranks.run(5, attended, backend, case)
        assert [each["sent"] for each in found] == [n * WIDTH * 8 for n in expected[backend]]


@pytest.mark.parametrize("backend", SEQUENCE_BACKENDS)
def test_an_imagined_rank_sends_what_a_real_one_does(ranks: Group, backend: str) -> None:
    case = "two branches, padding of each"
    for rank, real in enumerate(ranks.run(5, attended, backend, case)):
        imagined = attended(FakeCommunicator(rank, (1.0,) * 5), backend, case)
        assert imagined["counted"] == real["counted"]
        shapes = [[out.shape for *_, out in each["found"]] for each in (imagined, real)]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("size", [*FAST, *SLOW])
@pytest.mark.parametrize(("samples", "heads"), [(2, 48), (1, 48), (2, 12), (1, 3), (1, 1)])
def test_every_rank_has_its_share_of_heads(samples: int, heads: int, size: int) -> None:
    """A tenth more at most, whatever the heads; and they are whole where that does it."""
    partition = HeadPartition(TokenPartition(TokenGrid(samples, heads, 1000), (1.0,) * size))
    shares = [partition.share(rank) for rank in range(size)]
    assert sum(shares) == pytest.approx(1)
    assert max(shares) <= 1.1 / size
    uneven = -(-samples * heads // size) * size / (samples * heads)
    assert partition.cuts_heads == (uneven > 1.1)


# ---------------------------------------------------------------- planted faults

Faulty = tuple[Callable[..., Tensor], "Tensor | None", "Callable[[], None] | None"]


def padding(group: Communicator, mask: Tensor | None) -> Faulty:
    """The last rank looks at a key of zeros behind its own, as where tokens are padded."""

    def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        k, v = (torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2) for x in (k, v))
        if mask is not None:
            mask = F.pad(mask, (0, 1), value=True)
        return attention(q, k, v, mask)

    inner = ring_attention.partial_attention
    if group.rank != group.size - 1:
        return attention, mask, None

    def partial(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
        k, v = (torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2) for x in (k, v))
        return inner(q, k, v, None if mask is None else F.pad(mask, (0, 1), value=True))

    ring_attention.partial_attention = partial  # type: ignore[attr-defined]
    return core, mask, lambda: setattr(ring_attention, "partial_attention", inner)


def dropped_mask(group: Communicator, mask: Tensor | None) -> Faulty:
    """The first rank looks at padding."""
    return attention, None if group.rank == 0 else mask, None


def shifted_mask(group: Communicator, mask: Tensor | None) -> Faulty:
    """The last rank takes the mask by its own places instead of the whole's."""
    assert mask is not None
    return attention, mask.roll(1, dims=-1) if group.rank == group.size - 1 else mask, None


def without_lse(group: Communicator, mask: Tensor | None) -> Faulty:
    """The first rank takes the mean of the parts."""
    inner = ring_attention.merge
    if group.rank:
        return attention, mask, None

    def mean(one: Any, other: Any) -> Any:
        return one._replace(out=(one.out + other.out) / 2)

    ring_attention.merge = mean  # type: ignore[attr-defined]
    return attention, mask, lambda: setattr(ring_attention, "merge", inner)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        *(
            (backend, fault)
            for backend in SEQUENCE_BACKENDS
            for fault in (padding, dropped_mask, shifted_mask)
        ),
        ("ring", without_lse),
    ],
)
def test_a_planted_fault_is_seen(ranks: Group, size: int, backend: str, fault: Any) -> None:
    case = "fewer heads than ranks, padding"
    answers = ranks.run(size, attended, backend, case, fault=fault)
    assert worst(answers, case) > 100 * RELATIVE
