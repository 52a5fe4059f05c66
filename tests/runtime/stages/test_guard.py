"""Planted faults in small modules: each is found, named, and repaired or refused.

Overflow is real: weights are scaled until a product leaves float16, on the CPU. What is compared
with is the same module in float64.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.core.errors import NumericsError
from everyframe.core.events import Note
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Settings
from everyframe.runtime.interface import MemorySaving
from everyframe.runtime.stages import guard as guard_module
from everyframe.runtime.stages.denoise_stage import GuardedDenoiser
from everyframe.runtime.stages.guard import Guard
from helpers.guard_modules import (
    CLOSE,
    Net,
    ZeroByZero,
    halved,
    inputs,
    plan,
    planted,
    repairs,
    scaled,
)

WITH_BF16 = DeviceFacts("another", "cpu", None, 10**12, 10**12, has_fast_bf16=True)


class Attention(nn.Module):
    """Query, key and value by layers of their own, which must come in one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x)[:, None] for layer in (self.to_q, self.to_k, self.to_v))
        return F.scaled_dot_product_attention(q, k, v)[:, 0]


class Plain(nn.Module):
    """Attention by hand: its products with the keys are no module's of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.to_q(x), self.to_k(x)
        return (q @ k.transpose(-1, -2) / 1e5).softmax(-1) @ x.to(q.dtype)


class Residual(nn.Module):
    """A stream that grows beyond what its parts do."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.one(x) + self.two(x)) / 100


