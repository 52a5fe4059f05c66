"""Step-Video specs: text to video with Step-Video-T2V and its turbo variant.

Upstream: stepfun-ai/Step-Video-T2V. Image to video (Step-Video-TI2V) is a different model and not
supported. Read next: `checkpoint.py` (files), `settings.py` (request to settings),
`components.py` (components and memory), `stages.py` (the run).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everyframe.core.errors import CheckpointError
from everyframe.core.plan import Settings
from everyframe.core.quality import PREDICTORS, SOLVERS
from everyframe.core.request import Request
from everyframe.families.stepvideo import dry_run
from everyframe.families.stepvideo.checkpoint import KEYS, StepVideoFiles
from everyframe.families.stepvideo.components import (
    StepVideoBuilder,
    rank_share,
    token_grid,
)
from everyframe.families.stepvideo.config import (
    HUNYUAN_CLIP,
    StepLLMConfig,
    StepVideoConfig,
    StepVideoModelConfig,
)
from everyframe.families.stepvideo.options import StepVideoOptions
from everyframe.families.stepvideo.settings import (
    latent_shape,
    resolve_settings,
    smaller_settings,
)
from everyframe.families.stepvideo.vae_config import StepVAEConfig
from everyframe.parallel.head_partition import SEQUENCE_BACKENDS
from everyframe.parallel.token_partition import TokenPartition
from everyframe.runtime.interface import RankShare, VideoGroup
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.runtime.previews.latent_space import LatentSpace, vae_latents

if TYPE_CHECKING:
    from pathlib import Path

    from everyframe.checkpoints.key_map import KeyMap


@dataclass(frozen=True)
class StepVideoSpec(NativeModelSpec[StepVideoOptions, StepVideoFiles, StepVideoConfig]):
    """One Step-Video checkpoint: configs read, weights not loaded."""

    methods = (*SOLVERS, *PREDICTORS)
    has_held_guidance = True
    lead_rank_components = ("step_llm", "clip")
    sequence_backends = SEQUENCE_BACKENDS

    dry_run_calls = dry_run.dry_run_calls
    savings = dry_run.memory_savings

    @property
    def is_distilled(self) -> bool:
        """Turbo was distilled to 10 to 15 steps."""
        return self.config.is_turbo

    @classmethod
    def read(
        cls, name: str, title: str, files: StepVideoFiles, options: StepVideoOptions
    ) -> StepVideoSpec:
        def config(component: str) -> Mapping[str, Any] | None:
            return files.config(component) if files.has(component) else None

        denoiser, llm = config("denoiser"), config("step_llm")
        whole = StepVideoConfig(
            denoiser=StepVideoModelConfig.from_json(denoiser or {}),
            llm=StepLLMConfig.from_json(llm) if llm else StepLLMConfig(),
            clip=config("clip") or HUNYUAN_CLIP,
            vae=_vae_config(files),
            is_turbo=files.is_turbo,
            llm_bias=options.llm_bias,
        )
        _check_fit(whole, files)
        return cls(name, title, options, files, StepVideoBuilder(whole))

    @property
    def latent_space(self) -> LatentSpace:
        return vae_latents(self, "StepVAE", self.config.vae.latent_channels)

    def resolve(self, request: Request, seed: int) -> tuple[Settings, tuple[str, ...]]:
        return resolve_settings(self.config, self.title, request, self.options, seed)

    def unread(self, settings: Settings) -> tuple[str, ...]:
        if not self.files.has(*self.lead_rank_components):
            return ()
        from everyframe.families.stepvideo import prompt_tokens

        llm = prompt_tokens.llm_tokenizer(self.files, self.config)
        clip = prompt_tokens.clip_tokenizer(self.files, self.config)
        return tuple(prompt_tokens.tokens_of(settings, llm, clip)[1])

    def smaller(self, settings: Settings) -> Iterator[Settings]:
        return smaller_settings(self.config, settings)

    def num_branches(self, settings: Settings) -> int:
        """Guidance branches: two with guidance (prompt, negative prompt), else one."""
        return 2 if settings.guidance_scale > 1 else 1

    def rank_part(
        self, settings: Settings, video_group: VideoGroup, rank: int, element_bytes: int
    ) -> RankShare:
        """Share of one rank: tokens, heads or their equivalent, and bytes sent.

        Bytes are sent in each block and for the final gather.
        """
        latents = latent_shape(self.config, settings)
        grid = token_grid(self.config, latents, self.num_branches(settings))
        partition = TokenPartition(grid, video_group.weights, video_group.num_cfg_groups)
        return rank_share(self.config.denoiser, partition, video_group.backend, rank, element_bytes)

    def weights(self, component: str) -> tuple[Path, KeyMap]:
        return self.files.weights_path(component), KEYS[component]


def _vae_config(files: StepVideoFiles) -> StepVAEConfig:
    if not files.has("vae"):
        return StepVAEConfig()
    from everyframe.checkpoints.tensor_file import open_checkpoint

    tensors = open_checkpoint(files.weights_path("vae"))
    try:
        return StepVAEConfig.from_shapes({name: tensors.shape(name) for name in tensors})
    except CheckpointError as error:
        raise CheckpointError(f"{tensors.source}: {error}") from None


def _check_fit(config: StepVideoConfig, files: StepVideoFiles) -> None:
    """Raise if components of different models are combined, before anything is loaded."""
    channels = config.denoiser.caption_channels
    if len(channels) != 2:
        raise CheckpointError("this denoiser reads Step-LLM alone; released ones read CLIP too")
    pairs = (
        (
            "vae",
            "the autoencoder has {} latent channels",
            config.vae.z_channels,
            config.denoiser.in_channels,
        ),
        ("step_llm", "Step-LLM has {} channels", config.llm.hidden_size, channels[0]),
        ("clip", "CLIP has {} channels", config.clip.get("hidden_size"), channels[1]),
    )
    for part, what, gives, takes in pairs:
        if gives != takes and files.has(part):
            raise CheckpointError(
                f"{what.format(gives)}, but the denoiser takes {takes}; "
                "these components belong to different models"
            )
