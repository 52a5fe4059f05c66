"""Modules by kernels in C and by oneDNN: numbers stay, wrong and deadly ones are refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from torch import Tensor, nn

from everyframe.core.plan import Precision
from everyframe.families.svd import unet
from everyframe.families.svd.components import UNET_ISLANDS
from everyframe.fast_paths.apply import applies_to, swap_modules
from everyframe.fast_paths.benchmark import ComparisonResult, relative_error, run_comparisons
from everyframe.fast_paths.certification import trials
from everyframe.fast_paths.certification.certify import certify
from everyframe.fast_paths.modules import convolution_modules, cpu_modules, gated_linear
from everyframe.fast_paths.registry import CATALOGUE
from everyframe.ops.attention import AttentionCore
from everyframe.ops.native import convolutions, kernels, library
from everyframe.ops.norm import GroupNormSiLU, LayerNorm, RMSNorm, WideLayerNorm
from everyframe.precision.cast_hooks import add_cast_hooks
from everyframe.precision.upcast import Upcast
from everyframe.runtime.repair.repairs import RepairSet, apply_repair
from helpers import native_paths
from helpers.tiny_checkpoints import opensora as tiny_opensora

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.skipif(bool(missing := library.why_not()), reason=str(missing)),
]

#: Those that find nothing in this UNet: it has no modulation, no rotations and no GELU by itself.
NOT_HERE = ("native-gate", "native-rope", "native-gelu")
PATHS = (
    *(path for path in cpu_modules.KINDS if path not in NOT_HERE),
    "native-gated-linear",
)
#: Modules of the classes that fast paths put in.
MODULES = (
    cpu_modules.__name__,
    convolution_modules.__name__,
    cpu_modules.DIFFUSERS_MODULES,
    gated_linear.__name__,
)


@pytest.fixture(scope="module")
def plain() -> unet.VideoUNet:
    with torch.no_grad():
        model = unet.build(native_paths.SIZES).eval().requires_grad_(False)
        model.load_state_dict(tiny_opensora.randomised(model, 0))
    return model


def fast(plain: unet.VideoUNet, *paths: str) -> unet.VideoUNet:
    model = unet.build(native_paths.SIZES).eval().requires_grad_(False)
    swap_modules(model, paths)
    model.load_state_dict(plain.state_dict())
    return model


def answer(model: unet.VideoUNet) -> Tensor:
    return native_paths.answer({"unet": model}, "cpu")


def swapped(model: nn.Module) -> set[str]:
    return {type(part).__name__ for part in model.modules()
            if type(part).__module__ in MODULES}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        ("native-norm", {"NativeGroupNormSiLU", "NativeGroupNorm", "NativeWideLayerNorm"}),
        # The layer around diffusers' own is taken apart, and not called.
        ("native-geglu", {"NativeGatedGELU", "NativeGEGLU"}),
        ("native-attention", {"NativeTemporalAttention"}),
        ("onednn-linear", {"OneDNNLinear"}),
        ("temporal-conv", {"TemporalConv2d_TemporalConv"}),
        ("temporal-winograd", {"WinogradOverTime_TemporalConv"}),
        ("channels-last", {"ChannelsLastConv2d"}),
        ("winograd", {"WinogradConv2d"}),
        ("native-flash", {"NativeSelfAttention"}),
        ("native-gated-linear", {"NativeGatedLinear"}),
    ],
)
def test_names_and_numbers_stay(plain: unet.VideoUNet, path: str, kinds: set[str]) -> None:
    assert applies_to(path, plain)
    assert not applies_to(path, nn.ModuleList([nn.SiLU()]))
    model = fast(plain, path)
    assert swapped(model) == kinds
    assert [*model.state_dict()] == [*plain.state_dict()]
    # Another order of sums through some sixty layers, as in test_unet.
    assert relative_error(answer(model), answer(plain)) < 1e-5


def test_in_half_precision_the_error_is_no_larger(plain: unet.VideoUNet) -> None:
    precision = Precision("bfloat16", "bfloat16", UNET_ISLANDS)
    want, errors = answer(plain), []
    for paths in ((), PATHS):
        model = fast(plain, *paths)
        add_cast_hooks(model, precision, ("conv_out",))
        errors.append(relative_error(answer(model), want))
    assert 1e-3 < errors[0] < 3e-2
    # It rounds less often.
    assert errors[1] < 1.1 * errors[0]


class Norms(nn.Module):
    """One of each norm of a transformer, ours, torch's and diffusers'."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = nn.Sequential(LayerNorm(), WideLayerNorm(24), RMSNorm(24))
        self.torchs = nn.RMSNorm(24, eps=1e-6)
        self.diffusers = nn.Sequential(FP32LayerNorm(24), DiffusersRMSNorm(24, 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([norm(x) for norm in (*self.ours, self.torchs, *self.diffusers)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_transformers(dtype: torch.dtype) -> None:
    """Of strided rows, too; float32 differs by the order of sums, bfloat16 by its last place."""
    torch.manual_seed(0)
    written, native = Norms(), Norms()
    for part in written.parameters():
        part.normal_()
    for each in (written.torchs, *written.diffusers):
        each.to(dtype)
    native.load_state_dict(written.state_dict())
    for each in (native.torchs, *native.diffusers):
        each.to(dtype)
    swap_modules(native, ("native-norm",))
    assert swapped(native) == {
        "NativeLayerNorm", "NativeWideLayerNorm", "NativeRMSNorm", "NativeTorchRMSNorm",
        "NativeFP32LayerNorm", "NativeDiffusersRMSNorm",
    }  # fmt: skip
    x = torch.randn(2, 3, 5, 48)[..., ::2].to(dtype)
    found, wanted = native(x), written(x)
    assert found.dtype == wanted.dtype == dtype
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) < (1e-6 if dtype == torch.float32 else 5e-3)
        assert not torch.equal(one, x)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str) -> None:
    layers = nn.Sequential(nn.Linear(8, 40), nn.GELU(approximate))
    native = nn.Sequential(layers[0], nn.GELU(approximate))
    swap_modules(native, ("native-gelu",))
    assert swapped(native) == {"NativeGELU"}
    x = torch.randn(3, 8)
    assert relative_error(native(x), layers(x)) < 1e-6


def test_a_repair_makes_it_plain_and_gives_it_back(
    plain: unet.VideoUNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fast(plain, *PATHS)
    before = answer(model)

    def forbidden(name: str, *given: Any) -> None:
        raise AssertionError(f"{name} computes, in spite of the repair")

    repairs = RepairSet(native_paths.CPU, {"unet": model})
    undo = apply_repair(model, repairs.plainly("unet", ""))
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "call", forbidden)
        assert relative_error(answer(model), answer(plain)) < 1e-5
    undo()
    assert torch.equal(answer(model), before)


def test_wider_weights_are_computed_with_plainly(plain: unet.VideoUNet) -> None:
    model = fast(plain, *PATHS)
    undo = Upcast(model, torch.float64, keeps_storage=False).undo
    got = answer(model)
    assert got.isfinite().all()
    assert relative_error(got, answer(plain)) < 1e-5
    undo()


def test_statistics_of_other_ranks_are_asked_for_once(plain: unet.VideoUNet) -> None:
    """They are exchanged, so a rank that asks twice would wait for the others."""
    x = torch.randn(1, 32, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    norm = GroupNormSiLU(8, 32)
    holder = nn.Sequential(norm)
    swap_modules(holder, ["native-norm"])
    asked = 0

    def statistics(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        nonlocal asked
        asked += 1
        rows = x.unflatten(1, (groups, -1))
        axes = (2, 3, 4, 5)
        return rows.mean(axes)[..., None, None, None], rows.var(axes, correction=0)[
            ..., None, None, None
        ]

    got = holder[0](x, statistics)
    assert asked == 1
    torch.testing.assert_close(got, norm(x), atol=1e-5, rtol=1e-5)


def test_diffusers_own_gated_gelu_is_replaced() -> None:
    layer = nn.Sequential(GEGLU(16, 32)).requires_grad_(False)
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    want = layer(x)
    swap_modules(layer, PATHS)
    assert swapped(layer) == {"NativeGEGLU", "OneDNNLinear"}
    torch.testing.assert_close(layer(x), want, atol=1e-5, rtol=1e-5)


def test_attention_that_does_not_suit_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    core, causal = nn.Sequential(AttentionCore()), nn.Sequential(AttentionCore(is_causal=True))
    for each in (core, causal):
        swap_modules(each, ("native-flash",))
        assert swapped(each) == {"NativeAttentionCore"}
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, count, 20, generator=generator) for count in (5, 9, 9))
    called = []
    right = kernels.attention
    monkeypatch.setattr(kernels, "attention", lambda *a: called.append(0) or right(*a))
    torch.testing.assert_close(core[0](q, k, v), AttentionCore()(q, k, v))
    torch.testing.assert_close(core[0](q.double(), k, v), AttentionCore()(q, k, v))
    assert len(called) == 2
    mask = torch.arange(9)[None] < 7
    torch.testing.assert_close(core[0](q, k, v, mask), AttentionCore()(q, k, v, mask))
    torch.testing.assert_close(core[0](q[:0], k[:0], v[:0]), q[:0])
    torch.testing.assert_close(core[0](q, k[..., :9, :], v.half()), AttentionCore()(q, k, v.half()))
    want = F.scaled_dot_product_attention(k, k, v, is_causal=True)
    torch.testing.assert_close(causal[0](k, k, v), want)
    assert len(called) == 2


def test_a_wrong_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last key of each query is left out."""
    right = kernels.attention

    def wrong(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return right(q, k[:, :, :-1], v[:, :, :-1], scale)

    monkeypatch.setattr(kernels, "attention", wrong)
    assert not tried("native-flash").is_right


def test_a_gated_linear_without_its_kernel_computes_the_same(
    plain: unet.VideoUNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no compiler, and for what it does not take."""
    model = fast(plain, "native-geglu", "onednn-linear", "native-gated-linear")
    assert swapped(model) == {"NativeGatedLinear", "OneDNNLinear", "NativeGEGLU"}
    assert not applies_to("native-gated-linear", model)
    monkeypatch.setattr(kernels, "supports", lambda *_: False)
    monkeypatch.setattr(kernels, "gated_linear", lambda *_: pytest.fail("the kernel was called"))
    assert relative_error(answer(model), answer(plain)) < 1e-5


def test_convolutions_by_winograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 3x3 with channels enough, of images large enough; the others stay as they are."""
    layers = nn.Sequential(
        nn.Conv2d(8, 32, 3, padding=1),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.Conv2d(64, 64, 3, padding="same"),
        nn.Conv2d(64, 64, 3, padding=1, groups=2),
        nn.Conv2d(64, 64, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(64, 64, 3, 2, padding=1),
        nn.Conv2d(64, 64, 3, padding=0),
        nn.Conv2d(64, 64, 1),
    ).requires_grad_(False)
    x = torch.randn(2, 8, 30, 41, generator=torch.Generator().manual_seed(0))
    want = layers(x)
    swap_modules(layers, ("channels-last", "winograd"))
    kinds = [type(each).__name__ for each in layers]
    assert kinds == [
        "ChannelsLastConv2d", *["WinogradConv2d_ChannelsLastConv2d"] * 2,
        "ChannelsLastConv2d", "WinogradConv2d_ChannelsLastConv2d", *["ChannelsLastConv2d"] * 3,
    ]  # fmt: skip
    called = []
    right = convolutions.winograd
    monkeypatch.setattr(convolutions, "winograd", lambda *a: called.append(a[0].shape) or right(*a))
    torch.testing.assert_close(layers(x), want, atol=1e-5, rtol=1e-5)
    assert called == [(2, 32, 30, 41), *[(2, 64, 30, 41)] * 2]
    # Images of two pixels a side would be padded to four; weights take longer than a few tiles.
    small, few = torch.randn(500, 32, 2, 2), torch.randn(1, 32, 8, 8)
    for each in (small, few):
        torch.testing.assert_close(
            layers[1](each), nn.Conv2d.forward(layers[1], each), atol=1e-5, rtol=1e-5
        )
    assert len(called) == 3


def tried(path: str) -> ComparisonResult:
    contests = trials.modules(native_paths.subject(), CATALOGUE[path])
    return run_comparisons(contests, "cpu", time.monotonic() + 100)


@pytest.mark.parametrize("path", PATHS)
def test_a_right_one_is_right(path: str) -> None:
    outcome = tried(path)
    assert outcome.is_right
    assert outcome.error < 1e-5


def test_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.group_norm

    def wrong(*given: Any, **more: Any) -> Tensor:
        return right(*given, **more) * 1.001

    monkeypatch.setattr(kernels, "group_norm", wrong)
    outcome = tried("native-norm")
    assert not outcome.is_right
    assert outcome.error == pytest.approx(1e-3, rel=0.1)


def test_a_wrong_convolution_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One output pixel of each image is computed wrong."""
    right = convolutions.winograd

    def wrong(*given: Any) -> Tensor:
        y = right(*given)
        y[..., -1, -1] *= 1.1
        return y

    monkeypatch.setattr(convolutions, "winograd", wrong)
    outcome = tried("winograd")
    assert not outcome.is_right
    assert 1e-3 < outcome.error < 1e-1


def test_a_wrong_gated_linear_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gates change places."""
    right = kernels.gated_linear

    def wrong(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return right(x, weight.roll(len(weight) // 2, 0), bias.roll(len(bias) // 2, 0))

    monkeypatch.setattr(kernels, "gated_linear", wrong)
    assert not tried("native-gated-linear").is_right


def test_one_that_crashes_is_refused_with_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    made = certify(native_paths.subject(), [native_paths.CRASHING], 120.0)
    (certificate,) = made.certificates
    assert (certificate.verdict, certificate.reason) == ("refused", "died of SIGSEGV")
