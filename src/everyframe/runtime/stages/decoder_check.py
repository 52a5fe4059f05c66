"""Check of a decoder that runs in bfloat16: a small piece of a video is decoded in float32 too.

A trial without the model's weights measures the error of products only. This check measures the
error of frames, on this video's own latents.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from everyframe.parallel.communicator import ONE, Communicator
from everyframe.precision.upcast import Upcast, has_float32
from everyframe.runtime.stages.guard import Guard

#: PSNR of frames against those in float32, in dB, below which a decoder is raised to float32; an
#: error of 1 % of their range. Decoders of full size had 42 to 47 dB with random weights.
LEAST_PSNR = 40.0

#: Rows and columns of latents in the piece, which has this part of a frame.
_LEAST_SIDE, _MOST_SIDE, _PART = 4, 16, 1 / 32


def check_decoder(
    guard: Guard,
    module: nn.Module,
    decode: Callable[[], Tensor],
    step: int,
    group: Communicator = ONE.video_group,
) -> bool:
    """Raise a decoder in bfloat16 to float32 if it is too coarse for this video; whether it is.

    ``decode()`` gives pixels around -1..1 of a small piece, of the same latents in each call. All
    ranks of `group` do what the lead rank finds. Nothing is decoded if the plan has the decoder in
    float32, or without the float32 values of its weights.
    """
    if not has_float32(module):
        return False
    found = psnr_to_float32(module, decode) if group.is_lead else 0.0
    found = group.broadcast_object(found, 0, "the decoder's error is broadcast")
    if found >= LEAST_PSNR:
        return False
    why = (
        f"decoded in bfloat16, a piece of this video has {found:.1f} dB against float32, and "
        f"{LEAST_PSNR:.0f} are wanted"
    )
    guard.raise_decoder(step, why, is_lead=group.is_lead)
    return True


def psnr_to_float32(module: nn.Module, decode: Callable[[], Tensor]) -> float:
    """PSNR of the worst frame that `decode` makes with `module`, against float32; NaN if any is.

    Frames are along T of pixels (T, C, H, W) or (B, C, T, H, W). The module is as before
    afterwards, bit for bit.
    """
    narrow = decode()
    upcast = Upcast(module, torch.float32)
    try:
        wide = decode()
    finally:
        upcast.undo()
    difference = narrow.float().clamp(-1, 1) - wide.float().clamp(-1, 1)
    frames = difference.transpose(1, 2).flatten(0, 1) if difference.ndim == 5 else difference
    error = float(frames.square().flatten(1).mean(1).max()) / 4
    return math.inf if error == 0 else -10 * math.log10(error)


def middle(latents: Tensor) -> Tensor:
    """The middle of latents (..., h, w), in all of their frames; other tensors as they are.

    The piece is an even number of rows and columns; decoding it twice costs little of the video.
    """
    if latents.ndim < 4:
        return latents
    wanted = 2 * round(math.sqrt(math.prod(latents.shape[-2:]) * _PART) / 2)
    for axis in (-2, -1):
        side = min(max(wanted, _LEAST_SIDE), _MOST_SIDE, latents.shape[axis])
        latents = latents.narrow(axis, (latents.shape[axis] - side) // 2, side)
    return latents
