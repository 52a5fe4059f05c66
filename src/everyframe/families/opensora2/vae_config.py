"""Configs of Open-Sora 2.0's autoencoders, and their tiles. No torch here.

Both autoencoders use overlapping tiles that are blended. Upstream's results depend on the tiles, so
tiling is part of the model and not a memory fallback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from everyframe.core.errors import CheckpointError, InputError
from everyframe.runtime.request_checks import LatentSize

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class AxisTiles:
    """Tiles along one axis, in units of the input and of the result.

    Attributes:
        size, step: length of a tile, and distance between two tiles, in the input.
        out_step, blend: distance between two tiles, and length of the cross-fade, in the result.
        lead: 1 for frames of a causal autoencoder, else 0: each tile is longer by `lead`, and each
            but the first drops that many results at its beginning.
        least: a last tile shorter than this is merged into the tile before.
    """

    size: int
    step: int
    out_step: int
    blend: int
    lead: int = 0
    least: int = 1

    def spans(self, length: int, is_tiled: bool = True) -> tuple[range, ...]:
        """Ranges of the tiles along an axis; a single one if it is not tiled."""
        if not is_tiled:
            return (range(length),)
        starts = [s for s in range(0, length, self.step) if not s or length - s >= self.least]
        spans = [range(s, min(s + self.size + self.lead, length)) for s in starts]
        if spans[-1].stop < length:  # its short neighbour was left to it
            spans[-1] = range(spans[-1].start, length)
        return tuple(spans)


@dataclass(frozen=True)
class Tiles:
    """Tiles of a video: `frames` first, rows and columns (`sides`) within; None: not tiled."""

    frames: AxisTiles | None
    sides: AxisTiles | None

    def spans(self, size: LatentSize | tuple[int, ...]) -> tuple[tuple[range, ...], ...]:
        """Tiles along frames, rows and columns.

        As upstream does, both sides are tiled as soon as one is longer than a tile, and frames are
        tiled even if a tile with its `lead` could hold all of them.
        """
        frames, height, width = size
        by_time = self.frames is not None and frames > self.frames.size
        across = self.sides is not None and max(height, width) > self.sides.size
        time = self.frames or AxisTiles(1, 1, 1, 0)
        side = self.sides or AxisTiles(1, 1, 1, 0)
        return time.spans(frames, by_time), side.spans(height, across), side.spans(width, across)


@dataclass(frozen=True)
class VAEConfig:
    """Fields that both autoencoders share.

    Attributes:
        scale_factor: factor of latents when encoding.
        tiles_sides, tiles_frames: whether rows and columns are tiled, and whether frames are.
    """

    spatial_factor: ClassVar[int]
    temporal_factor: ClassVar[int] = 4
    is_high_compression: ClassVar[bool]

    latent_channels: int
    scale_factor: float
    sample_size: int
    sample_frames: int
    overlap: float = 0.25
    tiles_sides: bool = True
    tiles_frames: bool = True

    def latent_frames(self, num_frames: int) -> int:
        """Latent frames of a video; raises `InputError` with the nearest possible lengths."""
        raise NotImplementedError

    def nearest_frames(self, num_frames: float) -> tuple[int, ...]:
        """The nearest possible numbers of frames below and above, without this one."""
        raise NotImplementedError

    def latent_size(self, num_frames: int, height: int, width: int) -> LatentSize:
        """Latent frames, rows and columns of a video in pixels."""
        factor = self.spatial_factor
        return LatentSize(self.latent_frames(num_frames), height // factor, width // factor)

    def encode_tiles(self) -> Tiles:
        """Tiles of pixels."""
        return self._tiles(encodes=True)

    def decode_tiles(self) -> Tiles:
        """Tiles of latents."""
        return self._tiles(encodes=False)

    def _tiles(self, *, encodes: bool) -> Tiles:
        frames = self._frame_tiles(encodes=encodes)
        sides = self._axis(self.sample_size, self.spatial_factor, encodes=encodes)
        return Tiles(frames if self.tiles_frames else None, sides if self.tiles_sides else None)

    def _frame_tiles(self, *, encodes: bool) -> AxisTiles:
        raise NotImplementedError

    def _axis(self, size: int, factor: int, *, encodes: bool, **more: Any) -> AxisTiles:
        """Tiles of `size` pixels or frames, in units of the encoder's or decoder's input."""
        small = size // factor
        given, made = (size, small) if encodes else (small, size)
        step, blend = int(given * (1 - self.overlap)), int(made * self.overlap)
        return AxisTiles(given, step, made - blend, blend, **more)


@dataclass(frozen=True)
class HunyuanVAEConfig(VAEConfig):
    """HunyuanVideo's causal autoencoder; the defaults are the released one.

    A video is 4k + 1 frames. Upstream tiles no frames.
    """

    spatial_factor = 8
    is_high_compression = False

    latent_channels: int = 16
    scale_factor: float = 0.476986
    sample_size: int = 256
    sample_frames: int = 64
    tiles_frames: bool = False
    shift_factor: float = 0.0
    in_channels: int = 3
    out_channels: int = 3
    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    layers_per_block: int = 2
    norm_num_groups: int = 32

    def latent_frames(self, num_frames: int) -> int:
        if (num_frames - 1) % self.temporal_factor:
            raise _wrong_length(num_frames, "a multiple of 4 and one more,", self)
        return (num_frames - 1) // self.temporal_factor + 1

    def nearest_frames(self, num_frames: float) -> tuple[int, ...]:
        low = max(int((num_frames - 1) // 4) * 4 + 1, 1)
        return (low, low + 4)

    def _frame_tiles(self, *, encodes: bool) -> AxisTiles:
        return self._axis(self.sample_frames, self.temporal_factor, encodes=encodes, lead=1)

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> HunyuanVAEConfig:
        """Sizes from the tensors' shapes, which do not determine the number of norm groups."""
        widths: list[int] = []
        while (name := f"encoder.down_blocks.{len(widths)}.resnets.0.conv1.conv.weight") in shapes:
            widths.append(_shape(shapes, name)[0])
        resnets = [name for name in shapes if name.startswith("encoder.down_blocks.0.resnets.")]
        return cls(
            latent_channels=_shape(shapes, "quant_conv.weight")[0] // 2,
            in_channels=_shape(shapes, "encoder.conv_in.conv.weight")[1],
            out_channels=_shape(shapes, "decoder.conv_out.conv.weight")[0],
            block_out_channels=tuple(widths),
            layers_per_block=len({name.split(".")[4] for name in resnets}),
        )


