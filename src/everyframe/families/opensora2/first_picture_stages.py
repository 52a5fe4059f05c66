"""Stages of a first picture: FLUX.1 generates it, its autoencoder decodes it.

The picture has a size of upstream's training table and is resized to the video's, as upstream does.
Its timesteps are the video's schedule for one latent frame, not FLUX's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from everyframe.core.plan import Settings
from everyframe.families.opensora2 import first_picture
from everyframe.families.opensora2.denoiser import FirstPictureDenoiser, PromptEmbeds, TextStates
from everyframe.families.opensora2.guidance import time_shift
from everyframe.families.opensora2.prompt_lengths import T5_LENGTH
from everyframe.families.opensora2.settings import first_frame_size
from everyframe.families.opensora2.sharding import Sharding
from everyframe.families.opensora2.stages import OpenSora2Context, SamplerInputs
from everyframe.media.pixels import fit_image, to_uint8
from everyframe.runtime.interface import VideoState
from everyframe.runtime.stages.denoise_stage import VideoDenoiseStage
from everyframe.runtime.stages.frame_pieces import as_floats, as_frames
from everyframe.runtime.stages.templates import VideoEncodeStage
from everyframe.samplers import flow_matching, noise
from everyframe.samplers.base import Step as SamplerStep
from everyframe.samplers.multistep import DiffusionPath

#: The context of a dry run; see `NativeModelSpec.stage_call`.
Context = OpenSora2Context


def _latent_shape(context: OpenSora2Context) -> tuple[int, int, int, int]:
    """(C, 1, h, w) of the picture's latents."""
    config = context.model.config.first_denoiser
    assert config is not None, "FLUX is among the files"
    height, width = first_frame_size(context.settings)
    return (config.latent_channels, 1, height // 8, width // 8)


class FirstDenoiseStage(VideoDenoiseStage[OpenSora2Context, SamplerInputs]):
    """Generate the first picture's latents with FLUX.1."""

    name = "first picture"
    component = "first_denoiser"
    sharding = Sharding

    def inputs(self, video: VideoState, device: str) -> SamplerInputs:
        """The picture's noise, from the video's seed, and its prompt."""
        x = video.latents
        if not video.step:
            label = noise.derived_seed(video.seed, "first picture")
            x = noise.start_noise(label, _latent_shape(self.context))[None]
        return SamplerInputs(x.to(device), video.text)

    def example_inputs(self, device: str) -> SamplerInputs:
        """One text; all texts have the same length."""
        config = self.context.model.config.denoiser
        text = TextStates(
            torch.zeros(1, T5_LENGTH, config.context_in_dim), torch.zeros(1, config.vec_in_dim)
        )
        shape = _latent_shape(self.context)
        return SamplerInputs(torch.zeros(1, *shape, device=device), PromptEmbeds((text,), False))

    def denoiser(
        self, modules: Mapping[str, Any], inputs: SamplerInputs, device: str, settings: Settings
    ) -> FirstPictureDenoiser:
        """The model with its text."""
        return FirstPictureDenoiser(modules[self.component], inputs.text, device)

    def sample(
        self, denoise: Callable[..., Tensor], inputs: SamplerInputs, start: int
    ) -> Iterator[SamplerStep]:
        """Euler steps of flow matching."""
        return flow_matching.sample(denoise, inputs.x, self._times(), start=start)

    def path(self, inputs: SamplerInputs) -> DiffusionPath:
        """The timesteps of flow matching."""
        return flow_matching.path(self._times())

    def _times(self) -> Tensor:
        _, _, height, width = _latent_shape(self.context)
        shift = time_shift(height // 2 * (width // 2), 1)
        steps = self.context.settings.num_inference_steps
        return flow_matching.schedule(steps, shift, reverse=True)


class FirstDecodeStage(VideoEncodeStage[OpenSora2Context, Tensor]):
    """Decode the first picture, with which the video then begins as with a given picture."""

    name = "decode first picture"
    component = "first_vae"

    def inputs(self, video: VideoState, device: str) -> Tensor:
        """The picture's latents."""
        latents: Tensor = video.latents[:, :, 0]
        return latents.to(device)

    def example_inputs(self, device: str) -> Tensor:
        """Latents of its size."""
        channels, _, height, width = _latent_shape(self.context)
        return torch.zeros(1, channels, height, width, device=device)

    def compute(self, module: Any, inputs: Tensor, device: str, settings: Settings) -> Tensor:
        """The picture (1, H, W, 3) in 0..1, on the host."""
        return as_frames(first_picture.decode(module, inputs))

    def store(self, video: VideoState, result: Tensor) -> None:
        """Set the video's `last_frames` to the picture in 8 bits, and reset its start noise."""
        size = self.context.settings.conditioned_size
        picture = fit_image(to_uint8(result.numpy()), *size, "cover")
        video.last_frames, video.latents = as_floats(picture), None
