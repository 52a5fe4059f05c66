"""Norms in C apply the SiLU that is called after them, in blocks where nothing else gets it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXResnetBlock3D
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import (
    HunyuanVideoResnetBlockCausal3D,
)
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15ResnetBlock
from diffusers.models.autoencoders.autoencoder_kl_ltx import LTXVideoResnetBlock3d
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import LTX2VideoResnetBlock3d
from diffusers.models.autoencoders.autoencoder_kl_mochi import MochiResnetBlock3D
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResidualBlock
from diffusers.models.resnet import ResnetBlock2D, TemporalResnetBlock
from torch import Tensor, nn

from everyframe.families.opensora.temporal_vae import ResBlock
from everyframe.fast_paths.apply import swap_modules
from everyframe.fast_paths.benchmark import relative_error, run_comparisons
from everyframe.fast_paths.certification import trials
from everyframe.fast_paths.modules import residual_blocks
from everyframe.fast_paths.registry import CATALOGUE
from everyframe.ops.native import kernels, library
from helpers import decoder_paths
from helpers.kernel_numbers import numbers

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.skipif(bool(missing := library.why_not()), reason=str(missing)),
]


IMAGES, FRAMES = (2, 32, 9, 7), (2, 32, 3, 9, 7)
EMBEDDING = numbers(2, 64)

#: Each block, with its inputs.
BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "images": (
        lambda: ResnetBlock2D(in_channels=32, out_channels=64, temb_channels=None, groups=8),
        (numbers(*IMAGES), None),
    ),
    "images and a timestep": (
        lambda: ResnetBlock2D(in_channels=32, temb_channels=64, groups=8),
        (numbers(*IMAGES), EMBEDDING),
    ),
    "frames and a timestep": (
        lambda: TemporalResnetBlock(in_channels=32, temb_channels=64),
        (numbers(*FRAMES), numbers(2, 3, 64)),
    ),
    "HunyuanVideo": (lambda: HunyuanVideoResnetBlockCausal3D(32, 64), (numbers(*FRAMES),)),
    "CogVideoX's encoder": (
        lambda: CogVideoXResnetBlock3D(32, temb_channels=64), (numbers(*FRAMES), EMBEDDING),
    ),
    "CogVideoX's decoder": (
        lambda: CogVideoXResnetBlock3D(32, temb_channels=0, spatial_norm_dim=4),
        (numbers(*FRAMES), None, numbers(2, 4, 2, 3, 7)),
    ),
    "HunyuanVideo 1.5": (lambda: HunyuanVideo15ResnetBlock(32, 64), (numbers(*FRAMES),)),
    "LTX": (lambda: LTXVideoResnetBlock3d(32, 64, is_causal=False), (numbers(*FRAMES),)),
    "LTX-2": (lambda: LTX2VideoResnetBlock3d(32, 64), (numbers(*FRAMES),)),
    "Mochi": (lambda: MochiResnetBlock3D(32), (numbers(*FRAMES),)),
    "Wan": (lambda: WanResidualBlock(32, 32), (numbers(*FRAMES),)),
    "ours over time": (lambda: ResBlock(32, 64, 8), (numbers(*FRAMES),)),
}  # fmt: skip


def randomised(block: nn.Module) -> nn.Module:
    """Norms with weights other than one, so that an order of operations shows."""
    generator = torch.Generator().manual_seed(3)
    for parameter in block.parameters():
        if parameter.ndim != 5:
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 4)
    return block.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("paths", [("native-norm",), ("winograd", "native-norm")])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_computes_the_same(
    name: str, paths: tuple[str, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the block of diffusers in float64; embeddings of the timestep are activated as before."""
    make, inputs = BLOCKS[name]
    plain = nn.ModuleList([randomised(make()).to(dtype)])
    given = [None if each is None else each.to(dtype) for each in inputs]
    wide = [None if each is None else each.double() for each in given]
    truth = copy.deepcopy(plain).double()[0](*wide)
    theirs = relative_error(plain[0](*given), truth)
    fast = copy.deepcopy(plain)
    swap_modules(fast, paths)
    assert [*fast.state_dict()] == [*plain.state_dict()]
    seen: list[int] = []
    right = F.silu

    def silu(x: Tensor, *args: Any, **named: Any) -> Tensor:
        if not named.get("inplace"):
            seen.append(x.ndim)
        return right(x, *args, **named)

    monkeypatch.setattr(F, "silu", silu)
    assert relative_error(fast[0](*given), truth) < 1.2 * theirs + 1e-5
    assert [ndim for ndim in seen if ndim > 3] == []
    # A repair that wants plain kernels has torch's norm, and SiLU after it.
    for part in fast.modules():
        if hasattr(part, "is_plain"):
            part.is_plain = True
    monkeypatch.setattr(kernels, "call", lambda *_, **__: pytest.fail("a kernel computes"))
    assert relative_error(fast[0](*given), truth) < 1.2 * theirs + 1e-5
    assert [ndim for ndim in seen if ndim > 3] == [inputs[0].ndim] * 2


