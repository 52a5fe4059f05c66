"""What is kept is served for the very same and nothing else; whether that pays is tried."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision
from everyframe.dry_run.call import DryRunCall
from everyframe.families.opensora.config import STDiT3Config
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.families.opensora2.layers import MLPEmbedder
from everyframe.fast_paths import benchmark
from everyframe.fast_paths.apply import applies_to, swap_modules
from everyframe.fast_paths.benchmark import relative_error, run_comparisons
from everyframe.fast_paths.certification.target import CertificationTarget, TargetCall
from everyframe.fast_paths.certification.trials import embeddings
from everyframe.fast_paths.modules import cpu_modules
from everyframe.fast_paths.modules.cpu_modules import OneDNNLinear, onednn_linear
from everyframe.fast_paths.modules.fast_modules import (
    CachedEmbedding,
    LinearGelu,
    embedders,
    forget,
    keep,
)
from everyframe.fast_paths.registry import CATALOGUE

pytestmark = pytest.mark.usefixtures("inference_mode")

CONFIG = STDiT3Config(
    hidden_size=32, depth=1, num_heads=2, caption_channels=16, model_max_length=8, in_channels=4
)
PATH = "kept-embeddings"


def build(config: STDiT3Config = CONFIG) -> STDiT3:
    model = STDiT3(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(std=0.1, generator=generator)
    return model


def answer(model: STDiT3, t: float, fps: float, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(1)
    text = torch.randn(1, 8, 16, generator=generator).to(device)
    x = torch.randn(1, 4, 3, 8, 8, generator=generator).to(device)
    out: Tensor = model(
        x, torch.tensor([t], device=device), model.context(text), fps=fps, height=64.0, width=64.0
    )
    return out


def test_a_run_by_it_has_the_bits_of_one_without_and_computes_less() -> None:
    plain, fast = build(), build()
    assert applies_to(PATH, fast)
    assert not applies_to(PATH, nn.Linear(2, 2))
    swap_modules(fast, [PATH])
    assert [*fast.state_dict()] == [*plain.state_dict()]
    computed: list[str] = []
    for name in embedders(fast):
        fast.get_submodule(f"{name}.mlp").register_forward_hook(
            lambda *_, name=name: computed.append(name)
        )
    for t, fps in ((900.0, 24.0), (500.0, 24.0), (900.0, 24.0), (900.0, 8.0)):
        assert torch.equal(answer(fast, t, fps), answer(plain, t, fps))
    assert computed == ["fps_embedder", "t_embedder", "t_embedder", "fps_embedder"]


def test_nothing_that_changed_is_served_as_it_was() -> None:
    module, number = nn.Sequential(build().t_embedder), torch.tensor([700.0, 700.0])
    keep(module, ["0"])
    part = module[0]
    assert isinstance(part, CachedEmbedding)
    seen: list[Tensor] = []

    def changed() -> None:
        """Not the answer of before, and the one that there is without."""
        part.is_plain = True
        want = part(number)
        part.is_plain = False
        assert torch.equal(part(number), want)
        assert torch.equal(part(number), want)
        assert not any(each.shape == want.shape and torch.equal(each, want) for each in seen)
        seen.append(want)

    changed()
    layer = part.get_submodule("mlp.2")
    layer.weight = nn.Parameter(layer.weight * 2, requires_grad=False)
    changed()
    layer.weight.data = layer.weight.data + 1
    changed()
    handle = layer.register_forward_hook(lambda module, given, out: out * 3)
    changed()
    handle.remove()
    assert torch.equal(part(number), seen[-2])
    part.to(torch.float64)
    number = number.double()
    changed()
    number = number[:1]
    changed()
    with torch.inference_mode(False):
        outside = build().t_embedder.requires_grad_(False)
        holder = nn.Sequential(outside)
        keep(holder, ["0"])
        with torch.no_grad():
            number = torch.tensor([700.0])
            before = outside(number)
            outside.get_submodule("mlp.0").weight.mul_(2)  # the same memory, other numbers
            assert not torch.equal(outside(number), before)


def test_what_embeds_frequencies_of_numbers_is_cached_too() -> None:
    """As Open-Sora 2.0's, which gets sines and cosines."""
    module = nn.Sequential(MLPEmbedder(8, 16)).requires_grad_(False)
    one, other = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(0))
    want = [module(each) for each in (one, other, one[:1])]
    keep(module, ["0"])
    computed: list[object] = []
    module[0].in_layer.register_forward_hook(lambda *given: computed.append(given[0]))
    for _ in range(2):
        assert all(map(torch.equal, (module(each) for each in (one, other, one[:1])), want))
    assert len(computed) == 3


def test_what_is_handed_out_can_be_written_into() -> None:
    module, number = nn.Sequential(build().t_embedder), torch.tensor([3.0])
    keep(module, ["0"])
    want = module(number).clone()
    module(number).zero_()
    assert torch.equal(module(number), want)
    forget(module)
    assert torch.equal(module(number), want)


def test_what_is_not_finite_is_not_kept() -> None:
    """The guard repeats a call to see where such a value arises."""
    module, number = nn.Sequential(build().t_embedder), torch.tensor([3.0])
    calls = 0

    def once(*given: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return given[2] * (torch.nan if calls == 1 else 1)

    keep(module, ["0"])
    module[0].get_submodule("mlp").register_forward_hook(once)
    assert not module(number).isfinite().all()
    assert module(number).isfinite().all()


def subject(names: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> CertificationTarget:
    """Wide enough for an embedding to take longer than to look one up."""
    config = STDiT3Config(
        hidden_size=2304, depth=1, num_heads=16, caption_channels=16, model_max_length=8,
        in_channels=4,
    )  # fmt: skip
    monkeypatch.setattr(STDiT3, "embedders", names)
    with torch.device("meta"):
        model = STDiT3(config)
    cpu = DeviceFacts("a processor", "cpu", None, 10**9, 10**9)
    call = DryRunCall(
        "denoise", "denoiser", ("denoiser",), lambda: {"denoiser": model},
        lambda modules, device: answer(modules["denoiser"], 1.0, 24.0, device),
        1, "key", lambda name, module: ("",),
    )  # fmt: skip
    whole = Precision("float32", "float32")
    target = TargetCall(call, {"denoiser": whole})
    return CertificationTarget("denoiser", cpu, 1, whole, "plan", "device", calls=(target,))


def num_products(run: Callable[[], object], device: str) -> float:
    """In place of a clock: the operations of the products that are computed, and one."""
    with FlopCounterMode(display=False) as counter:
        run()
    return 1.0 + counter.get_total_flops()


def test_whether_a_run_has_enough_of_them_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "measure_seconds", num_products)
    path = CATALOGUE[PATH]
    steady = run_comparisons(
        embeddings(subject({"fps_embedder": False}, monkeypatch), path),
        "cpu", time.monotonic() + 120, is_exact=True,
    )  # fmt: skip
    # The very same numbers, and nineteen of twenty looked up.
    assert steady.error == 0
    assert steady.gain > 3
    fresh = run_comparisons(
        embeddings(subject({"t_embedder": True}, monkeypatch), path), "cpu", time.monotonic() + 120
    )
    assert fresh.error == 0
    assert fresh.gain < 1.5, "every step has a timestep of its own, and none is looked up"


def test_a_compiled_block_has_no_operator_that_torch_can_not_compile() -> None:
    """oneDNN's fused ones: inductor's lowering of them wants constants as weights."""
    fused = LinearGelu(nn.Linear(4, 8), "tanh")
    alone = nn.Sequential(nn.Linear(8, 4))
    swap_modules(alone, ["onednn-linear"])
    assert type(alone[0]) is OneDNNLinear
    block = nn.Sequential(fused, alone).requires_grad_(False)
    with torch.inference_mode(False), torch.no_grad():
        exported = torch.export.export(block, (torch.randn(3, 4),))
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert any("linear" in name for name in called)
    assert not any("mkldnn" in name for name in called)


def test_linear_layers_where_onednn_has_no_products_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CPUs without AVX-512 its operator raises: torch computes."""
    made = onednn_linear

    def refuses_bfloat16(x: Tensor, *rest: Any) -> Tensor:
        if x.dtype == torch.bfloat16:
            raise RuntimeError("could not create a primitive descriptor")
        return made(x, *rest)

    cpu_modules._multiplies_in.cache_clear()
    monkeypatch.setattr(cpu_modules, "onednn_linear", refuses_bfloat16)
    torch.manual_seed(0)
    try:
        for linear in (OneDNNLinear(24, 40), LinearGelu(nn.Linear(24, 40), "none")):
            x = torch.randn(8, 24)
            with torch.inference_mode():
                want = linear(x)
                got = linear.bfloat16()(x.bfloat16())
            # Three significant digits in bfloat16, and one rounding of weights and inputs.
            assert relative_error(got, want) < 1e-2
    finally:
        cpu_modules._multiplies_in.cache_clear()
