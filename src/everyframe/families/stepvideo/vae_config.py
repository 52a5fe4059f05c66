"""Config of Step-Video's autoencoder, and frame to latent-frame arithmetic. No torch here.

Upstream's folder has no config for it, so sizes are read from the names and shapes of its tensors
(`from_shapes`). The defaults are the released ones (version 2).

A video is coded in independent *pieces* of 17 frames, 3 latent frames each. Where two pieces meet,
the two frames beside the seam are blended (`vae.SeamBlender`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from everyframe.core.errors import CheckpointError, InputError
from everyframe.runtime.request_checks import FrameChunk, LatentSizes

#: Version 1 (16 latent channels, 17 frames to 5 latents) was released too and is unused.
_VERSION_1 = "Step-Video's first autoencoder (vae.safetensors)"


@dataclass(frozen=True)
class StepVAEConfig(LatentSizes):
    """Config of the autoencoder; level widths run from pixels inward, level 0 at full resolution.

    Both halves have one more halving or doubling of all three axes beside the latents.

    Attributes:
        down_sampling_layer: levels after which the encoder halves frames, rows and columns; after
            the others, except the last, it halves rows and columns only.
        temporal_up_layers: levels at which the decoder, going down to level 0, doubles frames, rows
            and columns; at the others, except 0, it doubles rows and columns only.
    """

    z_channels: int = 64
    encoder_channels: int = 32
    encoder_widths: tuple[int, ...] = (128, 256, 512, 512)
    encoder_blocks: int = 2
    down_sampling_layer: tuple[int, ...] = (1, 2)
    decoder_widths: tuple[int, ...] = (128, 256, 512, 512)
    decoder_blocks: int = 2
    temporal_up_layers: tuple[int, ...] = (2, 3)
    frame_len: int = 17
    latent_len: int = 3
    num_groups: int = 32

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            values = value if isinstance(value, tuple) else (value,)
            if not values or not all(isinstance(one, int) and one >= 0 for one in values):
                raise CheckpointError(f"the autoencoder's {field.name} can't be {value!r}")
        widths = (self.encoder_channels, *self.encoder_widths, *self.decoder_widths)
        if any(width < 1 or width % self.num_groups for width in widths):
            raise CheckpointError(
                f"the autoencoder's widths must be multiples of {self.num_groups}, as its norms "
                f"have so many groups; got {sorted(set(widths))}"
            )
        if len(self.encoder_widths) != len(self.decoder_widths):
            raise CheckpointError(
                f"the autoencoder's encoder has {len(self.encoder_widths)} levels and its decoder "
                f"{len(self.decoder_widths)}; there must be as many"
            )
        for name, last in (("encoder", self.encoder_widths[-1]),
                           ("decoder", self.decoder_widths[-1])):  # fmt: skip
            if 8 * last % self.wide_channels:
                raise CheckpointError(
                    f"8 times the {name}'s last width must be a multiple of 32 times the latent "
                    f"channels, got {last} and {self.z_channels}"
                )
        if self.code_frames(self.frame_len) != self.latent_len:
            raise CheckpointError(
                f"{self.frame_len} frames give {self.code_frames(self.frame_len)} latent frames "
                f"in this autoencoder, not {self.latent_len}"
            )

    @property
    def wide_channels(self) -> int:
        """Channels beside the latents, where 8 grid places are folded into the channels."""
        return 32 * self.z_channels

    @property
    def latent_channels(self) -> int:
        return self.z_channels

    @property
    def spatial_factor(self) -> int:  # type: ignore[override]
        return int(2 ** len(self.encoder_widths))

    @property
    def dropped_frames(self) -> int:
        """Frames to drop from the front of a decoded piece."""
        return int(2 ** len(self.temporal_up_layers)) - 1

    def code_frames(self, num_frames: int) -> int | None:
        """Latent frames of a chunk of `num_frames`; None for an unsupported length."""
        for _ in self.down_sampling_layer:
            num_frames = -(-num_frames // 2)
        return (num_frames + 1) // 2 if num_frames % 2 else None

    def piece_frames(self, num_latents: int) -> int:
        """Decoded frames of a piece, by its latent frames: 3 give 17, 2 give 9, 1 gives 1."""
        frames = 2 * num_latents - 1
        return frames * (self.dropped_frames + 1) - self.dropped_frames

    @property
    def last_pieces(self) -> tuple[int, ...]:
        """Possible lengths of a shorter last piece in frames: 1 and 9."""
        return tuple(self.piece_frames(count) for count in range(1, self.latent_len))

    def nearest_frames(self, num_frames: int) -> tuple[int, int]:
        """Nearest valid lengths: the longest not above `num_frames`, the shortest not below."""
        whole = num_frames // self.frame_len * self.frame_len
        lengths = sorted({
            max(whole, 1), *(whole + rest for rest in self.last_pieces), whole + self.frame_len
        })  # fmt: skip
        below = [length for length in lengths if length <= num_frames]
        above = [length for length in lengths if length >= num_frames]
        return below[-1], above[0]

    def pieces(self, num_frames: int) -> tuple[FrameChunk, ...]:
        """Pieces that a video of `num_frames` is coded in; `InputError` for an invalid length.

        17 frames give 3 latent frames, 34 give 6, 26 give 5, 1 gives 1.
        """
        if num_frames < 1 or self.nearest_frames(num_frames) != (num_frames, num_frames):
            low, high = self.nearest_frames(max(num_frames, 1))
            raise InputError(
                f"num_frames must be a multiple of {self.frame_len}, or "
                f"{' or '.join(map(str, self.last_pieces))} more, got {num_frames}; "
                f"try {low}{f' or {high}' if high != low else ''}"
            )
        pieces, latent = [], 0
        for start in range(0, num_frames, self.frame_len):
            stop = min(start + self.frame_len, num_frames)
            counts = range(1, self.latent_len + 1)
            count = next(c for c in counts if self.piece_frames(c) == stop - start)
            pieces.append(FrameChunk(start, stop, latent, latent + count))
            latent += count
        return tuple(pieces)

    def decoded_frames(self, latent_frames: int) -> int:
        """Frames of a video with that many latent frames."""
        whole, rest = divmod(latent_frames, self.latent_len)
        return whole * self.frame_len + (self.piece_frames(rest) if rest else 0)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]]) -> StepVAEConfig:
        """Read the sizes from tensor names and shapes.

        Raises `CheckpointError` for another autoencoder.
        """
        if "decoder.conv_unpatchify.conv.conv.weight" not in shapes:
            is_first = any(name.startswith("decoder.up.3.") for name in shapes)
            what = _VERSION_1 if is_first else "no autoencoder of Step-Video"
            raise CheckpointError(f"this is {what}; wanted is version 2, vae_v2.safetensors")
        encoder, decoder = _levels(shapes, "encoder.down"), _levels(shapes, "decoder.up")
        return cls(
            z_channels=_shape(shapes, "decoder.conv_in.conv.weight")[1],
            encoder_channels=_shape(shapes, "encoder.conv_in.conv.weight")[0],
            encoder_widths=encoder[0],
            encoder_blocks=encoder[1],
            down_sampling_layer=_with(shapes, r"encoder\.down\.(\d+)\.downsample\.conv\.conv\..*"),
            decoder_widths=decoder[0],
            decoder_blocks=decoder[1] - 1,
            temporal_up_layers=_with(shapes, r"decoder\.up\.(\d+)\.upsample\.conv3d\..*"),
        )


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...]:
    if len(shapes.get(name, ())) != 5:
        raise CheckpointError(f"this is no autoencoder of Step-Video: it lacks {name!r}")
    return shapes[name]


def _levels(shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[tuple[int, ...], int]:
    """Widths of the levels of that name, and the number of blocks of the first."""
    pattern = re.compile(re.escape(name) + r"\.(\d+)\.block\.(\d+)\.conv1\.conv\.weight")
    found = {
        (int(match[1]), int(match[2])): shapes[match[0]][0]
        for match in map(pattern.fullmatch, shapes)
        if match
    }
    widths = tuple(found[place] for place in sorted(found) if place[1] == 0)
    return widths, len([place for place in found if place[0] == 0])


def _with(shapes: Mapping[str, tuple[int, ...]], pattern: str) -> tuple[int, ...]:
    """Levels that have tensors of that pattern."""
    found = (re.fullmatch(pattern, name) for name in shapes)
    return tuple(sorted({int(match[1]) for match in found if match}))
