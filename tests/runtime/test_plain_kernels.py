"""Kernels that are wrong: another one that fits is taken, in the same dtype, before any is raised.

torch's own attention stays finite on a CPU, so wrong kernels are planted: one in place of torch's
own, others as a fast way that a module has beside its plain one.
"""

from __future__ import annotations

import copy
import ctypes
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.core.events import Repaired
from everyframe.core.plan import PLAIN, Repair
from everyframe.fast_paths.modules.modulation_modules import NativeGatedAdd
from everyframe.ops.attention import AttentionCore
from everyframe.ops.native import kernels, library
from everyframe.runtime.repair.repairs import apply_repair
from everyframe.runtime.stages.guard import Guard
from helpers.guard_modules import CLOSE, Net, halved, inputs, plan, repairs, scaled


class Attention(nn.Module):
    """Self-attention around a core."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(8, 8) for _ in range(3))
        self.core = core

    def forward(self, x: Tensor) -> Tensor:
        return self.core(*(f(x)[:, None] for f in (self.to_q, self.to_k, self.to_v)))[:, 0]


@torch.library.custom_op("everyframe_tests::half_attention", mutates_args=())
def half_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention whose products add up in the dtype that they come in, unscaled, as some kernels."""
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v


class TwoWays(nn.Module):
    """A core with a fast way that overflows, and a plain one."""

    def __init__(self, *, plain_is_right: bool = True) -> None:
        super().__init__()
        self.is_plain = False
        self.plain_is_right = plain_is_right

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.is_plain and self.plain_is_right:
            return F.scaled_dot_product_attention(q, k, v)
        return half_attention(q, k, v)


def net_around(core: nn.Module, scale: float = 1.0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net(nn.Identity(), Attention(core), nn.Identity())
    with torch.no_grad():
        for layer in (net.parts[1].to_q, net.parts[1].to_k):
            layer.weight.mul_(scale)
    return net.requires_grad_(False).eval()


@pytest.fixture
def wrong_torch_kernel() -> Iterator[None]:
    """torch's own attention kernel of CPUs gives infinities in float16, and is right otherwise."""
    library = torch.library.Library("aten", "IMPL")

    def lying(q: Tensor, k: Tensor, v: Tensor, *args: object, **more: object) -> tuple[Tensor, ...]:
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        out = scores.softmax(-1) @ v
        return (out * torch.inf if q.dtype == torch.float16 else out), scores.logsumexp(-1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("_scaled_dot_product_flash_attention_for_cpu", lying, "CPU")
    yield
    library._destroy()


def test_a_wrong_kernel_of_torch_is_not_used_any_more(wrong_torch_kernel: None) -> None:
    net = net_around(AttentionCore())
    wanted = copy.deepcopy(net)(inputs())
    halved(net)
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        assert not bool(net(inputs()).isfinite().all()), "the fault was not planted"
        answer = guard.call(1, lambda: net(inputs()))
        assert float((answer - wanted).abs().max()) < CLOSE
        (repair,) = repairs(guard)
        assert (repair.module, repair.target) == ("parts.1.core", "parts.1.core")
        assert (repair.cause, repair.to) == ("kernel", PLAIN)
        assert "attention in net.parts.1.core" in repair.text
        assert f"net.parts.1.core runs in {PLAIN} from here on" in repair.text
        assert bool(net(inputs()).isfinite().all())
        assert {p.dtype for p in net.parts[1].parameters()} == {torch.float16}
        guard.end()
        assert not bool(net(inputs()).isfinite().all()), "taken off again"


def test_a_fast_way_that_adds_up_narrowly_gives_way_to_the_plain_one() -> None:
    # Entries around 300: their products pass 65504, and what is made of them does not.
    net = net_around(TwoWays(), 1000.0)
    wanted = copy.deepcopy(net).double()
    wanted.parts[1].core.is_plain = True
    wanted = wanted(inputs().double())
    halved(net)
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        assert not bool(net(inputs()).isfinite().all()), "the fault was not planted"
        answer = guard.call(1, lambda: net(inputs()))
    assert float((answer - wanted).abs().max()) < CLOSE
    (repair,) = repairs(guard)
    assert (repair.module, repair.operation) == ("parts.1.core", "half_attention")
    assert (repair.cause, repair.to) == ("kernel", PLAIN)
    assert net.parts[1].core.is_plain
    guard.end()
    assert not net.parts[1].core.is_plain


def test_where_the_plain_way_is_no_better_the_module_is_raised() -> None:
    net = halved(net_around(TwoWays(plain_is_right=False), 1000.0))
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        assert bool(guard.call(1, lambda: net(inputs())).isfinite().all())
    assert PLAIN not in {repair.to for repair in repairs(guard)}
    assert not net.parts[1].core.is_plain, "what did not help is taken back"


class Gated(nn.Module):
    """A residual branch in float32, gated by a kernel in C."""

    def __init__(self) -> None:
        super().__init__()
        self.add = NativeGatedAdd()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.add(x.float(), x.float(), x.new_ones(1, 1, 8))
        return out


class WithNaN:
    """In place of the library: each result of the gate is NaN."""

    def gated_sum(self, x: int, branch: int, gate: int, y: int, rows: int, *_: int) -> int:
        ctypes.memset(y, 255, rows * 8 * 4)
        return 0


def guarded(net: nn.Module) -> tuple[Tensor, list[Repaired]]:
    """The net's result under a guard, and the repairs for it."""
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        answer = guard.call(1, lambda: net(inputs()))
    return answer, repairs(guard)


def test_a_kernel_in_c_hands_on_what_is_not_finite() -> None:
    """Torch doesn't see it, and it was blamed for what it was given."""
    if library.why_not():
        pytest.skip(str(library.why_not()))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net(scaled(nn.Linear(8, 8), 1e5), Gated(), Gated())
    answer, (first, *_) = guarded(halved(net.requires_grad_(False)))
    assert answer.isfinite().all()
    assert (first.module, first.cause, first.to) == ("parts.0", "range", "float32")


def test_a_wrong_kernel_in_c_is_not_used_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_library", WithNaN)
    net = Net(nn.Linear(8, 8), nn.Linear(8, 8), Gated()).requires_grad_(False)
    answer, (repair,) = guarded(net)
    assert answer.isfinite().all()
    assert (repair.module, repair.cause, repair.to) == ("parts.2.add", "unclear", PLAIN)


def test_a_remembered_kernel_is_put_on_at_once() -> None:
    net = halved(net_around(TwoWays(), 1000.0))
    apply_repair(net, Repair("net", "parts.1.core", PLAIN, "float16"))
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        guard.call(1, lambda: net(inputs()))
    assert not list(guard.events())


def test_diffusers_attention_backends_give_way_too() -> None:
    """A processor's own backend is taken off, and comes back."""
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

    attention = WanAttention(dim=8, heads=1, dim_head=8, processor=WanAttnProcessor())
    attention.processor._attention_backend = "sage"
    undo = apply_repair(nn.Sequential(attention), Repair("net", "0", PLAIN, "float16"))
    assert attention.processor._attention_backend is None
    undo()
    assert attention.processor._attention_backend == "sage"
