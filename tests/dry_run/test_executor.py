"""The dry run sees clashes where they are, counts what is alive, and adds up the work.

Each planted model is clean in float32 and breaks only in the precision of some device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision
from everyframe.dry_run.result import DryRunResult
from everyframe.families.svd import layers
from everyframe.hardware.profiles import find_profile, profile_names
from everyframe.ops.activation import GatedGELU
from everyframe.ops.attention import PLAIN, by_kernel
from everyframe.ops.embeddings import timestep_embedding
from everyframe.planning.dry_runs import DryRun, largest_scores
from everyframe.precision.policy import ComponentNeeds, choose
from helpers.dry_runs import dry_run_module

LARGE = 10**9  # parameters, so that no policy keeps a model wide for being small


def device(name: str) -> DeviceFacts:
    return find_profile(name).machine().devices[0]


def dry(
    module: nn.Module, name: str, *inputs: tuple[int, ...], dtype: str = "auto", **needs: Any
) -> DryRunResult:
    """`module` called with zeros of these shapes, in the policy of that profile."""
    facts = device(name)
    precision, _ = choose(facts, dtype, ComponentNeeds("model", LARGE, **needs), force=True)
    return dry_run_module(
        module,
        precision,
        lambda m, where: m(*(torch.zeros(s, device=where) for s in inputs)),
        facts,
    )


class TimeEmbed(nn.Module):
    """imaginAIry 14.0.3: a float32 sinusoid goes into layers that `.half()` made narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.time_embed = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))

    def forward(self, t: Tensor) -> Tensor:
        out: Tensor = self.time_embed(timestep_embedding(t, 8))
        return out


@pytest.mark.parametrize("name", ["cuda-sm70", "cuda-sm75", "mps", "cpu-fp32"])
def test_imaginairys_time_embed_is_found(name: str) -> None:
    def call(module: Any, where: str) -> object:
        return module(torch.zeros(2, device=where))

    # As it was: cast as a whole, nothing at the edges.
    found = dry_run_module(TimeEmbed().half(), None, call, device(name))
    clash = next(each for each in found.findings if each.kind == "clash")
    assert (clash.module, clash.operation) == ("time_embed.0", "addmm")
    assert "float16 and float32" in clash.problem
    assert clash.is_fatal
    # Torch says the same of it, on this CPU, once there are numbers.
    with pytest.raises(RuntimeError, match="dtype"):
        TimeEmbed().half()(torch.zeros(2))
    # The same model with its precision put on from outside, and with the island.
    assert not dry(TimeEmbed(), name, (2,)).findings
    assert not dry(TimeEmbed(), name, (2,), islands=("time_embed",)).findings


class Upcast(nn.Module):
    """Widens a dtype by hand where it is met and forgets the way back: clean in all others."""

    def __init__(self, narrow: torch.dtype) -> None:
        super().__init__()
        self.narrow = narrow
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if x.dtype == self.narrow:
            x = x.float()
        # Not a call of the layer: no edge is passed.
        return F.linear(x, self.outer.weight)


class HardCast(nn.Module):
    """Takes for granted that it runs in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).to(torch.bfloat16) @ self.table


class WideNorm(nn.Module):
    """A norm called by hand with float32 parameters, which a CPU takes and a card does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        wide = torch.ones(4, device=x.device)
        return F.layer_norm(x, (4,), wide, wide)


class DoubleTable(nn.Module):
    """A table of angles in float64, made on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(4, dtype=torch.float64, device=x.device)
        return self.inner(x * angles.cos().to(x.dtype))


HALF = (lambda: Upcast(torch.float16), "", "mm", "clash")
CARD = (WideNorm, "", "native_layer_norm", "clash")
#: For each profile: a model that breaks in its policy, where, in which operation, how.
PLANTED: dict[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    "cpu-fp32": (HardCast, "", "mm", "clash"),
    "cpu-bf16": (lambda: Upcast(torch.bfloat16), "", "mm", "clash"),
    "cuda-sm70": HALF,
    "cuda-sm75": HALF,
    **dict.fromkeys(
        ["cuda-sm80", "cuda-sm86", "cuda-sm89", "cuda-sm90", "cuda-sm100", "cuda-sm120", "rocm"],
        CARD,
    ),
    "mps": (DoubleTable, "", "arange", "missing"),
}
#: A profile whose policy accepts the same model.
CLEAN = {
    "cpu-fp32": "cpu-bf16", "cpu-bf16": "cuda-sm70", "cuda-sm70": "cuda-sm80",
    "cuda-sm75": "cpu-bf16", "mps": "cuda-sm70", "rocm": "cpu-bf16",
}  # fmt: skip


@pytest.mark.parametrize("name", profile_names())
def test_a_planted_clash_is_found_in_its_own_profile(name: str) -> None:
    build, module, operation, kind = PLANTED[name]
    found = dry(build(), name, (2, 4))
    places = [(each.module, each.operation, each.kind) for each in found.findings]
    assert (module, operation, kind) in places, found.findings
    assert not dry(build(), CLEAN.get(name, "cpu-bf16"), (2, 4)).findings


@pytest.mark.parametrize("name", [n for n in profile_names() if n not in ("cpu-fp32", "mps")])
def test_float32_everywhere_is_clean_of_it(name: str) -> None:
    build = PLANTED[name][0]
    assert not dry(build(), name, (2, 4), dtype="float32").findings


class Bad(nn.Module):
    """An island whose inside is narrowed again by hand, and an angle in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.last = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).cos()
        return F.linear(x.float(), self.last[0].weight) + self.last(x)


def test_islands_are_held_to_what_the_plan_says() -> None:
    class Narrowed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x.half(), self.weight.half())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = nn.Linear(4, 4), Narrowed(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.body(x))
            return out

    found = dry(Model(), "cuda-sm70", (2, 4), islands=("last",))
    assert [(each.kind, each.module) for each in found.findings] == [("island", "last")]
    dtypes = {dtype for module, _, dtype in found.seen if module == "body"}
    assert dtypes == {"float16", "float32"}  # its input is cast at its edge


def test_statistics_in_half_precision_are_reported_and_do_not_stop_a_run() -> None:
    found = dry(Bad(), "cuda-sm70", (2, 4), islands=("last",))
    assert [(each.kind, each.operation, each.is_fatal) for each in found.findings] == [
        ("narrow", "cos", False)
    ]


def test_what_torch_itself_refuses_is_a_finding_with_its_place() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x[:, :3])
            return out

    (finding,) = dry(Wrong(), "cuda-sm80", (2, 4)).findings
    assert (finding.kind, finding.module) == ("fails", "layer")


def test_a_size_that_a_function_refuses_is_a_finding_too() -> None:
    """torch raises ValueError for that, before any operation is reached."""
    (finding,) = dry(nn.Sequential(nn.GroupNorm(4, 4)), "cuda-sm80", (1, 4, 1, 1)).findings
    assert (finding.kind, finding.module, finding.operation) == ("fails", "0", "group_norm")


def test_a_module_is_given_back_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    dry(module, "cuda-sm80", (2, 4))
    hooks = [len(p._forward_pre_hooks) + len(p._forward_hooks) for p in module.modules()]
    assert hooks == [0, 0]
    # So a second one finds the same.
    one, two = dry(module, "cuda-sm80", (2, 4)), dry(module, "cuda-sm80", (2, 4))
    assert one == two
    assert not one.findings


def test_what_depends_on_numbers_is_answered_with_no() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not bool((x > 0).all())
            assert x.sum().item() == 0
            return x.to("cpu") + torch.ones(4)

    assert not dry(Asks(), "cuda-sm80", (2, 4)).findings


