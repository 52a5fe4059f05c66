"""Stages of a Stable Video Diffusion run: image embedding, image latents, denoising, decoding.

The computation is that of diffusers' `StableVideoDiffusionPipeline`, step by step; only the source
of the initial noise differs. The templates are in `everyframe.runtime.stages.templates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everyframe.core.plan import Settings
from everyframe.families.svd import denoiser
from everyframe.families.svd import vae as vae_calls
from everyframe.families.svd.config import SVDConfig
from everyframe.families.svd.denoiser import Denoiser, ImageConditioning
from everyframe.families.svd.settings import latent_shape
from everyframe.families.svd.sharding import Sharding
from everyframe.families.svd.spec import SVDSpec
from everyframe.runtime.interface import VideoState
from everyframe.runtime.stages import templates
from everyframe.runtime.stages.denoise_stage import VideoDenoiseStage
from everyframe.runtime.stages.templates import (
    LatentPiece,
    SharedEncodeStage,
    StageContext,
    VideoEncodeStage,
)
from everyframe.samplers import consistency, euler_karras, noise
from everyframe.samplers.base import Step as SamplerStep
from everyframe.samplers.multistep import DiffusionPath


@dataclass(frozen=True)
class SVDContext(StageContext[SVDSpec]):
    """Shared by all stages."""

    @property
    def config(self) -> SVDConfig:
        """The model's configs."""
        return self.model.config

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.settings.height, self.settings.width

    @property
    def fit(self) -> str:
        """How an image of another aspect ratio is fitted: crop, pad or stretch."""
        return str(self.settings.option("fit"))

    @property
    def chunk_size(self) -> int:
        """Frames that are decoded at once."""
        return int(self.settings.option("decode_chunk_size"))


#: The context of a dry run; see `NativeModelSpec.stage_call`.
Context = SVDContext


def given_picture(video: VideoState) -> Any:
    """Conditioning image of a video: uint8 (1, H, W, 3)."""
    assert video.inputs.first is not None, "resolved without a picture"
    return video.inputs.first


class ImageEmbedStage(SharedEncodeStage[SVDContext, Tensor]):
    """Embed the image with CLIP. Its input is (1, 3, side, side), on the host."""

    name = "image"
    component = "image_encoder"
    num_inputs = 1

    def inputs(self, videos: Sequence[VideoState]) -> tuple[list[Tensor], tuple[()]]:
        """The image that all videos share, as CLIP reads it."""
        context = self.context
        shown = denoiser.clip_pixels(given_picture(videos[0]), context.size, context.fit)
        return [denoiser.clip_input(shown, context.config)], ()

    def example_inputs(self, device: str) -> Tensor:
        """An image."""
        side = self.context.config.image_side
        return torch.zeros(1, 3, side, side)

    def compute(self, module: Any, inputs: Tensor, device: str, settings: Settings) -> Tensor:
        """CLIP's embedding (1, 1, D), on the host."""
        embeds: Tensor = module(pixel_values=inputs.to(device)).image_embeds
        return embeds[:, None].to("cpu", torch.float32)

    def store(self, videos: Sequence[VideoState], results: Sequence[Tensor]) -> None:
        """Set the embedding in `conditioning` of each video."""
        for video in videos:
            video.conditioning = ImageConditioning(results[0])


class ImageLatentStage(VideoEncodeStage[SVDContext, Tensor]):
    """Encode the image (1, 3, H, W), with a little noise added, to latents."""

    name = "given frames"
    component = "vae"

    def inputs(self, video: VideoState, device: str) -> Tensor:
        """The image with the video's own noise."""
        context = self.context
        picture = denoiser.vae_pixels(given_picture(video), context.size, context.fit)
        strength = float(context.settings.option("noise_aug_strength"))
        if strength:
            picture = picture + strength * noise.plain_noise(video.seed, picture.shape)
        return picture.to(device)

    def example_inputs(self, device: str) -> Tensor:
        """An image."""
        return torch.zeros(1, 3, *self.context.size, device=device)

    def compute(self, module: Any, inputs: Tensor, device: str, settings: Settings) -> Tensor:
        """Latents of the image, on the host.

        They are not scaled: the denoiser was trained on the encoder's raw values here.
        """
        latents = vae_calls.encode(module, self.context.config, inputs, settings)
        return latents.to("cpu", torch.float32)

    def store(self, video: VideoState, result: Tensor) -> None:
        """Set the latents in `conditioning` of the video."""
        video.conditioning = ImageConditioning(video.conditioning.embedding, result)


