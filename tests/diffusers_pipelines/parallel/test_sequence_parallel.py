"""Transformers of diffusers on several ranks give what the same class gives on one.

In float64, so that a wrong cut can't hide behind rounding. Where these classes cast to float32
themselves (norms, rotations) it hides the last digits of both sides alike. One rank is compared bit
for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from everyframe.core.errors import CannotRunError
from everyframe.diffusers_pipelines.parallel import sequence_parallel
from everyframe.diffusers_pipelines.parallel.sequence_parallel import SequenceParallelTransformer
from everyframe.diffusers_pipelines.parallel.token_splits import CUTS
from everyframe.parallel import ring_attention
from everyframe.parallel.communicator import Communicator, FakeCommunicator, SingleRank
from everyframe.parallel.head_partition import SEQUENCE_BACKENDS
from everyframe.precision.cast_hooks import tensors_in
from helpers.rank_pool import Group, group_of
from helpers.sharded_calls import RELATIVE, answered, worst
from helpers.tiny_checkpoints.transformers import (
    model_of,
    of_cogvideox,
    of_hunyuan,
    of_ltx,
    of_wan,
    randn,
)

#: The model, and what it is called with: odd numbers of frames, rows, columns and tokens.
CASES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "wan": ("wan", lambda: of_wan(3, 6, 10)),
    "wan, two samples": ("wan", lambda: of_wan(3, 2, 10, batch=2)),
    "wan, fewer tokens than ranks": ("wan", lambda: of_wan(1, 2, 4)),
    "wan, a time for each token": (
        "wan", lambda: of_wan(3, 6, 10, timestep=torch.linspace(0, 900, 45)[None]),
    ),
    # Of the text 512 tokens, as the class has it: what comes before is the picture's.
    "wan of a picture": (
        "wan of a picture",
        lambda: of_wan(
            3, 6, 6,
            encoder_hidden_states=randn(1, 512, 8, seed=3),
            encoder_hidden_states_image=randn(1, 3, 6, seed=4),
        ),
    ),
    "ltx, ragged texts": ("ltx", lambda: of_ltx(3, 3, 5)),
    "ltx, a time for each token": (
        "ltx", lambda: of_ltx(3, 3, 5, timestep=torch.linspace(0, 900, 90).view(2, 45)),
    ),
    "ltx, fewer tokens than ranks": ("ltx", lambda: of_ltx(1, 1, 2)),
    "cogvideox": ("cogvideox", lambda: of_cogvideox(3, 6, 10, rotary=False)),
    "cogvideox 5b": ("cogvideox 5b", lambda: of_cogvideox(3, 6, 10, rotary=True)),
    "hunyuan, ragged texts": ("hunyuan", lambda: of_hunyuan(3, 6, 10)),
    "hunyuan, fewer tokens than ranks": ("hunyuan", lambda: of_hunyuan(1, 2, 4)),
    "cogvideox, fewer tokens than ranks": (
        "cogvideox 5b", lambda: of_cogvideox(1, 2, 4, rotary=True),
    ),
}  # fmt: skip
#: Those that are run by default, by heads and with three ranks; the others with ``--slow``.
FAST = ("wan", "ltx, ragged texts", "cogvideox 5b", "hunyuan, ragged texts")
SIZES = (1, 2, 3, 4, 5, 6, 7, 8)


def slowly(*values: Any, unless: bool) -> Any:
    """A case of a test that is slow unless it is one of those."""
    return pytest.param(*values, marks=[] if unless else [pytest.mark.slow])


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Any:
    module = request.node
    mine = [item for item in request.session.items if item.getparent(pytest.Module) is module]
    is_slow = any(item.get_closest_marker("slow") for item in mine)
    yield from group_of(SIZES[1:] if is_slow else (3,))


def sharded(
    group: Communicator,
    backend: str,
    case: str,
    fault: Callable[..., Any] | None = None,
    count: bool = False,
) -> dict[str, Any]:
    """One rank's answer, the bytes that left it and, with `count`, its operations."""
    name, given = CASES[case]
    model, inputs = model_of(name), given()
    patch = sequence_parallel.apply(model, group, backend)
    undo = fault(patch, model, inputs, group) if fault is not None else None
    return answered(group, patch, undo, lambda: model(**inputs, return_dict=False)[0], count=count)


@cache
def bare(case: str) -> Tensor:
    name, given = CASES[case]
    with torch.no_grad():
        out: Tensor = model_of(name)(**given(), return_dict=False)[0]
    return out


@pytest.mark.parametrize(
    ("size", "backend", "case"),
    [
        slowly(size, backend, case, unless=size == 3 and backend == "ulysses" and case in FAST)
        for case in CASES
        for backend in SEQUENCE_BACKENDS
        for size in SIZES
    ],
)
def test_any_number_of_ranks_gives_the_bare_models_answer(
    ranks: Group, size: int, backend: str, case: str
) -> None:
    found = ranks.run(size, sharded, backend, case)
    assert worst(found, bare(case)) < RELATIVE
    assert all(torch.equal(each["out"], found[0]["out"]) for each in found)
    if size == 1:
        assert torch.equal(found[0]["out"], bare(case))


@pytest.mark.parametrize(
    ("weights", "case"),
    [
        slowly(weights, case, unless=len(weights) == 3 and case == "cogvideox 5b")
        for weights in ((24.0, 8.0), (1.0, 2.0, 0.5), (1.0, 0.0))
        for case in FAST
    ],
)
def test_unequal_shares(ranks: Group, case: str, weights: tuple[float, ...]) -> None:
    found = ranks.run(len(weights), sharded, "ulysses", case, weights=weights)
    assert worst(found, bare(case)) < RELATIVE


# ---------------------------------------------------------------- data, bytes and work


@pytest.mark.parametrize("name", ["WanTransformer3DModel", "LTXVideoTransformer3DModel"])
def test_cuts_are_where_diffusers_has_them(name: str) -> None:
    """But for the text, which is not cut where every token of it is looked at."""
    theirs = dict(getattr(diffusers, name)._cp_plan)
    found: set[tuple[str, Any, int]] = set()
    for module, plan in theirs.items():
        if isinstance(plan, dict):
            found |= {(module, key, each.split_dim) for key, each in plan.items()}
        else:
            found.add((module, "gathered", plan.gather_dim))
    found = {each for each in found if not str(each[1]).startswith("encoder_")}
    cuts = CUTS[name]
    ours: set[tuple[str, Any, int]] = {
        (each.module, each.argument, each.dim) for each in cuts.tokens
    }
    ours |= {(table, number, dim) for table, dim in cuts.tables for number in (0, 1)}
    ours.add((cuts.last, "gathered", 1))
    assert ours <= found
    assert found - ours <= {(each.module, each.argument, each.dim) for each in cuts.beside}


@pytest.mark.slow
@pytest.mark.parametrize("backend", SEQUENCE_BACKENDS)
@pytest.mark.parametrize("case", FAST)
def test_real_ranks_send_and_compute_what_imagined_ones_do(
    ranks: Group, backend: str, case: str
) -> None:
    for rank, found in enumerate(ranks.run(3, sharded, backend, case, count=True)):
        imagined = sharded(FakeCommunicator(rank, (1.0,) * 3), backend, case, count=True)
        assert imagined["sent"] == found["sent"]
        assert imagined["operations"] == found["operations"]


LARGE: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "wan": ("wan", lambda: of_wan(5, 16, 20)),
    "ltx": ("ltx", lambda: of_ltx(5, 8, 10)),
    "cogvideox": ("cogvideox 5b", lambda: of_cogvideox(5, 16, 20, rotary=True)),
    "hunyuan": ("hunyuan", lambda: of_hunyuan(5, 16, 20)),
}


@pytest.mark.parametrize(
    ("name", "backend", "size"),
    [
        slowly(name, backend, size, unless=backend == "ulysses" and size == 3 and name == "wan")
        for name in LARGE
        for backend in SEQUENCE_BACKENDS
        for size in SIZES
    ],
)
def test_every_rank_does_its_share(name: str, backend: str, size: int) -> None:
    """Of what belongs to tokens; the text and the timestep all have for themselves."""
    CASES["large"] = LARGE[name]
    try:
        whole = sharded(SingleRank(), backend, "large", count=True)["operations"]
        for rank in {0, size - 1}:
            mine = sharded(FakeCommunicator(rank, (1.0,) * size), backend, "large", count=True)[
                "operations"
            ]
            assert mine <= 1.1 * whole / size
    finally:
        del CASES["large"]


@pytest.mark.parametrize("case", FAST)
def test_a_hook_that_was_there_before_sees_the_ranks_own_tokens(case: str) -> None:
    """A trial of fast paths records the first block's inputs so, and calls it alone with them."""
    seen: list[list[torch.Size]] = []
    model = model_of(CASES[case][0])
    blocks = model.get_submodule(
        "blocks" if hasattr(model, "blocks") else "transformer_blocks"
    ).children()

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append([each.shape for each in tensors_in((args, kwargs))])

    hooks = [
        block.register_forward_pre_hook(note, prepend=True, with_kwargs=True) for block in blocks
    ]
    patch = sequence_parallel.apply(model, FakeCommunicator(1, (1.0,) * 3))
    with torch.no_grad():
        model(**CASES[case][1]())
    for hook in (patch, *hooks):
        hook.remove()
    assert len(seen) > 1
    assert all(each == seen[0] for each in seen)


# ---------------------------------------------------------------- planted faults


def other_noise(
    patch: SequenceParallelTransformer, model: Any, inputs: dict[str, Any], group: Communicator
) -> None:
    """The last rank begins with other noise, in one number."""
    if group.rank == group.size - 1:
        inputs["hidden_states"].view(-1)[-1] += 1e-6


