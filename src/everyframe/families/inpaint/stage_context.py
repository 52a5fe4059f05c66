"""Shared context of the inpainting stages: plan, model, inputs and source latents."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from everyframe.families.inpaint.config import InpaintConfig
from everyframe.families.inpaint.inputs import Geometry, Grey, Inputs, open_inputs
from everyframe.families.inpaint.scheduler import make_scheduler, num_timesteps, set_timesteps
from everyframe.families.inpaint.settings import geometry_of, latent_shape, num_painted
from everyframe.families.inpaint.spec import InpaintSpec
from everyframe.media.pixels import Frames
from everyframe.parallel.communicator import broadcastable
from everyframe.runtime.interface import VideoState
from everyframe.runtime.stages import templates

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class InpaintContext(templates.StageContext[InpaintSpec]):
    """Shared by all stages."""

    @property
    def config(self) -> InpaintConfig:
        return self.model.config

    @property
    def geometry(self) -> Geometry:
        return geometry_of(self.config, self.settings)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, h, w) of one frame's latents."""
        return latent_shape(self.config, self.settings)

    @property
    def together(self) -> int:
        return int(self.settings.option("frames_at_once"))

    @property
    def largest_batch(self) -> int:
        """Frames of the largest batch."""
        return min(self.together, num_painted(self.settings))

    @property
    def num_batches(self) -> int:
        return -(-num_painted(self.settings) // self.together)

    def paints(self, mask: Grey) -> bool:
        """Whether a frame with this mask, at the result's size, is denoised."""
        return bool(self.settings.option("unblended")) or bool(mask.any())

    def frames(self, videos: Sequence[VideoState]) -> Iterator[tuple[Frames, Grey]]:
        """Yield every frame and its mask at the result's size."""
        return self.inputs(videos).frames(self.geometry, self.settings.num_frames)

    def iter_painted(self, videos: Sequence[VideoState]) -> Iterator[tuple[Frames, Grey]]:
        """Yield the frames and masks to denoise."""
        return (pair for pair in self.frames(videos) if self.paints(pair[1]))

    def controls(self, video: VideoState) -> Iterator[tuple[Any, ...]]:
        """Yield for each frame to denoise the control image of each ControlNet."""
        seen = self.inputs([video]).control_pictures(self.geometry, self.settings.num_frames)
        for (_, mask), pictures in zip(self.frames([video]), seen, strict=True):
            if self.paints(mask):
                yield pictures

    def inputs(self, videos: Sequence[VideoState]) -> Inputs:
        """Open the inputs anew; frames are read from the first one."""
        first = videos[0].inputs.first
        return open_inputs(self.model.options, None if first is None else first[0])

    @property
    def num_timesteps(self) -> int:
        strength = float(self.settings.option("strength"))
        steps = self.settings.num_inference_steps
        return num_timesteps(self.config.scheduler, steps, strength)

    def make_scheduler(self, device: str) -> tuple[Any, Tensor]:
        """Return a new scheduler and its timesteps."""
        scheduler = make_scheduler(self.config.scheduler)
        strength = float(self.settings.option("strength"))
        return scheduler, set_timesteps(
            scheduler, self.settings.num_inference_steps, strength, device
        )

    def mixes_source_in(self, video: VideoState) -> bool:
        """Whether sampling starts from the noised source; given latents are used unchanged."""
        return float(self.settings.option("strength")) < 1 and video.start_noise is None


@broadcastable
@dataclass(frozen=True, eq=False)
class ConditioningLatents:
    """Latents of source and mask for a video's T frames to denoise, float32 on the CPU.

    Attributes:
        mask: (T, 1, h, w), 1 in the region to denoise.
        masked: (T, 4, h, w), the source with grey under the mask, for a UNet with mask input.
        source: (T, 4, h, w), for a UNet without mask input, or to start from; else None.
    """

    mask: Tensor
    masked: Tensor | None
    source: Tensor | None

    @classmethod
    def join(cls, batches: Sequence[ConditioningLatents]) -> ConditioningLatents:
        """Concatenate the latents of several batches of frames."""

        def whole(name: str) -> Any:
            each = [getattr(batch, name) for batch in batches]
            return None if each[0] is None else torch.cat(each)

        return cls(whole("mask"), whole("masked"), whole("source"))


def batched(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """Yield lists of `size` items; the last may be shorter."""
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch
