"""Decoders of tiny autoencoders for previews: TAESD (images) and TAEHV (video).

Both are chains of 3x3 convolutions and residual blocks; TAEHV's blocks also see the frame before.
Upstream: madebyollin/taesd and madebyollin/taehv (MIT). diffusers' `AutoencoderTiny` is TAESD under
other names. Of the frames that TAEHV makes of a latent frame only the last is computed, and
upsampling ends once the picture is large enough, as upstream's options for previews do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.core.errors import CheckpointError
from everyframe.media.preview_picture import LONG_SIDE

#: The layers of each decoder in order; those with weights are numbered like upstream's.
_STAGE = ("block", "block", "block", "up")
_TAESD = ("clamp", "conv", "relu", *(*_STAGE, "conv") * 3, "block", "conv")
_TAEHV = ("clamp", "conv", "relu", *(*_STAGE, "grow", "conv") * 3, "relu", "conv")
#: Prefixes of a decoder's tensors, and what is added to their numbers: diffusers has no clamp.
_PREFIXES = (("decoder.layers.", 1), ("decoder.", 0), ("", 0))
#: Latent frames that are decoded for one picture: the first of a clip are of another kind.
_WINDOW = 3


class TinyDecoder:
    """Pixels (H, W, 3) in -1..1 of the last of some latent frames (C, t, h, w), on the CPU."""

    window = _WINDOW

    def __init__(self, path: str | Path) -> None:
        """Read a decoder. Raises `CheckpointError` if the file holds none of these."""
        tensors = _decoder_tensors(Path(path))
        self._layers = _TAEHV if "7.conv.weight" in tensors else _TAESD
        _check_whole(tensors, self._layers, path)
        try:
            self._modules = [
                _module(kind, number, tensors) for number, kind in enumerate(self._layers)
            ]
            self.channels = int(tensors["1.weight"].shape[1])
            num_out = len(tensors[f"{len(self._layers) - 1}.weight"])
            self._patch = round((num_out / 3) ** 0.5)
            if num_out != 3 * self._patch**2:
                raise ValueError(f"its last layer has {num_out} outputs, which are no colours")
            self(torch.zeros(self.channels, 1, 1, 1))  # layers that don't fit each other
        except (RuntimeError, LookupError, ValueError, TypeError) as error:
            text = " ".join(str(error).split())
            raise CheckpointError(f"{path} is no decoder of TAESD or TAEHV: {text}") from error

    def __call__(self, frames_CTHW: Tensor) -> Tensor:
        x = frames_CTHW.to("cpu", torch.float32).movedim(1, 0)
        if self._layers is _TAESD:
            x = x[-1:]
        with torch.no_grad():
            for module in self._modules:
                is_large = max(x.shape[-2:]) * self._patch >= LONG_SIDE
                if not (isinstance(module, nn.Upsample) and is_large):
                    x = module(x)
        picture = F.pixel_shuffle(x[-1:], self._patch)[0]
        return picture.movedim(0, -1) * 2 - 1


class _Clamp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 3) * 3


class _Block(nn.Module):
    """Residual block of three convolutions; with `has_past` it sees the frame before, too."""

    def __init__(self, num_in: int, num_out: int, *, has_past: bool) -> None:
        super().__init__()
        inputs = num_in * (1 + has_past)
        self.has_past = has_past
        self.conv = nn.Sequential(
            nn.Conv2d(inputs, num_out, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, padding=1),
        )
        self.skip = (
            nn.Identity() if num_in == num_out else nn.Conv2d(num_in, num_out, 1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        given = x
        if self.has_past:
            past = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
            given = torch.cat([x, past], dim=1)
        return F.relu(self.conv(given) + self.skip(x))


class _Grow(nn.Module):
    """The last of the frames that upstream's layer makes of one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.conv(x)
        return grown


def _module(kind: str, number: int, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Layer `number` with its weights."""
    if kind == "up":
        return nn.Upsample(scale_factor=2)
    if kind in ("clamp", "relu"):
        return _Clamp() if kind == "clamp" else nn.ReLU()
    start = f"{number}."
    own = {name[len(start) :]: each for name, each in tensors.items() if name.startswith(start)}
    made: nn.Module
    if kind == "grow":
        channels = own["conv.weight"].shape[1]
        own["conv.weight"] = own["conv.weight"][-channels:]
        made = _Grow(channels)
    elif kind == "block":
        num_out = own["conv.2.weight"].shape[0]
        inputs = own["conv.0.weight"].shape[1]
        skip = own.get("skip.weight")
        num_in = num_out if skip is None else skip.shape[1]
        made = _Block(num_in, num_out, has_past=inputs != num_in)
    else:
        num_out, num_in = own["weight"].shape[:2]
        made = nn.Conv2d(num_in, num_out, 3, padding=1, bias="bias" in own)
    made.load_state_dict(own)
    return made.eval()


def _decoder_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of the decoder in that file or folder, float32, by upstream's numbers."""
    file = open_checkpoint(path)
    fitting = (each for each in _PREFIXES if any(name.startswith(each[0]) for name in file))
    prefix, more = next(fitting, _PREFIXES[-1])
    found = {}
    for name in file:
        match = re.fullmatch(rf"{re.escape(prefix)}(\d+)\.(.+)", name)
        if match is not None:
            found[f"{int(match[1]) + more}.{match[2]}"] = file.load(name).to(torch.float32)
    return found


def _check_whole(tensors: Mapping[str, Tensor], layers: Sequence[str], path: str | Path) -> None:
    """Raise `CheckpointError` unless each layer with weights has them, and nothing else does."""
    wanted = {number for number, kind in enumerate(layers) if kind in ("conv", "block", "grow")}
    there = {int(name.partition(".")[0]) for name in tensors}
    if there != wanted:
        raise CheckpointError(
            f"{path} is no decoder of TAESD or TAEHV: layers {sorted(wanted - there)} are missing "
            f"and {sorted(there - wanted)} are unknown"
        )
