"""A decoder in bfloat16 stays so if frames are near those in float32, else float32 decodes.

Compared with diffusers' own autoencoders in float32, which know nothing of us.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from everyframe.core.events import Repaired
from everyframe.core.plan import Precision
from everyframe.precision import cast_hooks
from everyframe.precision.islands import outside_of
from everyframe.runtime.interface import VideoState
from everyframe.runtime.stages.decoder_check import LEAST_PSNR, check_decoder, middle
from everyframe.runtime.stages.guard import Guard
from helpers.decoder_paths import SIZES
from helpers.guard_modules import plan
from helpers.slow_rows import slow_unless

#: Near enough to the released one that errors mean something, and decoded here in a second.
TEMPORAL = {"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2}
KINDS: dict[str, tuple[Callable[[], Any], tuple[int, ...], dict[str, int]]] = {
    "svd": (lambda: diffusers.AutoencoderKLTemporalDecoder(**TEMPORAL), (2, 4, 24, 20),
            {"num_frames": 2}),
    "wan": (lambda: diffusers.AutoencoderKLWan(**SIZES), (1, 4, 3, 12, 12), {}),
}  # fmt: skip

every_kind = pytest.mark.parametrize("kind", slow_unless({"svd"}, KINDS))


def cancel(decoder: Any, kind: str) -> None:
    """Make the last stream so large that bfloat16 rounds away what it carries; then take it off."""
    last = decoder.up_blocks[-1].resnets[-1]
    (last if kind == "wan" else last.spatial_res_block).conv2.bias += 1e3
    if kind == "wan":  # the norm before the last layer of the other one does so
        decoder.conv_out.weight -= decoder.conv_out.weight.mean(1, keepdim=True)
        decoder.conv_out.weight *= 1e3


class Decoder:
    """Diffusers' autoencoder, the same with its decoder in bfloat16, and latents."""

    def __init__(self, kind: str, *, is_coarse: bool = False) -> None:
        make, shape, self.options = KINDS[kind]
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.theirs = make().eval().requires_grad_(False)
            self.latents = torch.randn(shape)
        if is_coarse:
            cancel(self.theirs.decoder, kind)
        self.ours = copy.deepcopy(self.theirs)
        islands = outside_of("decoder", [name for name, _ in self.ours.named_parameters()])
        cast_hooks.add_cast_hooks(
            self.ours, Precision("bfloat16", "bfloat16", islands), ("decoder",), keeps_float32=True
        )
        self.guard = Guard(plan(), "decode", {"vae": self.ours})
        self.video = VideoState(3)
        self.guard.start_video(self.video)

    def decoded(self, vae: nn.Module, latents: Tensor) -> Tensor:
        made: Tensor = vae.decode(latents, **self.options).sample
        return made

    def check(self, **more: Any) -> bool:
        def decode() -> Tensor:
            return self.decoded(self.ours, middle(self.latents))

        return check_decoder(self.guard, self.ours, decode, 1, **more)


def psnr(ours: Tensor, theirs: Tensor) -> float:
    error = (ours.clamp(-1, 1) - theirs.clamp(-1, 1)).square().mean()
    return float(10 * (4 / error).log10())


def state(module: nn.Module) -> list[tuple[int, torch.dtype, int]]:
    return [(p.data_ptr(), p.dtype, int(p.double().sum() * 1e6)) for p in module.parameters()]


@every_kind
def test_a_decoder_that_is_near_stays_in_bfloat16(kind: str) -> None:
    found = Decoder(kind)
    before = state(found.ours)
    assert not found.check()
    assert state(found.ours) == before, "the check leaves no trace"
    assert not list(found.guard.events())
    assert {p.dtype for p in found.ours.decoder.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in found.ours.encoder.parameters()} == {torch.float32}
    ours = found.decoded(found.ours, found.latents)
    theirs = found.decoded(found.theirs, found.latents)
    assert ours.dtype == torch.float32
    # The piece is the middle of the frames. And it isn't float32 by accident.
    assert LEAST_PSNR <= psnr(ours, theirs) < 75
    # As near as diffusers' own decoder in bfloat16 all through: a dB is a tenth of a rounding.
    narrow = found.decoded(copy.deepcopy(found.theirs).bfloat16(), found.latents.bfloat16())
    assert psnr(ours, theirs) > psnr(narrow.float(), theirs) - 1


