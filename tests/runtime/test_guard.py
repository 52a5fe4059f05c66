"""Planted faults in small modules: each is found, named, and repaired or refused.

Overflow is real: weights are scaled until a product leaves float16, on the CPU. What is compared
with is the same module in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from everyframe.core.errors import NumericsError
from everyframe.core.events import Event, Note, Repaired
from everyframe.core.facts import DeviceFacts
from everyframe.numerics.overflow_probe import OverflowProbe
from everyframe.runtime import guard as guard_module
from everyframe.runtime.guard import Guard
from everyframe.runtime.stages import GuardedDenoiser
from guarded_nets import CLOSE, Net, halved, inputs, plan, repairs, scaled

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
        assert (first.module, first.raised) == (f"parts.{place}{module}", f"parts.{place}{raised}")
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


def planted(make: Callable[[], nn.Module], place: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts: list[nn.Module] = [nn.Linear(8, 8) for _ in range(3)]
        parts[place] = make()
        net = Net(*parts)
    with torch.no_grad():
        net.first.weight.copy_(torch.eye(8))  # what comes to the faulty part is known
        for number in range(place):
            net.parts[number].weight.copy_(torch.eye(8))
    return net.requires_grad_(False)


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


def test_a_kernel_that_lies_is_told_from_overflow() -> None:
    net = halved(planted(Lying, 1))
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        assert bool(guard.call(1, lambda: net(inputs())).isfinite().all())
    (repair,) = repairs(guard)
    assert (repair.module, repair.operation, repair.cause) == ("parts.1", "double", "kernel")
    assert "the kernel is wrong" in repair.text


class ZeroByZero(nn.Module):
    """A formula that is wrong in every precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x) * 0


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


class Small(nn.Module):
    """An epsilon that float16 rounds to zero."""

    def forward(self, x: Tensor) -> Tensor:
        zero = (x - x).abs() + 1e-9
        return x * zero / zero


def test_what_was_lost_before_an_operation_is_repaired_too() -> None:
    net = halved(planted(Small, 1))
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        assert bool(guard.call(1, lambda: net(inputs())).isfinite().all())
    assert repairs(guard)[0].module == "parts.1"


class LogOfVanished(nn.Module):
    """float16 rounds to 0 what the logarithm is taken of."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() * 1e-9 + 1e-9).log()


class LogOfRounded(nn.Module):
    """A difference that float16 rounds to 0 below what is taken of it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() + 4096.5 - 4096 - x.abs() * 0.5 - 0.25).log()


class Handing(nn.Module):
    """The zero is made elsewhere, and handed on to where its logarithm is taken."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs() * 1e-9 + 1e-9


class Log(nn.Module):
    """A logarithm of what is handed on."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Sigmoid(nn.Module):
    """By hand, in float32: its exp may be infinite, which is right."""

    def forward(self, x: Tensor) -> Tensor:
        wide = 1000 * x.float()
        return (1 / (1 + (-wide).exp())).to(x.dtype)


def eye(size: float = 1.0) -> nn.Module:
    """A layer that hands on what it is given, so many times as large."""
    layer = nn.Linear(8, 8, bias=False)
    layer.weight.data = size * torch.eye(8)
    return layer


MENDED: dict[str, tuple[Callable[[], Sequence[nn.Module]], str, str]] = {
    # what is planted; the operation and the module that are named
    "a log at the end": (lambda: [eye(), LogOfVanished()], "log", "1"),
    "a log before a layer": (lambda: [eye(), LogOfVanished(), nn.Linear(8, 8)], "log", "1"),
    "a log of a difference": (lambda: [eye(), LogOfRounded()], "log", "1"),
    "a log of what was lost before": (lambda: [eye(), Handing(), Log()], "log", "2"),
    "a harmless exp before": (lambda: [eye(), Sigmoid(), eye(6e4), eye(6e4)], "linear", "3"),
}


