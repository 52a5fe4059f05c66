"""Causal convolutions of diffusers by Winograd's algorithm, without padded copies of inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXCausalConv3d
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import HunyuanVideoCausalConv3d
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15CausalConv3d
from diffusers.models.autoencoders.autoencoder_kl_ltx import LTXVideoCausalConv3d
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import LTX2VideoCausalConv3d
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from torch import Tensor, nn

from everyframe.fast_paths.apply import places_of, swap_modules
from everyframe.fast_paths.benchmark import relative_error
from everyframe.ops.native import convolutions, library
from everyframe.ops.native.convolutions import Padding
from helpers.kernel_numbers import numbers

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.skipif(bool(missing := library.why_not()), reason=str(missing)),
]

#: Sums of 864 products, in float32 or of values rounded to bfloat16, whose result is rounded too.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


STATELESS = (HunyuanVideoCausalConv3d, HunyuanVideo15CausalConv3d, LTXVideoCausalConv3d)


class Alone(nn.Module):
    """A convolution in a module, which gives the frames that it keeps for the next call as well."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.inner = conv

    def forward(self, x: Tensor, cache: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.inner, STATELESS):
            return self.inner(x), None
        if isinstance(self.inner, LTX2VideoCausalConv3d):
            return self.inner(x, causal=False), None
        if isinstance(self.inner, WanCausalConv3d):  # its caller keeps them
            return self.inner(x, cache), x[:, :, -2:].clone()
        made: tuple[Tensor, Tensor | None] = self.inner(x, cache)
        return made


CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "CogVideoX": lambda: CogVideoXCausalConv3d(32, 40, 3, pad_mode="first"),
    "Mochi": lambda: CogVideoXCausalConv3d(32, 40, 3, pad_mode="replicate"),
    "HunyuanVideo": lambda: HunyuanVideoCausalConv3d(32, 40, 3),
    "HunyuanVideo 1.5": lambda: HunyuanVideo15CausalConv3d(32, 40, 3),
    "LTX": lambda: LTXVideoCausalConv3d(32, 40, 3, is_causal=False),
    "LTX's encoder": lambda: LTXVideoCausalConv3d(32, 40, 3),
    "LTX-2": lambda: LTX2VideoCausalConv3d(32, 40, 3, spatial_padding_mode="reflect"),
    "Wan": lambda: WanCausalConv3d(32, 40, 3, padding=1),
}


def swapped(conv: nn.Module) -> Alone:
    alone = Alone(conv)
    swap_modules(alone, ("winograd",))
    return alone


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("name", CAUSAL)
def test_pieces_of_a_video(
    name: str, layout: torch.memory_format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one frame too, and of rows that no tile of 4x4 fits; in float64 by diffusers' code."""
    plain = Alone(CAUSAL[name]().requires_grad_(False)).to(dtype)
    fast = swapped(copy.deepcopy(plain.inner))
    truth = copy.deepcopy(plain).double()
    assert [*fast.state_dict()] == [*plain.state_dict()]
    for module in (F, torch):
        for copies in ("pad", "cat", "concatenate", "conv3d"):
            if hasattr(module, copies):
                monkeypatch.setattr(module, copies, _unless_wide(getattr(module, copies)))
    kept: Tensor | None = None
    true: Tensor | None = None
    for frames in (1, 4, 1, 3):
        x = numbers(2, 32, frames, 22, 17).to(dtype).contiguous(memory_format=layout)
        want, true = truth(x.double(), true)
        got, kept = fast(x, kept)
        assert got.dtype == dtype
        assert relative_error(got, want) < TOLERANCE[dtype]
        assert (kept is None) == (true is None)
        if true is not None:
            assert torch.equal(kept.double(), true)


def _unless_wide(right: Callable[..., Any]) -> Callable[..., Any]:
    """Only the float64 side, and the few frames that a piece keeps, are copied."""

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = x if isinstance(x, (list, tuple)) else [x]
        is_short = sum(each.shape[2] for each in tensors) <= 3
        assert is_short or tensors[0].dtype == torch.float64, "a piece of the video is copied"
        return right(x, *args, **kwargs)

    return call


def test_the_convolution_inside_is_no_place_of_its_own() -> None:
    """A trial compares the causal one, which pads otherwise."""
    model = nn.Sequential(HunyuanVideoCausalConv3d(32, 40, 3), nn.Conv3d(32, 40, 3))
    assert places_of("winograd", model) == ("0", "1")
    few = nn.Sequential(HunyuanVideoCausalConv3d(3, 32, 3), HunyuanVideoCausalConv3d(32, 3, 1))
    assert places_of("winograd", few) == ()


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("inner", [True, False])
def test_a_plain_one_pads_as_before(
    name: str, inner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair marks all modules, or one of them."""
    fast = swapped(CAUSAL[name]().requires_grad_(False))
    x = numbers(1, 32, 4, 16, 16)
    want, _ = Alone(CAUSAL[name]())(x, None)
    assert not torch.equal(fast(x, None)[0], want)  # other weights
    for part in fast.modules() if not inner else [getattr(fast.inner, "conv", fast.inner)]:
        if hasattr(part, "is_plain"):
            part.is_plain = True
    monkeypatch.setattr(
        convolutions, "winograd_3d", lambda *_, **__: pytest.fail("a kernel computes")
    )
    assert fast(x, None)[0].shape == want.shape


def test_hooks_of_the_convolution_inside_see_its_call() -> None:
    """Casts of a precision are such hooks."""
    fast = swapped(HunyuanVideoCausalConv3d(32, 40, 3).requires_grad_(False).bfloat16())
    seen = []
    fast.inner.conv.register_forward_hook(lambda *_: seen.append(1))
    fast(numbers(1, 32, 4, 16, 16).bfloat16(), None)
    assert seen == [1]


def test_a_history_that_does_not_fit_is_refused() -> None:
    """C would read beyond its end."""
    x, weight = numbers(1, 8, 2, 6, 6), torch.ones(4, 8, 3, 3, 3)
    for history in (numbers(1, 8, 2, 6, 5), numbers(2, 8, 2, 6, 6), x.bfloat16()):
        with pytest.raises(ValueError, match=r"a history \(1, 8, 2, 6, 6\) in torch\.float32"):
            convolutions.winograd_3d(x, weight, None, Padding((2, 0), 1, history=history))
    one = x[..., :1, :]
    for given, padding in (
        (x, Padding((1, 0), 1, history=x)), (x, Padding((2, -1), 1)), (x, Padding((2, 0), 2)),
        (x, Padding((2, 0), 1, "circular")), (one, Padding((2, 0), 1, "reflect")),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="frames of"):
            convolutions.winograd_3d(given, weight, None, padding)