@dataclass(frozen=True)
class DCAEConfig(VAEConfig):
    """The video DC-AE (`dc-ae-f32t4c128`); the defaults are the released one.

    A video is one frame, or a multiple of 4 frames from 8 on. For each width, `attention` is
    whether its blocks have attention, `time` whether it halves the number of frames.
    """

    spatial_factor = 32
    is_high_compression = True

    latent_channels: int = 128
    scale_factor: float = 1.0
    sample_size: int = 256
    sample_frames: int = 32
    in_channels: int = 3
    widths: tuple[int, ...] = (128, 256, 512, 512, 1024, 1024)
    encoder_depths: tuple[int, ...] = (2, 2, 2, 3, 3, 3)
    decoder_depths: tuple[int, ...] = (3, 3, 3, 3, 3, 3)
    attention: tuple[bool, ...] = (False, False, False, True, True, True)
    time: tuple[bool, ...] = (False, False, False, True, True, False)

    def latent_frames(self, num_frames: int) -> int:
        if num_frames == 1:
            return 1
        if num_frames % 4 or num_frames < 8:
            raise _wrong_length(num_frames, "1, or a multiple of 4 from 8 on,", self)
        return num_frames // 4

    def nearest_frames(self, num_frames: float) -> tuple[int, ...]:
        if num_frames < 8:
            return (1, 8)
        low = int(num_frames // 4) * 4
        return (low, low + 4)

    def _frame_tiles(self, *, encodes: bool) -> AxisTiles:
        # One latent frame alone decodes to one frame, not to four: upstream loses three there.
        least = 1 if encodes else 2
        return self._axis(self.sample_frames, self.temporal_factor, encodes=encodes, least=least)

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> DCAEConfig:
        """Sizes from the tensors' shapes, which do not determine where time is halved."""
        in_channels = _shape(shapes, "encoder.project_in.conv.weight")[1]
        widths: list[int] = []
        depths: tuple[list[int], list[int]] = ([], [])
        attention: list[bool] = []
        stages = {int(n.split(".")[2]) for n in shapes if n.startswith("encoder.stages.")}
        for stage in sorted(stages):
            for coder, found in zip(("encoder", "decoder"), depths, strict=True):
                names = [n for n in shapes if n.startswith(f"{coder}.stages.{stage}.op_list.")]
                layers = {n.split(".")[4] for n in names if ".main.conv." not in n}
                found.append(len(layers))
            first = f"encoder.stages.{stage}.op_list.0"
            attention.append(f"{first}.context_module.main.qkv.conv.weight" in shapes)
            inner = "context_module.main.qkv" if attention[-1] else "main.conv1"
            widths.append(_shape(shapes, f"{first}.{inner}.conv.weight")[1])
        return cls(
            latent_channels=_shape(shapes, "encoder.project_out.main.op_list.0.conv.weight")[0],
            in_channels=in_channels,
            widths=tuple(widths),
            encoder_depths=tuple(depths[0]),
            decoder_depths=tuple(depths[1]),
            attention=tuple(attention),
            time=tuple(index in (3, 4) for index in range(len(widths))),
        )


def _shape(shapes: Shapes, name: str) -> tuple[int, ...]:
    if name not in shapes or len(shapes[name]) != 5:
        raise CheckpointError(f"no autoencoder of Open-Sora 2.0: it has no convolution {name!r}")
    return shapes[name]


def _wrong_length(num_frames: int, wanted: str, vae: VAEConfig) -> InputError:
    near = " or ".join(map(str, vae.nearest_frames(num_frames)))
    return InputError(f"num_frames must be {wanted} got {num_frames}; try {near}")