@pytest.mark.parametrize("name", list(MENDED))
def test_what_is_finite_in_float32_is_mended_and_rightly_named(name: str) -> None:
    make, operation, module = MENDED[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(*make())
    reference = copy.deepcopy(net).double()
    halved(net)
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        wanted = reference(inputs().half().double())
        assert bool(wanted.isfinite().all())
        assert not bool(net(inputs()).isfinite().all()), "the fault was not planted"
        answer = guard.call(1, lambda: net(inputs()))
    assert bool(answer.isfinite().all())
    first = repairs(guard)[0]
    assert (first.operation, first.module) == (operation, module)
    assert first.to == "float32"
    assert float((answer - wanted).abs().max()) < CLOSE * float(wanted.abs().max())


def test_a_harmless_infinity_is_not_blamed_for_a_wrong_formula() -> None:
    net = nn.Sequential(Sigmoid(), ZeroByZero()).eval()
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode(), pytest.raises(NumericsError, match=r"div in net\.1"):
        guard.call(1, lambda: net(inputs()))


def test_a_weight_that_nothing_comes_of_is_not_blamed() -> None:
    """A row that no token asks for is not a number; another module's overflow is mended."""
    table = nn.Embedding(4, 8)
    net = nn.Sequential(table, scaled(nn.Linear(8, 8), 1e5), nn.Linear(8, 8))
    table.weight.data[3] = torch.nan
    halved(net)
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        assert bool(guard.call(1, lambda: net(torch.tensor([0, 1, 2]))).isfinite().all())
        assert repairs(guard)[0].module == "1"
        with pytest.raises(NumericsError, match=r"net\.0\.weight in 8 of 32"):
            guard.call(2, lambda: net(torch.tensor([0, 1, 3])))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("by", ["full_like", "constant", "fill", "item"])
def test_what_a_hook_hands_on_is_named_by_its_module(by: str, dtype: str, value: float) -> None:
    made_before = torch.full((2, 6, 8), value)

    def handing_on(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        if by == "full_like":
            return torch.full_like(result, value)
        if by == "constant":
            return made_before
        if by == "fill":
            return result.clone().fill_(value)
        copied = result.clone()
        copied[0, 1, 2] = value
        return copied

    net = planted(nn.Identity, 0)
    net.parts[1].register_forward_hook(handing_on)
    net = halved(net) if dtype == "float16" else net
    before = [(name, each.dtype) for name, each in net.named_parameters()]
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode(), pytest.raises(NumericsError, match=r" in net\.parts\.1 "):
        guard.call(1, lambda: net(inputs()))
    assert [(name, each.dtype) for name, each in net.named_parameters()] == before


class Tanh(nn.Module):
    """Of what is beyond float16, as of all that is large, it makes 1."""

    def forward(self, x: Tensor) -> Tensor:
        return (x / 1e5).tanh()


class RootMeanSquare(nn.Module):
    """By hand: squares overflow, and what is divided by the root of infinity is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.pow(2).mean(-1, keepdim=True).rsqrt()


class Masks(nn.Module):
    """Infinities that are right: a mask that grows beyond float16, and exp of it."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(8, 8, dtype=x.dtype)
        mask = mask.masked_fill(torch.ones(8, 8).triu(1).bool(), torch.finfo(x.dtype).min)
        return ((x.mT @ x + mask * 1.5).softmax(-1) @ x.mT).mT


SWALLOWED: dict[str, tuple[Callable[[], Sequence[nn.Module]], str, str]] = {
    # what is planted; the operation and the module that are named
    "tanh": (lambda: [eye(300), eye(300), Tanh(), eye()], "linear", "1"),
    "norm": (lambda: [eye(1000), RootMeanSquare(), eye()], "pow", "1"),
}


@pytest.mark.parametrize("name", list(SWALLOWED))
def test_an_overflow_that_comes_to_nothing_is_found_in_the_first_call(name: str) -> None:
    make, operation, module = SWALLOWED[name]
    net = nn.Sequential(*make())
    reference = copy.deepcopy(net).double()
    halved(net)
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        wanted = reference(inputs().half().double())
        wrong = net(inputs())
        assert bool(wrong.isfinite().all())
        assert float((wrong - wanted).abs().max()) > 0.1 * float(wanted.abs().max())
        answer = GuardedDenoiser(guard, lambda: net)(inputs())
    assert float((answer - wanted).abs().max()) < CLOSE * float(wanted.abs().max())
    first = repairs(guard)[0]
    assert (first.operation, first.module, first.cause) == (operation, module, "range")
    assert "became finite later and changed the result" in first.text
    guard.end()
    assert net[int(module)] is not None
    assert {each.dtype for each in net.parameters()} == {torch.float16}


@pytest.mark.parametrize("parts", [[Masks()], [eye(), Masks(), eye()]])
def test_an_overflow_that_changes_nothing_is_let_be(parts: list[nn.Module]) -> None:
    net = halved(nn.Sequential(*parts))
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        wanted = net(inputs())
        assert torch.equal(guard.call(1, lambda: net(inputs())), wanted)
    assert not list(guard.events())


class Flexible(nn.Module):
    """Attention that torch compiles by itself, and whose inner operations are no plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = eye()

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_q(x)[:, None]
        return flex_attention(q, q, q)[:, 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_that_compiles_itself_is_seen_through() -> None:
    net = halved(nn.Sequential(eye(), Flexible(), eye(6e4)))
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        wanted = net[:2](inputs())
        assert torch.equal(guard.call(1, lambda: net[:2](inputs())), wanted)
        assert bool(guard.call(2, lambda: net(inputs())).isfinite().all())
    assert repairs(guard)[0].module == "2"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*non-infra torch dispatch mode:UserWarning")
def test_what_somebody_compiled_stays_compiled_in_the_first_call() -> None:
    net, graphs = halved(nn.Linear(8, 8)), []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compute = torch.compile(lambda x: net(x).tanh(), backend=backend)
    guard = Guard(plan(), "decode", {"net": net})
    with torch.inference_mode():
        wanted = compute(inputs())
        assert torch.equal(guard.call(1, lambda: compute(inputs())), wanted)
    assert len(graphs) == 1


def test_only_the_first_call_in_float16_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[OverflowProbe] = []

    class Counted(OverflowProbe):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(guard_module, "OverflowProbe", Counted)
    for dtype, expected in (("float32", 0), ("bfloat16", 0), ("float16", 1)):
        net = halved(nn.Linear(8, 8), dtype)
        guard = Guard(plan(), "denoise", {"net": net})
        with torch.inference_mode():
            wanted = net(inputs())
            for step in (1, 2, 3):
                assert torch.equal(guard.call(step, lambda: net(inputs())), wanted)  # noqa: B023
        assert len(made) == expected


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
    assert [(event.module, event.raised) for event in repairs(guard)] == [("to_q", "")]


def test_a_jump_is_told() -> None:
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


class Dim(nn.Module):
    """Weights at the lower end of float16: their products vanish in it, and not in float32.

    What is left is one colour, in -1..1.
    """

    def __init__(self, size: float, colour: Sequence[float]) -> None:
        super().__init__()
        self.colour = colour
        self.conv = nn.Conv2d(4, 3, 1, bias=False)
        nn.init.constant_(self.conv.weight, size)

    def forward(self, latents: Tensor) -> Tensor:
        pixels = self.conv(latents * 1e-4) * 1e8
        return pixels + torch.tensor(self.colour, dtype=pixels.dtype)[:, None, None]


GREY, BLACK, WHITE = (0.0, 0.0, 0.0), (-1.0, -1.0, -1.0), (1.0, 1.0, 1.0)
GREEN, BROWN = (-1.0, 1.0, -1.0), (0.2, -0.3, -0.3)


def decoded(
    size: float, prompt: str = "a circle", colour: Sequence[float] = GREY, **given: Any
) -> tuple[Tensor, list[Event], str]:
    vae = halved(Dim(size, colour))
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    guard = Guard(plan(prompt=prompt), "decode", {"vae": vae})
    with torch.inference_mode():
        pixels = guard.decoded(1, lambda: vae(latents), latents, **given)
    return pixels, list(guard.events()), str(vae.conv.weight.dtype)


def test_frames_that_vanish_in_half_precision_are_decoded_again() -> None:
    pixels, events, dtype = decoded(6e-6)
    assert float(pixels.std()) > 0.01
    (repair,) = events
    assert isinstance(repair, Repaired)
    assert (repair.component, repair.cause, repair.to) == ("vae", "blank", "float32")
    assert dtype == "torch.float32"


def test_frames_that_are_blank_in_float32_too_are_noted_and_kept() -> None:
    pixels, events, dtype = decoded(0.0)
    assert float(pixels.abs().max()) == 0
    (note,) = events
    assert isinstance(note, Note)
    assert "2 of 2 frames are of one colour" in note.text
    assert dtype == "torch.float16", "what did not help is taken back"


PROMPTS = ("a fox", "a white fox in the snow", "a woman with dark hair plays a black piano",
           "a black screen", "a plain green wall")  # fmt: skip


@pytest.mark.parametrize("colour", [GREY, BLACK, WHITE, GREEN, BROWN])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_no_word_and_no_colour_keeps_frames_from_being_decoded_again(
    prompt: str, colour: tuple[float, ...]
) -> None:
    pixels, events, _ = decoded(6e-6, prompt, colour)
    assert float(pixels[:, 0].std()) > 0.01
    assert [type(event) for event in events] == [Repaired]


@pytest.mark.parametrize(
    ("prompt", "colour", "is_told"),
    [
        ("a black screen", BLACK, False),
        ("a black screen", GREY, True),
        ("a black screen", WHITE, True),
        ("a dark forest", (-0.97, -0.98, -0.9), False),
        ("a dark forest", GREEN, True),
        ("a white fox in the snow", BLACK, True),
        ("a white fox in the snow", WHITE, False),
        ("it fades out", BLACK, False),
        ("it fades out", WHITE, False),
        ("it fades out", BROWN, True),
        ("a plain background", BROWN, True),
        ("a fox", BLACK, True),
    ],
)
def test_only_words_that_ask_for_the_colour_keep_a_note_back(
    prompt: str, colour: tuple[float, ...], is_told: bool
) -> None:
    """In float32 too the frames are blank."""
    assert bool(decoded(0.0, prompt, colour)[1]) == is_told


def test_a_given_frame_of_one_colour_keeps_a_note_back_and_no_repair() -> None:
    assert not decoded(0.0, is_asked=True)[1]
    assert [type(event) for event in decoded(6e-6, is_asked=True)[1]] == [Repaired]


def test_an_autoencoder_that_overflows_is_repaired() -> None:
    vae = halved(nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 3)))
    scaled(vae[0], 6e4)
    latents = 10 * torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    guard = Guard(plan(), "decode", {"vae": vae})
    with torch.inference_mode():
        pixels = guard.decoded(1, lambda: vae(latents), latents)
    assert bool(pixels.isfinite().all())
    assert repairs(guard)[0].module == "0"


def test_events_are_plain_data() -> None:
    event = guard_module.Repaired(
        "denoise", 1, "unet", "conv", "conv2d", "range", "float16", "conv", "float32", "text"
    )
    assert event.to_json()["type"] == "repaired"