@every_kind
def test_one_that_is_too_coarse_decodes_in_float32_as_if_it_had_never_been_narrow(
    kind: str,
) -> None:
    found = Decoder(kind, is_coarse=True)
    theirs = found.decoded(found.theirs, found.latents)
    assert psnr(found.decoded(found.ours, found.latents), theirs) < LEAST_PSNR
    assert found.check()
    # To the bit: also what the weights had lost is back.
    assert torch.equal(found.decoded(found.ours, found.latents), theirs)
    (event,) = found.guard.events()
    assert isinstance(event, Repaired)
    assert (event.component, event.cause, event.to, event.seed) == ("vae", "coarse", "float32", 3)
    assert "dB against float32, and 40 are wanted; vae runs in float32" in event.text
    assert [each.to for each in found.video.repairs] == ["float32"]
    # Another video is decided by its own latents; one that resumes has what was found for it.
    found.guard.start_video(VideoState(4))
    assert {p.dtype for p in found.ours.decoder.parameters()} == {torch.bfloat16}
    found.guard.start_video(found.video)
    assert not found.check()
    assert torch.equal(found.decoded(found.ours, found.latents), theirs)


@pytest.mark.parametrize("shape", [(16, 3, 8, 8), (1, 3, 16, 8, 8)], ids=["TCHW", "BCTHW"])
def test_one_frame_that_is_too_coarse_is_enough(shape: tuple[int, ...]) -> None:
    """Off by 2.5 % of the range: 32 dB in that frame of 16, and 44 over all of them."""
    found = Decoder("svd")
    for off, is_coarse in ((0.05, True), (0.01, False)):
        pixels = torch.zeros(shape)
        pixels.select(0 if len(shape) == 4 else 2, 3).fill_(off)
        answers = iter((pixels, torch.zeros(shape)))
        assert check_decoder(found.guard, found.ours, lambda a=answers: next(a), 1) is is_coarse
        found.guard.start_video(VideoState(4))


def test_values_that_are_not_finite_are_too_coarse() -> None:
    found = Decoder("svd")
    found.ours.decoder.conv_out.weight.view(-1)[0] = float("nan")
    assert found.check()
    assert found.decoded(found.ours, found.latents).isfinite().all()


def test_all_ranks_do_what_the_first_one_finds() -> None:
    """Each would find nearly the same; near the limit that is not enough."""
    found = Decoder("svd")
    for decibels, is_coarse in ((55.0, False), (39.9, True)):
        group: Any = SimpleNamespace(
            is_lead=False, broadcast_object=lambda value, source, what, decibels=decibels: decibels
        )
        assert found.check(group=group) is is_coarse
    assert {p.dtype for p in found.ours.decoder.parameters()} == {torch.float32}
    assert [each.to for each in found.video.repairs] == ["float32"]
    assert not list(found.guard.events()), "the first rank tells it"


def test_a_decoder_without_weights_in_float32_is_not_checked() -> None:
    """As the caller's own, or one that --dtype bf16 asks for."""
    found = Decoder("svd", is_coarse=True)
    found.ours = copy.deepcopy(found.theirs).bfloat16()
    assert not found.check()


def test_the_piece_is_the_middle() -> None:
    """A thirty-second of a frame, within bounds: an even number of rows and of columns."""
    latents = torch.arange(2 * 72 * 128).reshape(1, 2, 72, 128)
    assert torch.equal(middle(latents), latents[..., 28:44, 56:72])
    assert torch.equal(middle(latents[..., :40, :40]), latents[..., 16:24, 16:24])
    assert torch.equal(middle(latents[..., :24, :16]), latents[..., 10:14, 6:10])
    assert middle(latents[..., :3]).shape == (1, 2, 4, 3)
    assert middle(latents[0, 0]).shape == (72, 128)
