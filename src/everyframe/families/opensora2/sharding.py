"""Sequence parallelism for Open-Sora 2.0's denoiser, applied from outside.

One rank takes the same path. The tokens of a sample are one sequence, text first, then image. Each
rank holds a consecutive part of it from the first layer to the last, in uneven shares, where text
and image tokens cost the same. The double blocks' streams are cut at the same places. Modulation
and feed-forward run without communication; attention is Ulysses (`everyframe.parallel.ulysses`) or
ring attention (`everyframe.parallel.ring_attention`). The output is gathered after the last
projection, when it has only a few channels.

Tensors are sent in the dtype in which attention multiplies them. Nothing is padded, and neither
tokens nor heads need to be divisible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.families.opensora2.layers import (
    DoubleBlock,
    JoinStreams,
    JointAttention,
    SplitStreams,
)
from everyframe.families.opensora2.mmdit import MMDiT
from everyframe.ops.modulation import GatedAdd, Modulate
from everyframe.ops.text_context import JointTextContext
from everyframe.parallel.communicator import ParallelContext
from everyframe.parallel.sharded_modules import (
    PerSample,
    ShardedAttentionCore,
    concatenate,
)
from everyframe.parallel.token_partition import SampleSegment, TokenGrid
from everyframe.runtime.model_sharding import FullAttentionSharding, num_streams

#: Parameterless modules: number of leading stream inputs, before the per-sample tables.
_STREAMS: dict[type[nn.Module], int] = {Modulate: 1, GatedAdd: 2}

Segments = tuple[SampleSegment, ...]


class Sharding(FullAttentionSharding):
    """The patch of a sharded denoiser."""

    def __init__(self, model: MMDiT, parallel: ParallelContext) -> None:
        super().__init__(model, parallel, model.config.num_heads)
        self._num_text = 0
        self._patch_size = model.config.patch_size
        self._handles += [
            model.img_in.register_forward_pre_hook(self._take_picture),
            model.text_tokens.register_forward_pre_hook(self._take_text),
            model.rope.register_forward_hook(self._take_rotations),
            model.final_layer.linear.register_forward_hook(self._gather),
        ]
        if hasattr(model, "cond_in"):
            self._handles.append(model.cond_in.register_forward_pre_hook(self._take_picture))
        for part in list(model.modules()):
            self._swap_part(part)

    def _swap_part(self, part: nn.Module) -> None:
        for name, child in list(part.named_children()):
            if number := num_streams(child, _STREAMS):
                streams = {"img": self._picture_segments, "txt": self._text_segments}
                is_double = isinstance(part, DoubleBlock)
                segments = streams[name[:3]] if is_double else self._segments
                self._swap(part, name, PerSample(child, number, self.stream_dim, segments))
            elif isinstance(child, JoinStreams):
                self._swap(part, name, JoinSegments(child, self._segments, self._text_length))
            elif isinstance(child, SplitStreams):
                self._swap(part, name, SplitSegments(child, self._segments, self._text_length))
        if isinstance(part, JointAttention):
            self._swap(part, "core", ShardedAttentionCore(part.core, self._attention))

    def _begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        context: JointTextContext = args[2]
        self._num_text = context.text.shape[1]
        return super()._begin(model, args, kwargs)

    def _grid_of(self, x_BCTHW: Tensor) -> TokenGrid:
        """Token grid: all tokens of a sample form one row, the text's first."""
        batch, _, frames, height, width = x_BCTHW.shape
        picture = frames * (height // self._patch_size) * (width // self._patch_size)
        return TokenGrid(batch, 1, self._num_text + picture)

    def _text_length(self) -> int:
        return self._num_text

    def _text_segments(self) -> Segments:
        return stream_segments(self._segments(), range(self._num_text))

    def _picture_segments(self) -> Segments:
        return stream_segments(
            self._segments(), range(self._num_text, self.switch.partition.grid.places)
        )

    def _take_picture(self, layer: nn.Module, args: tuple[Any, ...]) -> Tensor:
        return select_tokens(args[0], self._picture_segments(), self._num_text)

    def _take_text(self, layer: nn.Module, args: tuple[Any, ...]) -> Tensor:
        return select_tokens(args[0], self._text_segments(), 0)


def stream_segments(segments: Segments, places: range) -> Segments:
    """Cut segments of the joint sequence to one stream, whose tokens are `places` of it.

    `here` of the result counts this rank's tokens of that stream only.
    """
    found, start = [], 0
    for each in segments:
        low = min(max(each.places.start, places.start), places.stop)
        high = max(min(each.places.stop, places.stop), low)
        found.append(
            SampleSegment(each.samples, slice(low, high), slice(start, start + high - low))
        )
        start += high - low
    return tuple(found)


def select_tokens(x_BNC: Tensor, segments: Segments, offset: int) -> Tensor:
    """Select these segments' tokens of a stream that begins at `offset` of the joint sequence."""
    parts = [
        x_BNC[each.samples, each.places.start - offset : each.places.stop - offset]
        for each in segments
    ]
    return concatenate(parts, 1)


class _OfSegments(nn.Module):
    """Base of modules that join or split streams of a rank's tokens of several samples."""

    def __init__(
        self, inner: nn.Module, now: Callable[[], Sequence[SampleSegment]], text: Callable[[], int]
    ) -> None:
        super().__init__()
        self.inner = inner
        self._now, self._text = now, text

    def _lengths(self) -> list[tuple[int, int]]:
        """Number of text and image tokens of each segment."""
        num_text, found = self._text(), []
        for each in self._now():
            of_text = max(min(each.places.stop, num_text) - each.places.start, 0)
            found.append((of_text, each.places.stop - each.places.start - of_text))
        return found


class JoinSegments(_OfSegments):
    """`JoinStreams` segment by segment."""

    def forward(self, text: Tensor, picture: Tensor, dim: int) -> Tensor:
        lengths = self._lengths()
        if len(lengths) == 1:
            joined: Tensor = self.inner(text, picture, dim)
            return joined
        texts = torch.split(text, [each for each, _ in lengths], dim)
        pictures = torch.split(picture, [each for _, each in lengths], dim)
        return torch.cat([part for pair in zip(texts, pictures, strict=True) for part in pair], dim)


class SplitSegments(_OfSegments):
    """`SplitStreams` segment by segment."""

    def forward(self, joint_BNC: Tensor, num_text: int) -> tuple[Tensor, Tensor]:
        lengths = self._lengths()
        if len(lengths) == 1:
            streams: tuple[Tensor, Tensor] = self.inner(joint_BNC, num_text)
            return streams
        parts = torch.split(joint_BNC, [length for pair in lengths for length in pair], dim=1)
        return torch.cat(parts[::2], dim=1), torch.cat(parts[1::2], dim=1)
