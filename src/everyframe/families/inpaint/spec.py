"""ControlNet inpainting specs: repaint the masked part of an image or video.

Upstream: Stable Diffusion 1 and 2 in diffusers' folders, with the ControlNets of lllyasviel and
others. Results are compared with diffusers' `StableDiffusionControlNetInpaintPipeline`. Read next:
`checkpoint.py` (files), `settings.py` (request to settings), `inputs.py` (source, mask, control),
`components.py` (components and memory), `stages.py` (the run).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING

from everyframe.core.plan import Settings
from everyframe.core.quality import PREDICTORS
from everyframe.core.request import Request
from everyframe.families.inpaint import dry_run
from everyframe.families.inpaint.checkpoint import InpaintFiles, keys_of
from everyframe.families.inpaint.components import InpaintBuilder
from everyframe.families.inpaint.config import InpaintConfig
from everyframe.families.inpaint.options import InpaintOptions
from everyframe.families.inpaint.scheduler import num_timesteps
from everyframe.families.inpaint.settings import (
    latent_shape,
    num_painted,
    resolve_settings,
    smaller_settings,
)
from everyframe.runtime.interface import RankShare, VideoGroup
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.runtime.previews.latent_space import LatentSpace, vae_latents
from everyframe.runtime.rank_shares import batch_share

if TYPE_CHECKING:
    from pathlib import Path

    from everyframe.checkpoints.key_map import KeyMap


@dataclass(frozen=True)
class InpaintSpec(NativeModelSpec[InpaintOptions, InpaintFiles, InpaintConfig]):
    """One inpainting checkpoint: configs read, weights not loaded."""

    methods = tuple(PREDICTORS)  # its schedulers make their own steps
    has_partial_guidance = False
    lead_rank_components = ("text_encoder",)
    is_collective = False

    dry_run_calls = dry_run.dry_run_calls
    savings = dry_run.memory_savings

    @classmethod
    def read(
        cls, name: str, title: str, files: InpaintFiles, options: InpaintOptions
    ) -> InpaintSpec:
        config = InpaintConfig.from_json(
            files.where,
            files.configs(),
            files.controlnet_configs(),
            files.pipeline,
            files.has_safety_checker,
        )
        return cls(name, title, options, files, InpaintBuilder(config))

    @property
    def latent_space(self) -> LatentSpace:
        config = self.config
        return vae_latents(
            self,
            "AutoencoderKL",
            config.latent_channels,
            scaling_factor=config.scaling_factor,
            layout="t c h w",
        )

    def resolve(self, request: Request, seed: int) -> tuple[Settings, tuple[str, ...]]:
        return resolve_settings(self.config, self.title, request, self.options, seed)

    def unread(self, settings: Settings) -> tuple[str, ...]:
        if not self.files.has("tokenizer"):
            return ()
        from everyframe.families.clip_tokenizer import load_tokenizer
        from everyframe.families.inpaint.text import tokens_of
        from everyframe.runtime.repair.repairs import prompt_truncated_note

        tokenizer = load_tokenizer(self.files.path("tokenizer"))
        tokens = tokens_of(tokenizer, settings, self.config.num_tokens)
        return tuple(prompt_truncated_note(cut).text for *_, cut in tokens if cut)

    def smaller(self, settings: Settings) -> Iterator[Settings]:
        return smaller_settings(settings)

    def num_branches(self, settings: Settings) -> int:
        """Always one: each rank has whole frames with both guidance branches."""
        return 1

    def rank_part(
        self, settings: Settings, video_group: VideoGroup, rank: int, element_bytes: int
    ) -> RankShare:
        """Share of one rank: whole batches of frames; their latents are sent when done."""
        config, together = self.config, int(settings.option("frames_at_once"))
        strength, steps = float(settings.option("strength")), settings.num_inference_steps
        frames = prod(latent_shape(config, settings)) * together
        # Once per batch, so a fraction of it at each step.
        sent = (
            4
            * frames
            * (len(video_group.weights) - 1)
            // num_timesteps(config.scheduler, steps, strength)
        )
        batches = ceil(num_painted(settings) / together)
        how = "--frames-at-once 1 has a batch for each frame"
        return batch_share(batches, video_group.weights, rank, sent, how)

    @property
    def components_on_disk(self) -> tuple[str, ...]:
        """Component names with the ControlNets last, because they have separate files."""
        return tuple(
            sorted(self.builder.component_names, key=lambda name: name.startswith("controlnet"))
        )

    def weights(self, component: str) -> tuple[Path, KeyMap]:
        names = self.builder.num_elements["text_encoder"]
        return self.files.weights_path(component), keys_of(component, names)