class Image(nn.Module):
    """A convolution over what the rest has as (B, 6, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


FAULTS: dict[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    # what is planted; the module named, what is raised, the operation
    "linear": (lambda: scaled(nn.Linear(8, 8), 1e5), "", "", "linear"),
    "conv": (lambda: scaled(Image(), 1e5), ".conv", ".conv", "conv1d"),
    "norm": (lambda: scaled(nn.LayerNorm(8), 5e4), "", "", "layer_norm"),
    "query": (lambda: _large_query(Attention()), ".to_q", "", "linear"),
    "products": (lambda: scaled(Plain(), 1e3), "", "", "matmul"),
    "residual": (lambda: _large_sum(Residual()), "", "", "add"),
}


def _large_sum(residual: Residual) -> nn.Module:
    for layer in (residual.one, residual.two):
        layer.bias.data = torch.linspace(-4e4, 4e4, 8)
    return residual


def _large_query(attention: Attention) -> nn.Module:
    scaled(attention.to_q, 1e5)
    return attention


CASES = [(name, place) for name in FAULTS for place in range(3)]


@pytest.mark.parametrize(("name", "place"), CASES, ids=[f"{name}-{n}" for name, n in CASES])
def test_overflow_is_found_named_and_repaired(name: str, place: int) -> None:
    make, module, raised, operation = FAULTS[name]
    net = planted(make, place)
    reference = copy.deepcopy(net).double()
    halved(net)
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        wanted = reference(inputs().double())
        assert not bool(net(inputs()).isfinite().all()), "the fault was not planted"
        answer = guard.call(2, lambda: net(inputs()))
        assert bool(answer.isfinite().all())
        assert float((answer - wanted).abs().max()) < CLOSE
        first, *more = repairs(guard)
        assert (first.module, first.target) == (f"parts.{place}{module}", f"parts.{place}{raised}")
        assert (first.operation, first.cause) == (operation, "range")
        assert (first.dtype, first.to, first.step) == ("float16", "float32", 2)
        assert f"{operation} in net.{first.module}" in first.text
        assert "not memory" in first.text
        # Those after it are raised because they are given what float16 can't hold.
        assert {(each.operation, each.cause) for each in more} <= {("cast", "range")}
        # What was raised stays so: the next step is right at once.
        guard.call(3, lambda: net(inputs()))
        assert not repairs(guard)
        assert net.first.weight.dtype == torch.float16, "only what is needed is raised"


@pytest.mark.parametrize("name", list(FAULTS))
def test_bfloat16_is_the_first_rung_where_the_device_has_it(name: str) -> None:
    net = halved(planted(FAULTS[name][0], 1))
    guard = Guard(plan(WITH_BF16), "denoise", {"net": net})
    with torch.inference_mode():
        assert bool(guard.call(1, lambda: net(inputs())).isfinite().all())
    assert {event.to for event in repairs(guard)} == {"bfloat16"}


@pytest.mark.parametrize("name", [*FAULTS, "nothing"])
def test_without_a_hit_nothing_is_changed(name: str) -> None:
    """In float32, where none of the faults is one: the same bits, and not a call more."""
    make = nn.Identity if name == "nothing" else FAULTS[name][0]
    net = planted(make, 1).eval()
    num_calls = 0

    def compute() -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return net(inputs())

    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        assert torch.equal(guard.call(1, compute), net(inputs()))
    assert num_calls == 1
    assert not list(guard.events())


@pytest.mark.parametrize("where", ["first", "parts.1", "norm", "last"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_weights_are_refused_by_name(where: str, value: float) -> None:
    net = planted(nn.Identity, 0)
    net.get_submodule(where).weight.view(-1)[3] = value
    halved(net)
    guard = Guard(plan(), "denoise", {"net": net})
    with (
        torch.inference_mode(),
        pytest.raises(NumericsError, match=rf"net\.{where}\.weight in 1 of"),
    ):
        guard.call(1, lambda: net(inputs()))


@torch.library.custom_op("everyframe_tests::double", mutates_args=())
def lying_double(x: Tensor) -> Tensor:
    """Twice x; in float16 this kernel adds up in something that is too narrow."""
    return x * (torch.inf if x.dtype == torch.float16 else 2)


class Lying(nn.Module):
    """A layer whose kernel is right in float32 only."""

    def forward(self, x: Tensor) -> Tensor:
        return lying_double(x)


def test_a_kernel_that_lies_is_distinguished_from_overflow() -> None:
    net = halved(planted(Lying, 1))
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        assert bool(guard.call(1, lambda: net(inputs())).isfinite().all())
    (repair,) = repairs(guard)
    assert (repair.module, repair.operation, repair.cause) == ("parts.1", "double", "kernel")
    assert "the kernel is wrong" in repair.text


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_wrong_formula_is_refused(dtype: str) -> None:
    net = planted(ZeroByZero, 1)
    net = halved(net) if dtype == "float16" else net
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode(), pytest.raises(NumericsError) as caught:
        guard.call(3, lambda: net(inputs()))
    text = str(caught.value)
    assert "step 3 of denoise" in text
    assert "div in net.parts.1" in text
    assert "not finite in float32 either" in text
    assert caught.value.exit_code == 4


def test_masks_are_no_fault() -> None:
    """An attention mask holds -inf on purpose; what overflows after it is named."""

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.zeros(8, 8, dtype=x.dtype).masked_fill(
                torch.ones(8, 8).triu(1).bool(), -torch.inf
            )
            return (x.transpose(-1, -2) @ x + mask).softmax(-1) @ x.transpose(-1, -2)

    net = Net(Masked(), nn.Flatten(), scaled(nn.Linear(48, 8), 3e5))
    guard = Guard(plan(), "denoise", {"net": halved(net)})
    with torch.inference_mode():
        guard.call(1, lambda: net(inputs()))
    assert repairs(guard)[0].module == "parts.2"


def test_what_a_denoiser_keeps_of_a_text_is_made_again() -> None:
    """Keys made before the first step must come in the dtype of queries that were raised."""
    attention = halved(_large_query(Attention()))

    def make() -> Callable[[Tensor], Tensor]:
        keys, values = attention.to_k(inputs(1)), attention.to_v(inputs(1))
        return lambda x: F.scaled_dot_product_attention(attention.to_q(x), keys, values)

    guard = Guard(plan(), "denoise", {"net": attention})
    with torch.inference_mode():
        assert bool(GuardedDenoiser(guard, make)(1e1 * inputs()).isfinite().all())
    assert [(event.module, event.target) for event in repairs(guard)] == [("to_q", "")]


def test_a_repeated_call_has_the_memory_of_the_denoiser_that_failed() -> None:
    made: list[weakref.ref[Callable[[Tensor], Tensor]]] = []

    def make() -> Callable[[Tensor], Tensor]:
        def denoise(x: Tensor) -> Tensor:
            if len(made) == 1:
                raise MemoryError("out of memory")
            assert made[0]() is None, "what it keeps of the text is in memory still"
            return x

        made.append(weakref.ref(denoise))
        return denoise

    def savings(component: str, settings: Settings) -> Iterator[MemorySaving]:
        yield MemorySaving(settings.with_saving("tile", 8), "tiles")

    GuardedDenoiser(Guard(plan(), "denoise", {"net": nn.Identity()}, savings=savings), make)(
        torch.ones(2)
    )
    assert len(made) == 2


def test_a_jump_is_reported() -> None:
    guard = Guard(plan(), "denoise", {})
    denoise = GuardedDenoiser(guard, lambda: lambda x: x)
    for size in (1.0, 3.0, 0.5, 20.0):
        denoise(size * torch.ones(2))
    assert not list(guard.events())
    denoise(torch.full((2,), 5000.0))
    (note,) = guard.events()
    assert isinstance(note, Note)
    assert "5e+03" in note.text


def test_latents_that_are_not_finite_are_refused() -> None:
    guard = Guard(plan(), "denoise", {})
    guard.latents(1, torch.ones(2))
    with pytest.raises(NumericsError, match="step 2 of denoise"):
        guard.latents(2, torch.tensor([1.0, torch.inf]))


def test_an_autoencoder_that_overflows_is_repaired() -> None:
    vae = halved(nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 3)))
    scaled(vae[0], 6e4)
    latents = 10 * torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    guard = Guard(plan(), "decode", {"vae": vae})
    with torch.inference_mode():
        pixels = guard.check_decoded(1, lambda: vae(latents), latents)
    assert bool(pixels.isfinite().all())
    assert repairs(guard)[0].module == "0"


def test_events_are_plain_data() -> None:
    event = guard_module.Repaired(
        "denoise", 1, "unet", "conv", "conv2d", "range", "float16", "conv", "float32", "text"
    )
    assert event.to_json()["type"] == "repaired"
