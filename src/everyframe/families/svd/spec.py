"""Stable Video Diffusion specs: image to video with diffusers' modules.

Upstream: Stability-AI/generative-models, released as `stable-video-diffusion-img2vid`, `-xt` and
`-xt-1-1`. Results are compared with diffusers' `StableVideoDiffusionPipeline`. Read next:
`checkpoint.py` (files), `settings.py` (request to settings), `components.py` (components and
memory), `stages.py` (the run).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from everyframe.core.plan import Settings
from everyframe.core.quality import METHODS
from everyframe.core.request import Request
from everyframe.families.svd import dry_run
from everyframe.families.svd.checkpoint import SVDFiles
from everyframe.families.svd.components import SVDBuilder, sent_bytes
from everyframe.families.svd.config import SVDConfig
from everyframe.families.svd.options import SVDOptions
from everyframe.families.svd.settings import latent_shape, resolve_settings, smaller_settings
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from everyframe.runtime.interface import RankShare, VideoGroup
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.runtime.previews.latent_space import LatentSpace, vae_latents
from everyframe.runtime.rank_shares import grid_share
from everyframe.runtime.sampling_preset import SamplingPreset

if TYPE_CHECKING:
    from everyframe.checkpoints.key_map import KeyMap
    from everyframe.checkpoints.tensor_file import TensorFile


@dataclass(frozen=True)
class SVDSpec(NativeModelSpec[SVDOptions, SVDFiles, SVDConfig]):
    """One Stable Video Diffusion checkpoint: configs read, weights not loaded."""

    preset_of: str = ""

    methods = tuple(METHODS)
    has_held_guidance = True
    lead_rank_components = ("image_encoder",)

    dry_run_calls = dry_run.dry_run_calls
    savings = dry_run.memory_savings

    @classmethod
    def read(cls, name: str, title: str, files: SVDFiles, options: SVDOptions) -> SVDSpec:
        config = SVDConfig.from_json(files.where, files.configs())
        return cls(name, title, options, files, SVDBuilder(config))

    @property
    def latent_space(self) -> LatentSpace:
        config = self.config
        return vae_latents(
            self,
            "AutoencoderKLTemporalDecoder",
            config.latent_channels,
            scaling_factor=config.scaling_factor,
            layout="b t c h w",
        )

    @property
    def denoiser_classes(self) -> tuple[str, ...]:
        """See `PresetSpec`."""
        return (str(self.config.unet["_class_name"]),)

    def with_preset(self, preset: SamplingPreset, file: str) -> SVDSpec:
        """The same model with the preset's defaults and sampler; see `PresetSpec`."""
        config = replace(self.config, preset=preset)
        return replace(self, builder=replace(self.builder, config=config), preset_of=file)

    @property
    def is_distilled(self) -> bool:
        """See `LossySpec`."""
        return self.config.preset is not None

    def sampling_methods(self, settings: Settings) -> tuple[str, ...]:
        """See `LossySpec`: a consistency model's steps draw noise, and no solver follows them."""
        return () if self.is_distilled else super().sampling_methods(settings)

    def resolve(self, request: Request, seed: int) -> tuple[Settings, tuple[str, ...]]:
        settings, notes = resolve_settings(self.config, self.title, request, self.options, seed)
        frames = self.files.assumed_frames
        if frames is not None and request.num_frames is None and request.seconds is None:
            notes += (
                f"{self.files.where} does not tell whether it was trained on 14 or 25 frames; by "
                f"its name it is taken for {frames} (num_frames sets another length)",
            )
        if self.config.preset is not None:
            notes += (f"{self.preset_of} is {self.config.preset.note}",)
        if self.files.stands_in is not None:
            notes += (f"its {self.files.stands_in} weights are read: no others are on this disk",)
        return settings, notes

    def smaller(self, settings: Settings) -> Iterator[Settings]:
        return smaller_settings(self.config, settings)

    def num_branches(self, settings: Settings) -> int:
        """Guidance branches: two with guidance (with and without the image), else one."""
        return 2 if settings.guidance_scale > 1 else 1

    def rank_part(
        self, settings: Settings, video_group: VideoGroup, rank: int, element_bytes: int
    ) -> RankShare:
        """Share of one rank: frames in space, pixels of the latents in time, and bytes sent."""
        frames, _, rows, columns = latent_shape(self.config, settings)
        grid = TokenGrid(self.num_branches(settings), frames, rows * columns)
        partition = TokenPartition(grid, video_group.weights, video_group.num_cfg_groups)
        unet = self.builder.empty("unet")
        sent = sent_bytes(unet, (rows, columns), partition, rank, element_bytes)
        return grid_share(partition, rank, sent, "work in space")

    def weights(self, component: str) -> tuple[TensorFile, KeyMap]:
        return self.files.weights(component)
