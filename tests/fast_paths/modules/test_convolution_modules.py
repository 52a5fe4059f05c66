"""Convolutions over frames by our kernels: numbers and names stay, wrong ones are refused."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
    CogVideoXCausalConv3d,
    CogVideoXSpatialNorm3D,
)
from diffusers.models.autoencoders.autoencoder_kl_cosmos import CosmosCausalConv3d
from diffusers.models.autoencoders.autoencoder_kl_magvit import EasyAnimateCausalConv3d
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanRMS_norm
from torch import Tensor, nn

from everyframe.fast_paths.apply import applies_to, swap_modules
from everyframe.fast_paths.benchmark import ComparisonResult, relative_error, run_comparisons
from everyframe.fast_paths.certification import trials
from everyframe.fast_paths.modules import convolution_modules, diffusers_modules
from everyframe.fast_paths.registry import CATALOGUE
from everyframe.ops.convolution import TemporalConv
from everyframe.ops.native import convolutions, kernels, library
from everyframe.ops.native.convolutions import Padding
from everyframe.precision.cast_hooks import add_input_casts
from everyframe.runtime.repair.repairs import RepairSet, apply_repair
from helpers import decoder_paths, native_paths
from helpers.kernel_numbers import numbers
from helpers.tiny_checkpoints import opensora as tiny_opensora

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.skipif(bool(missing := library.why_not()), reason=str(missing)),
]

PATHS = ("native-norm", "temporal-conv", "temporal-winograd", "channels-last", "winograd")


def in_float64(layer: nn.Conv3d, x: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.double()
    return F.conv3d(x.double(), layer.weight.double(), bias, layer.stride, layer.padding,
                    layer.dilation, layer.groups)  # fmt: skip


def wan(*paths: str) -> Any:
    model = decoder_paths.build()
    swap_modules(model, paths)
    model.load_state_dict(tiny_opensora.randomised(decoder_paths.build(), 0))
    return model


def answer(model: Any) -> Tensor:
    return decoder_paths.answer({"vae": model}, "cpu")


def called(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[torch.Size]:
    """The inputs of each call of that function from now on."""
    seen: list[torch.Size] = []
    right: Callable[..., Tensor] = getattr(place, name)
    monkeypatch.setattr(
        place, name, lambda x, *more, **named: seen.append(x.shape) or right(x, *more, **named)
    )
    return seen


LAYERS: dict[str, tuple[Callable[[], nn.Conv3d], str]] = {
    "padded": (lambda: nn.Conv3d(32, 40, 3, padding=1), "WinogradConv3d"),
    "not padded": (lambda: nn.Conv3d(32, 40, 3, bias=False), "WinogradConv3d"),
    "of one frame": (lambda: nn.Conv3d(32, 32, (1, 3, 3), padding=(0, 1, 1)), "WinogradConv3d"),
    "padded in time": (lambda: nn.Conv3d(32, 32, 3, padding=(2, 0, 0)), "WinogradConv3d"),
    "over time": (lambda: nn.Conv3d(32, 8, (3, 1, 1), padding=(1, 0, 0)), "TemporalConv2d"),
    "over time, wide": (
        lambda: nn.Conv3d(32, 40, (3, 1, 1), padding=(1, 0, 0)),
        "WinogradOverTime_TemporalConv2d",
    ),
    "over time, not padded": (
        lambda: nn.Conv3d(32, 40, (3, 1, 1)),
        "WinogradOverTime_TemporalConv2d",
    ),
    "over two frames": (lambda: nn.Conv3d(32, 40, (2, 1, 1)), "TemporalConv2d"),
    "ours over time": (
        lambda: TemporalConv(32, 40, (3, 1, 1), padding=(1, 0, 0)),
        "WinogradOverTime_TemporalConv2d_TemporalConv",
    ),
    "of pixels": (lambda: nn.Conv3d(32, 8, 1), "TemporalConv2d"),
    "half padded": (lambda: nn.Conv3d(32, 32, 3, padding=(1, 1, 0)), "Conv3d"),
    "strided": (lambda: nn.Conv3d(32, 32, 3, (2, 1, 1), padding=1), "Conv3d"),
    "grouped": (lambda: nn.Conv3d(32, 32, 3, padding=1, groups=2), "Conv3d"),
    "of few channels": (lambda: nn.Conv3d(32, 3, 3, padding=1), "Conv3d"),
    "mirrored": (
        lambda: nn.Conv3d(32, 32, 3, padding=(0, 1, 1), padding_mode="reflect"),
        "WinogradConv3d",
    ),
    "repeated": (
        lambda: nn.Conv3d(32, 32, 3, padding=(0, 1, 1), padding_mode="replicate"),
        "WinogradConv3d",
    ),
    "mirrored in time": (lambda: nn.Conv3d(32, 32, 3, padding=1, padding_mode="reflect"), "Conv3d"),
    "round": (
        lambda: nn.Conv3d(32, 32, 3, padding=(0, 1, 1), padding_mode="circular"),
        "Conv3d",
    ),
    "of pixels, mirrored": (
        lambda: nn.Conv3d(32, 8, (3, 1, 1), padding=(1, 0, 0), padding_mode="reflect"),
        "Conv3d",
    ),
    "over time, strided": (lambda: nn.Conv3d(32, 8, (3, 1, 1), (2, 1, 1)), "Conv3d"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_which_convolutions_are_replaced(name: str) -> None:
    """Of a layout either way; sums of 864 products in float32 are within 1e-5."""
    make, kind = LAYERS[name]
    layers = nn.Sequential(make()).requires_grad_(False)
    names = [*layers.state_dict()]
    swap_modules(layers, PATHS)
    assert type(layers[0]).__name__ == kind
    assert [*layers.state_dict()] == names
    x = numbers(2, 32, 4, 22, 17)
    want = copy.deepcopy(LAYERS[name][0]().requires_grad_(False))
    want.load_state_dict(layers[0].state_dict())
    want = want.double()(x.double())
    for given in (x, x.contiguous(memory_format=torch.channels_last_3d)):
        assert relative_error(layers(given), want) < 1e-5
    assert relative_error(layers(x[:1]), want[:1]) < 1e-5


class Cached(nn.Conv3d):
    """Computes something else where torch's class calls its convolution."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight, bias) * 2