@dataclass(frozen=True)
class SamplerInputs:
    """What sampling begins with: x (1, T, C, h, w), the image, and the seed of later noise."""

    x: Tensor
    picture: ImageConditioning
    seed: int = 0


class DenoiseStage(VideoDenoiseStage[SVDContext, SamplerInputs]):
    """Denoise: sampler, guidance and UNet turn noise into latents (1, T, C, h, w)."""

    component = "unet"
    sharding = Sharding

    def _sigmas(self) -> Tensor:
        config, steps = self.context.config, self.context.settings.num_inference_steps
        if config.preset is not None:
            return consistency.schedule(steps, config.sigma_min, config.sigma_max)
        return euler_karras.schedule(steps, config.sigma_min, config.sigma_max)

    def inputs(self, video: VideoState, device: str) -> SamplerInputs:
        """The video's noise and image."""
        context, config = self.context, self.context.config
        if video.step:
            return SamplerInputs(video.latents.to(device), video.conditioning, video.seed)
        sigmas = self._sigmas()
        # AnimateLCM's scheduler scales so whatever the checkpoint's own says.
        is_scaled = config.starts_scaled or config.preset is not None
        scale = euler_karras.start_scale(sigmas) if is_scaled else sigmas[0].float()
        start = video.start_noise
        if start is None:
            start = noise.start_noise(video.seed, latent_shape(config, context.settings))[None]
        return SamplerInputs(start.to(device) * scale, video.conditioning, video.seed)

    def example_inputs(self, device: str) -> SamplerInputs:
        """Latents and image of the plan's size."""
        config = self.context.config
        frames, channels, *size = latent_shape(config, self.context.settings)
        width = int(config.image_encoder.get("projection_dim", 512))
        picture = ImageConditioning(torch.zeros(1, 1, width), torch.zeros(1, channels, *size))
        return SamplerInputs(torch.zeros(1, frames, channels, *size, device=device), picture)

    def denoiser(
        self, modules: Mapping[str, Any], inputs: SamplerInputs, device: str, settings: Settings
    ) -> Denoiser:
        """The UNet with its image and guidance."""
        return Denoiser(modules[self.component], inputs.picture, settings, device)

    def sample(
        self, denoise: Callable[..., Tensor], inputs: SamplerInputs, start: int
    ) -> Iterator[SamplerStep]:
        """Euler steps over Karras' sigmas, or a consistency model's."""
        if self.context.config.preset is not None:
            shape = tuple(inputs.x.shape[1:])

            def draw(step: int) -> Tensor:
                return noise.step_noise(inputs.seed, step, shape)[None]

            return consistency.sample(denoise, inputs.x, self._sigmas(), draw, start=start)
        return euler_karras.sample(denoise, inputs.x, self._sigmas(), start=start)

    def path(self, inputs: SamplerInputs) -> DiffusionPath:
        """Karras' sigmas."""
        return euler_karras.path(self._sigmas())


class DecodeStage(templates.DecodeStage[SVDContext]):
    """Decode latents to frames, `decode_chunk_size` at once."""

    @property
    def num_pieces(self) -> int:
        """Number of chunks."""
        return -(-self.context.settings.num_frames // self.context.chunk_size)

    def inputs(self, video: VideoState, number: int, device: str) -> LatentPiece:
        """The scaled latents (T, C, h, w) of a chunk."""
        chunk = video.latents[0].split(self.context.chunk_size)[number]
        return LatentPiece((chunk * (1 / self.context.config.scaling_factor)).to(device))

    def example_inputs(self, device: str) -> LatentPiece:
        """A chunk."""
        frames, *size = latent_shape(self.context.config, self.context.settings)
        chunk = min(self.context.chunk_size, frames)
        return LatentPiece(torch.zeros(chunk, *size, device=device))

    def compute(self, module: Any, inputs: LatentPiece, device: str, settings: Settings) -> Tensor:
        """Pixels (T, C, H, W) of a chunk, in smaller ones where memory ran out."""
        parts = torch.split(inputs.latents, int(settings.option("decode_chunk_size")))
        pixels = [vae_calls.decode(module, self.context.config, each, settings) for each in parts]
        return pixels[0] if len(pixels) == 1 else torch.cat(pixels)

    def is_one_colour(self, video: VideoState) -> bool:
        """Whether the image is."""
        given = np.asarray(given_picture(video))
        return bool(given.min() == given.max())