def test_live_bytes_and_work() -> None:
    class Two(nn.Module):
        """(8, 16) -> (8, 32) -> (8, 16): the first result is alive beside the second."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            out: Tensor = self.b(x)
            return out

    wide = Precision("float32", "float32")
    found = dry_run_module(
        Two(), wide, lambda m, where: m(torch.zeros(8, 16, device=where)), device("cuda-sm90")
    )
    # The input is held by the caller, through the frame of the first call.
    assert found.working_bytes == 4 * (8 * 32 + 8 * 16 + 8 * 16)
    assert found.peak_at == "b: mm"
    assert found.work.operations == 2 * 8 * 16 * 32 * 2


def test_a_feed_forward_in_pieces_is_run_dry_as_it_runs() -> None:
    """On a CPU, what is widened is a piece at a time; the work is that of all of them."""
    length, size, width = 3 * layers._ROWS + 100, 8, 2048

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(size, 2 * width), nn.Linear(width, size)

        def forward(self, x: Tensor) -> Tensor:
            return layers.gated_gelu(x, self.wide, self.narrow, width, GatedGELU())

    card, host = (
        dry(Gated(), name, (1, length, size), dtype="float32") for name in ("cuda-sm90", "cpu-fp32")
    )
    widened = 2 * width * 4
    assert card.working_bytes > length * widened
    assert host.working_bytes < 2 * layers._ROWS * widened
    assert host.work.operations == pytest.approx(card.work.operations, rel=1e-6)
    assert host.work.operations > 2 * length * size * 3 * width - 1


class Core(nn.Module):
    """Attention of (B, heads, N, D) to itself, asked for as diffusers asks, or by places."""

    def __init__(self, *, by_name: bool = False, masked: bool = False) -> None:
        super().__init__()
        self.by_name, self.masked = by_name, masked

    def forward(self, q: Tensor) -> Tensor:
        mask = None
        if self.masked:  # in three dimensions, which no kernel takes
            mask = torch.ones(1, q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
        if self.by_name:
            return F.scaled_dot_product_attention(query=q, key=q, value=q, attn_mask=mask)
        return F.scaled_dot_product_attention(q, q, q, mask)


@pytest.mark.parametrize("by_name", [False, True])
def test_attention_is_one_operation_and_counted(by_name: bool) -> None:
    core = Core(by_name=by_name)
    found = dry(core, "cuda-sm90", (2, 4, 64, 8))
    ((product, operations),) = found.work.products
    assert product.kind == "attention"
    assert operations == 2 * 4 * (2 * 64 * 64 * 8) * 2
    # Scores are no tensor there, and are one on Apple's.
    assert found.working_bytes < 2 * 4 * 64 * 64 * 4
    assert dry(core, "mps", (2, 4, 64, 8)).working_bytes >= 2 * 4 * 64 * 64 * 4
    assert math.isclose(operations, 4 * 2 * 4 * 64 * 64 * 8)


@pytest.mark.parametrize("by_name", [False, True])
def test_dtypes_that_meet_in_attention_are_found(by_name: bool) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_v = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, v = x.float(), self.to_v(x)
            if by_name:
                return F.scaled_dot_product_attention(query=q, key=q, value=v)
            return F.scaled_dot_product_attention(q, q, v)

    assert not dry(Wide(), "cpu-fp32", (1, 2, 4, 8)).findings
    (found,) = (each for each in dry(Wide(), "cuda-sm70", (1, 2, 4, 8)).findings if each.is_fatal)
    assert (found.kind, found.operation) == ("clash", "attention")


def test_scores_that_no_kernel_spares_are_counted() -> None:
    """As torch's own allocations of the same call; its softmax takes a byte a score besides."""
    size = 512
    core = Core(by_name=True, masked=True)
    found = dry(core, "cpu-fp32", (1, 1, size, 8), dtype="float32")
    assert {product.kind for product, _ in found.work.products} == {"product"}
    real = most_allocated(lambda: core(torch.zeros(1, 1, size, 8)))
    assert 0.99 * real < found.working_bytes < 1.05 * real
    # In float32 an A100 has a kernel for heads by fours, and none for others.
    by_fours, others = (
        dry(Core(by_name=True), "cuda-sm80", (1, 1, size, head), dtype="float32").working_bytes
        for head in (8, 6)
    )
    assert by_fours < size * size * 4 < others


def test_scores_of_the_plain_kernel_are_forecast() -> None:
    """The -inf that its softmax notes were left out, a ninth of what its scores take."""
    size = (1, 2, 512, 8)
    found = dry(Core(), "cpu-fp32", size, dtype="float32")
    scores = largest_scores([DryRun(SimpleNamespace(), found)])
    with by_kernel(PLAIN):
        real = most_allocated(lambda: Core()(torch.zeros(size)))
    assert 0.99 * real < found.working_bytes + scores < 1.05 * real


def most_allocated(call: Callable[[], object]) -> int:
    """Bytes that torch's allocator held at most for `call`, beyond what was there."""
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = (each.nbytes() for each in events if each.name() == "[memory]")
    return max(accumulate(sizes))