def dropped_mask(
    patch: SequenceParallelTransformer, model: Any, inputs: dict[str, Any], group: Communicator
) -> None:
    """The first rank looks at all text tokens."""
    if group.rank == 0 and "encoder_attention_mask" in inputs:
        inputs["encoder_attention_mask"][:] = 1


def own_positions(
    patch: SequenceParallelTransformer, model: Any, inputs: dict[str, Any], group: Communicator
) -> Any:
    """The last rank counts positions from its own first token."""
    if group.rank < group.size - 1 or not hasattr(model, "rope"):
        return None

    def first(rope: nn.Module, args: Any, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(table.roll(1, 1) for table in tables)

    return model.rope.register_forward_hook(first, prepend=True).remove


def padding(
    patch: SequenceParallelTransformer, model: Any, inputs: dict[str, Any], group: Communicator
) -> Any:
    """The first rank's attention sees a key of zeros behind the others."""
    if group.rank:
        return None

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2)

    inner, original = ring_attention.partial_attention, sequence_parallel.sequence_attention

    def partial(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Any:
        return inner(q, padded(k), padded(v), mask)

    class Padded:
        def __init__(self, *given: Any) -> None:
            self._inner = original(*given)

        def attend(self, core: Any, *given: Any) -> Tensor:
            def look(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
                return core(q, padded(k), padded(v), mask)

            return self._inner.attend(look, *given)

    ring_attention.partial_attention, sequence_parallel.sequence_attention = partial, Padded  # type: ignore[attr-defined]

    def undo() -> None:
        ring_attention.partial_attention, sequence_parallel.sequence_attention = inner, original  # type: ignore[attr-defined]

    return undo


#: Each with a model in which it makes a difference; the first four are planted by default.
FAULTS = [
    (other_noise, "cogvideox 5b"), (own_positions, "wan"), (dropped_mask, "hunyuan, ragged texts"),
    (padding, "wan"), (other_noise, "wan"), (dropped_mask, "ltx, ragged texts"),
    (own_positions, "ltx, ragged texts"), (padding, "cogvideox 5b"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "case", "backend"),
    [
        slowly(*each, backend, unless=backend == "ulysses" and each in FAULTS[:4])
        for each in FAULTS
        for backend in SEQUENCE_BACKENDS
    ],
)
def test_a_planted_fault_is_seen(ranks: Group, backend: str, fault: Any, case: str) -> None:
    found = ranks.run(3, sharded, backend, case, fault=fault)
    assert worst(found, bare(case)) > 100 * RELATIVE


def everything(
    patch: SequenceParallelTransformer, model: Any, inputs: dict[str, Any], group: Communicator
) -> None:
    """A rank computes it all by itself: the answer is right."""
    patch.group = SingleRank()


@pytest.mark.parametrize("case", ["wan", *(slowly(case, unless=False) for case in FAST[1:])])
def test_a_rank_that_computes_everything_is_seen(case: str) -> None:
    whole = sharded(SingleRank(), "ulysses", case, count=True)["operations"]
    found = sharded(FakeCommunicator(1, (1.0,) * 3), "ulysses", case, fault=everything, count=True)
    assert worst([found], bare(case)) < RELATIVE
    assert found["operations"] > 1.1 * whole / 3
    assert not found["sent"]


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        slowly(case, backend, unless=backend == "ring" and case == "wan")
        for case in FAST
        for backend in SEQUENCE_BACKENDS
    ],
)
def test_unsharded_a_rank_computes_alone_what_one_device_does(case: str, backend: str) -> None:
    """Where a fault is looked for: nothing is sent, and the bits are those of the bare model."""
    name, given = CASES[case]
    group = FakeCommunicator(2, (1.0,) * 3)
    patch = sequence_parallel.apply(model_of(name), group, backend)
    try:
        with torch.no_grad(), patch.unsharded():
            out = model_of(name)(**given(), return_dict=False)[0]
    finally:
        patch.remove()
    assert torch.equal(out, bare(case))
    assert not group.sent


def test_an_attention_that_is_not_torchs_is_refused() -> None:
    def another(
        patch: SequenceParallelTransformer, model: Any, inputs: dict[str, Any], group: Communicator
    ) -> Any:
        """Torch's plain parts in place of its function."""
        attention = model.blocks[0].attn1
        own = attention.processor

        def processor(attn: Any, x: Tensor, *_: Any) -> Tensor:
            return attn.to_v(x)

        attention.processor = processor
        return lambda: setattr(attention, "processor", own)

    with pytest.raises(CannotRunError, match=r"blocks\.0\.attn1 computes .* than torch's"):
        sharded(FakeCommunicator(0, (1.0, 1.0)), "ulysses", "wan", fault=another)
    assert torch.equal(sharded(SingleRank(), "ulysses", "wan")["out"], bare("wan"))


@pytest.mark.parametrize("case", FAST)
def test_it_is_taken_off_again(case: str) -> None:
    model = model_of(CASES[case][0])
    patch = sequence_parallel.apply(model, SingleRank())
    assert any(part._forward_hooks for part in model.modules())
    patch.remove()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