CAUSAL: dict[str, Callable[[], nn.Conv3d]] = {
    "of Cosmos": lambda: CosmosCausalConv3d(32, 40, 3),
    "of Cosmos over time": lambda: CosmosCausalConv3d(32, 40, (3, 1, 1), padding=0),
    "of EasyAnimate": lambda: EasyAnimateCausalConv3d(32, 40, 3, padding=1),
    "of CogVideoX": lambda: CogVideoXCausalConv3d(32, 40, 3, pad_mode="constant").conv,
    "of Wan": lambda: WanCausalConv3d(32, 40, 3, padding=1),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_convolution_pads_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own `forward` runs, twice, as some hold frames for the next call; sums as above.

    EasyAnimate's convolves three frames at a time.
    """
    plain = CAUSAL[name]().requires_grad_(False)
    layers = nn.Sequential(copy.deepcopy(plain))
    swap_modules(layers, PATHS)
    assert isinstance(layers[0], type(plain))
    calls = [
        called(monkeypatch, convolutions, each) for each in ("winograd_3d", "winograd_over_time")
    ]
    plain.double()
    for number in (0, 1):
        x = numbers(2, 32, 5, 22, 17 + number)[..., :17]
        assert relative_error(layers(x), plain(x.double())) < 1e-5
    assert sum(map(len, calls)) >= 2


def test_a_class_that_computes_something_else_stays() -> None:
    layer = nn.Sequential(Cached(32, 32, 3, padding=1))
    assert not any(applies_to(path, layer) for path in PATHS)


@pytest.mark.parametrize("paths", [(), ("temporal-conv",)])
@pytest.mark.parametrize("make", [nn.Conv3d, TemporalConv])
def test_few_frames_and_half_precision_over_time(
    paths: tuple[str, ...], make: type[nn.Conv3d], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of four frames are no gain for two; bfloat16 has faster products than float32."""
    layers = nn.Sequential(make(32, 32, (3, 1, 1), padding=(1, 0, 0))).requires_grad_(False)
    swap_modules(layers, (*paths, "temporal-winograd"))
    seen = called(monkeypatch, convolutions, "winograd_over_time")
    x = numbers(1, 32, 2, 8, 8)
    assert relative_error(layers(x), in_float64(layers[0], x)) < 1e-5
    if make is TemporalConv:
        assert layers(x[..., :0]).shape == (1, 32, 2, 8, 0)
    x = numbers(1, 32, 8, 8, 8)
    want = in_float64(layers[0], x)
    assert seen == []
    assert relative_error(layers(x), want) < 1e-5
    assert seen == [x.shape]
    # Three significant digits, once for each input and the result.
    assert relative_error(layers.bfloat16()(x.bfloat16()), want) < 1e-2
    assert seen == [x.shape]


def test_small_frames_are_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights take longer than a few tiles; frames of two pixels a side would be padded to four."""
    layers = nn.Sequential(nn.Conv3d(32, 32, 3, padding=1)).requires_grad_(False)
    swap_modules(layers, PATHS)
    seen = called(monkeypatch, convolutions, "winograd_3d")
    for x in (numbers(1, 32, 1, 8, 8), numbers(50, 32, 4, 2, 2)):
        assert relative_error(layers(x), in_float64(layers[0], x)) < 1e-5
    assert seen == []
    layers(numbers(1, 32, 4, 16, 16))
    assert len(seen) == 1


def test_wan_decodes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls of one frame, of which the later ones get frames of those before."""
    plain, fast = wan(), wan(*PATHS)
    want = answer(plain.double())
    kinds = {type(part).__name__ for part in fast.modules()
             if type(part).__module__ in (convolution_modules.__name__,
                                          diffusers_modules.__name__)}  # fmt: skip
    assert kinds == {
        "NativeWanRMSNorm", "WinogradWanConv3d", "TemporalConv2d_WanCausalConv3d",
        "WinogradOverTime_TemporalConv2d_WanCausalConv3d", "ChannelsLastConv2d",
        "WinogradConv2d_ChannelsLastConv2d",
    }  # fmt: skip
    assert [*fast.state_dict()] == [*plain.state_dict()]
    frames = called(monkeypatch, convolutions, "winograd_3d")
    over_time = called(monkeypatch, convolution_modules, "convolve_over_time")
    got = answer(fast)
    assert {shape[2] for shape in frames} == {1, 2}
    assert over_time
    # Another order of sums through some twenty layers.
    assert relative_error(got, want) < 1e-5


def test_a_repair_computes_wan_plainly_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wan(*PATHS)
    before = answer(model)
    undo = apply_repair(model, RepairSet(native_paths.CPU, {"vae": model}).plainly("vae", ""))
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "call", lambda *_, **__: pytest.fail("a kernel computes"))
        patch.setattr(
            convolution_modules, "convolve_over_time", lambda *_: pytest.fail("so does it")
        )
        # Weights that lie as oneDNN reads them stay so, and are summed in another order.
        assert relative_error(answer(model), answer(wan())) < 1e-5
    undo()
    assert torch.equal(answer(model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("images", [True, False])
def test_norm_of_wan(dtype: torch.dtype, images: bool) -> None:
    """Of pixels without any value, and of tiny ones, as diffusers' own."""
    norm = nn.Sequential(WanRMS_norm(48, images=images)).to(dtype)
    norm[0].gamma.copy_(numbers(*norm[0].gamma.shape))
    x = numbers(2, 48, 5, 6) if images else numbers(2, 48, 3, 5, 6)
    x[..., 1], x[..., 2] = 0.0, 1e-8 * x[..., 2]
    x = x.to(dtype)
    want = norm.double()(x.double())
    norm.to(dtype)
    swap_modules(norm, ("native-norm",))
    assert type(norm[0]).__name__ == "NativeWanRMSNorm"
    got = norm(x)
    assert got.dtype == dtype
    assert not got[..., 1].any()
    for part in (slice(None), slice(2, 3)):
        error = relative_error(got[..., part], want[..., part])
        assert error < (1e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("frames", [1, 4, 5])
def test_norm_of_cogvideox(dtype: torch.dtype, layout: torch.memory_format, frames: int) -> None:
    """Its layers before the latents are enlarged; a first frame of an odd number stands alone."""
    norm = nn.Sequential(CogVideoXSpatialNorm3D(64, 8)).to(dtype)
    f = numbers(2, 64, frames, 8, 12).to(dtype).contiguous(memory_format=layout)
    latents = numbers(2, 8, min(frames, 3), 4, 6).to(dtype)
    truth, _ = copy.deepcopy(norm[0]).double()(f.double(), latents.double())
    theirs, cached = norm[0](f, latents)
    swap_modules(norm, ("native-norm",))
    assert type(norm[0]).__name__ == "NativeSpatialNorm3D"
    ours, kept = norm[0](f, latents)
    assert ours.is_contiguous(memory_format=torch.channels_last_3d)
    # Its product and sum are rounded once in place of twice.
    assert relative_error(ours, truth) < 1.1 * relative_error(theirs, truth) + 1e-7
    assert kept.keys() == cached.keys()
    assert all(torch.equal(kept[name], cached[name]) for name in cached)


def test_norm_of_cogvideox_by_latents_that_are_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a decoder in bfloat16, whose latents are float32; its norms were left to torch."""
    norm = nn.Sequential(CogVideoXSpatialNorm3D(64, 8)).bfloat16()
    add_input_casts(norm)
    f, latents = numbers(2, 64, 5, 8, 12).bfloat16(), numbers(2, 8, 3, 4, 6)
    theirs, cached = norm[0](f, latents)
    swap_modules(norm, ("native-norm",))
    called: list[Any] = []
    whole = kernels.group_norm
    monkeypatch.setattr(kernels, "group_norm", lambda *a, **k: called.append(a) or whole(*a, **k))
    ours, kept = norm[0](f, latents)
    assert len(called) == 1
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert relative_error(ours, theirs) < 5e-3
    assert all(torch.equal(kept[name], cached[name]) for name in cached)


def test_a_norm_of_another_layout_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = nn.Sequential(WanRMS_norm(8, channel_first=False))
    swap_modules(norm, ("native-norm",))
    monkeypatch.setattr(kernels, "layer_norm", lambda *_, **__: pytest.fail("it was called"))
    x = numbers(2, 5, 8)
    assert torch.equal(norm(x), WanRMS_norm(8, channel_first=False)(x))


def test_a_causal_convolution_with_a_stride_stays() -> None:
    layer = nn.Sequential(WanCausalConv3d(32, 32, (3, 1, 1), stride=(2, 1, 1)))
    assert not any(applies_to(path, layer) for path in PATHS)


def tried(path: str) -> ComparisonResult:
    contests = trials.modules(decoder_paths.subject(), CATALOGUE[path])
    return run_comparisons(contests, "cpu", time.monotonic() + 100)


@pytest.mark.parametrize("path", [path for path in PATHS if path != "temporal-winograd"])
def test_a_right_one_is_right(path: str) -> None:
    outcome = tried(path)
    assert outcome.is_right
    assert outcome.error < 1e-5


def test_a_convolution_that_loses_a_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last frame of each sample is taken for zeros."""
    right = convolutions.winograd_3d

    def wrong(x: Tensor, weight: Tensor, bias: Tensor, padding: Padding) -> Tensor:
        shorter, (front, back) = x[:, :, :-1], padding.frames
        if not shorter.shape[2]:
            return torch.zeros_like(right(x, weight, bias, padding))
        return right(shorter, weight, bias, replace(padding, frames=(front, back + 1)))

    monkeypatch.setattr(convolutions, "winograd_3d", wrong)
    assert not tried("winograd").is_right


def test_a_norm_that_is_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.layer_norm
    monkeypatch.setattr(kernels, "layer_norm", lambda *a, **more: right(*a, **more) * 1.001)
    assert not tried("native-norm").is_right


def test_a_convolution_over_time_that_is_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its taps are in the wrong order."""
    right = convolution_modules.convolve_over_time

    def wrong(x: Tensor, conv: nn.Conv3d, padding: int) -> Tensor:
        return right(x.flip(2), conv, padding)

    monkeypatch.setattr(convolution_modules, "convolve_over_time", wrong)
    assert not tried("temporal-conv").is_right