class Halved(ResnetBlock2D):  # type: ignore[misc]
    """A class that nobody knows."""

    def forward(self, input_tensor: Tensor, temb: Tensor | None = None) -> Tensor:
        made: Tensor = self.nonlinearity(self.norm1(input_tensor) / 2)
        return made


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "scaled by an embedding": lambda: ResnetBlock2D(
        in_channels=32, temb_channels=64, groups=8, time_embedding_norm="scale_shift"
    ),
    "shifted by an embedding": lambda: LTXVideoResnetBlock3d(32, timestep_conditioning=True),
    "of another activation": lambda: ResnetBlock2D(
        in_channels=32, temb_channels=64, groups=8, non_linearity="gelu"
    ),
    "of another class": lambda: Halved(in_channels=32, temb_channels=64, groups=8),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_blocks_keep_their_activation(name: str) -> None:
    plain = nn.ModuleList([randomised(OTHERS[name]())])
    fast = copy.deepcopy(plain)
    assert residual_blocks.places(fast) == ()
    swap_modules(fast, ("native-norm",))
    given = numbers(*IMAGES), EMBEDDING
    if isinstance(plain[0], LTXVideoResnetBlock3d):
        given = numbers(*FRAMES), numbers(2, 128, 1, 1, 1)
    assert relative_error(fast[0](*given), plain[0](*given)) < 1e-5


@pytest.mark.parametrize("name", ["images", "images and a timestep", "frames and a timestep"])
def test_a_block_sums_in_place_and_leaves_its_input(name: str) -> None:
    make, inputs = BLOCKS[name]
    fast = nn.ModuleList([randomised(make())])
    swap_modules(fast, ("native-norm",))
    assert type(fast[0]).__name__.startswith("InPlace")
    before = copy.deepcopy(inputs)
    made: list[int] = []
    fast[0].conv2.register_forward_hook(lambda _, args, result: made.append(result.data_ptr()))
    assert fast[0](*inputs).data_ptr() == made[0]
    assert all(x is None or torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_images_in_another_layout_keep_it() -> None:
    """A sum over two layouts has that of the input, as in diffusers."""
    make, (x, _) = BLOCKS["images and a timestep"]
    plain = nn.ModuleList([randomised(make())])
    fast = copy.deepcopy(plain)
    swap_modules(fast, ("native-norm",))
    fast[0].conv2.register_forward_hook(lambda _, args, result: result.contiguous())
    x = x.to(memory_format=torch.channels_last)
    made = fast[0](x, EMBEDDING)
    assert made.stride() == x.stride()
    assert relative_error(made, plain[0](x, EMBEDDING)) < 1e-5


def test_an_embedding_without_a_projection_is_added_as_it_is() -> None:
    plain = nn.ModuleList([randomised(ResnetBlock2D(in_channels=32, temb_channels=None, groups=8))])
    fast = copy.deepcopy(plain)
    swap_modules(fast, ("native-norm",))
    given = numbers(*IMAGES), numbers(2, 32, 1, 1)
    assert relative_error(fast[0](*given), plain[0](*given)) < 1e-5


@pytest.mark.parametrize("change", [{"output_scale_factor": 2.0}, {"up": True}, {"down": True}])
def test_blocks_that_do_more_than_sum_keep_their_class(change: dict[str, Any]) -> None:
    plain = nn.ModuleList(
        [randomised(ResnetBlock2D(in_channels=32, temb_channels=64, groups=8, **change))]
    )
    fast = copy.deepcopy(plain)
    swap_modules(fast, ("native-norm",))
    assert type(fast[0]) is ResnetBlock2D
    given = numbers(*IMAGES), EMBEDDING
    assert relative_error(fast[0](*given), plain[0](*given)) < 1e-5


def test_norms_that_stay_plain_apply_nothing() -> None:
    """A fast path may be refused, and a norm may be of a class without a kernel."""
    block = nn.ModuleList([ResnetBlock2D(in_channels=32, temb_channels=64, groups=8)])
    assert residual_blocks.places(block) == ("0",)
    residual_blocks.fuse(block)
    assert type(block[0].nonlinearity) is nn.SiLU


def test_a_trial_finds_an_activation_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms alone don't show it."""

    def tried() -> bool:
        contests = trials.norms(decoder_paths.subject(), CATALOGUE["native-norm"])
        return run_comparisons(contests, "cpu", time.monotonic() + 100).is_right

    assert tried()
    monkeypatch.setattr(F, "silu", lambda x, **_: x if x.ndim > 3 else pytest.fail("an embedding"))
    monkeypatch.setattr(nn.SiLU, "forward", lambda _, x: x * x.sigmoid())
    assert not tried()
