"""Rungs of precision: which comes next, and that raising and lowering lose no bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision
from everyframe.precision import cast_hooks
from everyframe.precision.upcast import (
    Upcast,
    as_raised,
    has_float32,
    held_in,
    narrowest,
    next_rung,
)

PLAIN = DeviceFacts("plain", "cpu", None, 1, 1)
FAST = DeviceFacts("fast", "cuda", 0, 1, 1, has_fast_bf16=True)
WITHOUT = DeviceFacts("odd", "mps", 0, 1, 1, has_fast_bf16=True, dtypes=("float32", "float16"))


@pytest.mark.parametrize(
    ("dtype", "device", "rung"),
    [
        (torch.float16, PLAIN, torch.float32),
        (torch.float16, FAST, torch.bfloat16),
        (torch.float16, WITHOUT, torch.float32),
        (torch.bfloat16, FAST, torch.float32),
        (torch.float32, FAST, None),
        (torch.float64, FAST, None),
    ],
)
def test_the_ladder(dtype: torch.dtype, device: DeviceFacts, rung: torch.dtype | None) -> None:
    assert next_rung(dtype, device) == rung


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_module_is_raised_and_lowered_without_a_trace(dtype: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).requires_grad_(False)
    cast_hooks.add_cast_hooks(net, Precision(dtype, dtype))
    x = torch.randn(2, 4)
    before, weights = net(x), {k: v.clone() for k, v in net.state_dict().items()}
    seen: list[torch.dtype] = []
    handle = net[1].register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    raised = Upcast(net[1], torch.float32)
    assert narrowest(net[1]) == torch.float32
    assert narrowest(net) == getattr(torch, dtype)
    net(x)
    raised.undo()
    assert torch.equal(net(x), before)
    assert seen == [torch.float32, getattr(torch, dtype)]
    assert all(torch.equal(weights[k], v) for k, v in net.state_dict().items())
    handle.remove()


@pytest.mark.parametrize("keeps_float32", [False, True])
def test_weights_whose_float32_stays_are_raised_to_it(*, keeps_float32: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).requires_grad_(False)
    exact = net[0].weight.clone()
    cast_hooks.add_cast_hooks(
        net, Precision("bfloat16", "bfloat16", ("1",)), keeps_float32=keeps_float32
    )
    assert has_float32(net) is keeps_float32
    # As a fast path lays them out in memory.
    net[0].weight.data = net[0].weight.data.t().contiguous().t()
    narrow, place = net[0].weight.clone(), net[0].weight.data_ptr()
    raised = Upcast(net, torch.float32)
    assert torch.equal(net[0].weight, exact) is keeps_float32
    assert not has_float32(net)
    assert held_in(net[0].weight) == (torch.float32 if keeps_float32 else torch.bfloat16)
    raised.undo()
    assert has_float32(net) is keeps_float32
    assert torch.equal(net[0].weight, narrow)
    assert (net[0].weight.data_ptr() == place) is keeps_float32
    assert held_in(net[0].weight) == torch.bfloat16


def test_digits_that_a_wider_range_lacks_come_back() -> None:
    """bfloat16 has 8 digits of float16's 11."""
    net = nn.Linear(4, 4).half().requires_grad_(False)
    before = net.weight.clone()
    raised = Upcast(net, torch.bfloat16)
    assert not torch.equal(net.weight.half(), before)
    raised.undo()
    assert torch.equal(net.weight, before)


@pytest.mark.parametrize(
    ("dtype", "rungs"),
    [
        (torch.float16, (torch.bfloat16,)),
        (torch.float16, (torch.float32,)),
        (torch.bfloat16, (torch.float32,)),
        (torch.float16, (torch.bfloat16, torch.float32)),
    ],
)
def test_an_owners_weights_come_back_in_their_storage(
    dtype: torch.dtype, rungs: tuple[torch.dtype, ...]
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype).requires_grad_(False)
    tied, view = nn.Parameter(net[0].weight.data, requires_grad=False), net[0].weight[1:]
    before = net[0].weight.clone()
    raised = [Upcast(net[0], each, keeps_storage=True) for each in rungs]
    assert net[0].weight.data_ptr() != tied.data_ptr()
    for each in reversed(raised):
        each.undo()
    assert torch.equal(net[0].weight, before)
    view.zero_()
    assert torch.equal(net[0].weight, tied), "they share their memory as before"
    assert not net[0].weight[1:].any()


def test_a_module_that_can_not_be_cast_as_a_whole_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, to, done = nn.Linear(4, 4).half().requires_grad_(False), Tensor.to, []

    def cast(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        if args == (torch.float32,):
            done.append(tensor)
            if len(done) == 2:
                raise torch.OutOfMemoryError("out of memory")
        return to(tensor, *args, **kwargs)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(Tensor, "to", cast)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(torch.OutOfMemoryError):
        Upcast(net, torch.float32)
    assert len(done) == 2
    for name, tensor in net.state_dict(keep_vars=True).items():
        assert tensor.dtype == held_in(tensor) == torch.float16
        assert torch.equal(tensor, before[name])
    assert not net._forward_pre_hooks


def test_what_was_raised_is_known_to_be_as_exact_as_before() -> None:
    net = nn.Linear(4, 4).half().requires_grad_(False)
    assert held_in(net.weight) == torch.float16
    first = Upcast(net, torch.bfloat16)
    assert held_in(net.weight) == torch.bfloat16, "coarser than float16"
    second = Upcast(net, torch.float32)
    assert net.weight.dtype == torch.float32
    assert held_in(net.weight) == torch.bfloat16
    fresh = torch.randn(4, 4)
    assert torch.equal(as_raised(fresh, net.weight), fresh.half().bfloat16().float())
    second.undo()
    first.undo()
    assert held_in(net.weight) == torch.float16
    assert held_in(torch.ones(2, dtype=torch.int8)) == torch.int8


def test_a_module_without_parameters_is_raised_by_what_it_is_given() -> None:
    class Product(nn.Module):
        def forward(self, a: Tensor, *, b: Tensor) -> Tensor:
            return a * b

    product, big = Product(), torch.full((2,), 300.0, dtype=torch.float16)
    assert not bool(product(big, b=big).isfinite().all())
    Upcast(product, torch.float32)
    assert product(big, b=big).tolist() == [9e4, 9e4]
    assert product(big.double(), b=big).dtype == torch.float64, "nothing is narrowed"
