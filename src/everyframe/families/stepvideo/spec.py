"""Step-Video specs: text to video with Step-Video-T2V and its turbo variant.

Upstream: stepfun-ai/Step-Video-T2V. Image to video (Step-Video-TI2V) is a different model and not
supported. Read next: `checkpoint.py` (files), `settings.py` (request to settings),
`components.py` (components and memory), `stages.py` (the run).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everyframe.checkpoints.folder import read_json
from everyframe.core.errors import CheckpointError
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.families.stepvideo import settings as request_settings
from everyframe.families.stepvideo.checkpoint import CLIP_ENCODER, KEYS, StepVideoFiles
from everyframe.families.stepvideo.components import (
    HUNYUAN_CLIP,
    PARTS,
    StepVideoBuilder,
    components,
    rank_share,
    token_grid,
)
from everyframe.families.stepvideo.config import StepLLMConfig, StepVideoConfig
from everyframe.families.stepvideo.dry_run import dry_run_calls, memory_savings
from everyframe.families.stepvideo.options import StepVideoOptions
from everyframe.families.stepvideo.vae_config import StepVAEConfig
from everyframe.parallel.head_partition import ATTENDING
from everyframe.parallel.token_partition import TokenPartition
from everyframe.runtime.interface import (
    Component,
    DryRunCall,
    MemorySaving,
    RankShare,
    VideoGroup,
)
from everyframe.runtime.model_spec import NativeModelSpec

if TYPE_CHECKING:
    from pathlib import Path

    from everyframe.checkpoints.key_map import KeyMap
    from everyframe.parallel.communicator import ParallelContext


@dataclass(frozen=True)
class StepVideoSpec(NativeModelSpec[StepVideoOptions, StepVideoFiles, StepVideoBuilder]):
    """One Step-Video checkpoint: configs read, weights not loaded."""

    facts: request_settings.StepVideoFacts
    led = ("step_llm", "clip")
    ways = ATTENDING
    in_step = True
    apart = False

    @property
    def title(self) -> str:
        """Display name of the model."""
        return self.facts.title

    def settle(self, request: Request, seed: int) -> tuple[Settings, tuple[str, ...]]:
        """Resolve the request: settings, and notes for the user."""
        return request_settings.resolve_settings(self.facts, request, self.options, seed)

    def unread(self, settings: Settings) -> tuple[str, ...]:
        """Prompt words cut because they exceed the length of Step-LLM or CLIP."""
        if any(self.files.sources[name].path is None for name in self.led):
            return ()
        from everyframe.families.stepvideo import prompt_tokens

        llm = prompt_tokens.llm_tokenizer(self.files, self.sizes)
        clip = prompt_tokens.clip_tokenizer(self.files, self.sizes)
        return tuple(prompt_tokens.tokens_of(settings, llm, clip)[1])

    def smaller(self, settings: Settings) -> Iterator[Settings]:
        """Yield similar settings that need less memory."""
        return request_settings.smaller_settings(self.facts, settings)

    def components(self, settings: Settings) -> tuple[Component, ...]:
        """Both text encoders, denoiser, autoencoder."""
        return components(self.sizes, {name: self.files.sources[name].where for name, *_ in PARTS})

    def rehearsals(self, settings: Settings) -> tuple[DryRunCall, ...]:
        """Dry-run calls of every stage on one device."""
        return dry_run_calls(self, self.facts, settings)

    def num_branches(self, settings: Settings) -> int:
        """Guidance branches: two with guidance (prompt, negative prompt), else one."""
        return 1 if settings.guidance_scale == 1 else 2

    def rank_part(
        self, settings: Settings, crew: VideoGroup, rank: int, element_bytes: int
    ) -> RankShare:
        """Share of one rank: tokens, heads or their equivalent, and bytes sent.

        Bytes are sent in each block and for the final gather.
        """
        latents = request_settings.latent_shape(self.facts, settings)
        grid = token_grid(self.sizes, latents, self.num_branches(settings))
        deal = TokenPartition(grid, crew.weights, crew.groups)
        return rank_share(self.sizes.denoiser, deal, crew.way, rank, element_bytes)

    def shared_rehearsals(
        self, settings: Settings, teams: ParallelContext
    ) -> tuple[DryRunCall, ...]:
        """Dry-run calls of every stage as one of several ranks runs it."""
        return dry_run_calls(self, self.facts, settings, teams)

    def savings(self, component: str, settings: Settings) -> Iterator[MemorySaving]:
        """Ways to run a component in less memory."""
        return memory_savings(self.facts, component, settings)

    def fetched(self) -> StepVideoSpec:
        """Download missing files; return a copy with all files on disk."""
        return read_spec(self.name, self.title, self.files.fetched(), self.options)

    def weights(self, component: str) -> tuple[Path, KeyMap]:
        """Files of a component's weights, and their key map."""

        return self.files.weights(component), KEYS[component]


def read_spec(
    name: str, title: str, files: StepVideoFiles, options: StepVideoOptions
) -> StepVideoSpec:
    """Read the configs of a checkpoint.

    Raises:
        CheckpointError: components of different models.
    """
    denoiser = _config(files, "denoiser")
    llm = _config(files, "step_llm")
    sizes = StepVideoBuilder(
        denoiser=StepVideoConfig.from_json(denoiser) if denoiser else StepVideoConfig(),
        llm=StepLLMConfig.from_json(llm) if llm else StepLLMConfig(),
        clip=_config(files, "clip") or HUNYUAN_CLIP,
        vae=_vae_config(files),
        llm_bias=options.llm_bias,
    )
    _check_fit(sizes, files)
    facts = request_settings.StepVideoFacts(
        title, files.is_turbo, sizes.vae, sizes.denoiser.patch_size
    )
    return StepVideoSpec(name, options, files, sizes, facts)


def _config(files: StepVideoFiles, component: str) -> Mapping[str, Any] | None:
    """config.json of a component; required once the component is downloaded, None before."""
    path = files.sources[component].path
    if path is None:
        return None
    return read_json((path / CLIP_ENCODER if component == "clip" else path) / "config.json")


def _vae_config(files: StepVideoFiles) -> StepVAEConfig:
    if files.sources["vae"].path is None:
        return StepVAEConfig()
    from everyframe.checkpoints.tensor_file import open_checkpoint

    tensors = open_checkpoint(files.weights("vae"))
    try:
        return StepVAEConfig.from_shapes({name: tensors.shape(name) for name in tensors})
    except CheckpointError as error:
        raise CheckpointError(f"{tensors.source}: {error}") from None


def _check_fit(sizes: StepVideoBuilder, files: StepVideoFiles) -> None:
    """Raise if components of different models are combined, before anything is loaded."""
    channels = sizes.denoiser.caption_channels
    if len(channels) != 2:
        raise CheckpointError("this denoiser reads Step-LLM alone; released ones read CLIP too")
    pairs = (
        (
            "vae",
            "the autoencoder has {} latent channels",
            sizes.vae.z_channels,
            sizes.denoiser.in_channels,
        ),
        ("step_llm", "Step-LLM has {} channels", sizes.llm.hidden_size, channels[0]),
        ("clip", "CLIP has {} channels", sizes.clip.get("hidden_size"), channels[1]),
    )
    for part, what, gives, takes in pairs:
        if gives != takes and files.sources[part].path is not None:
            raise CheckpointError(
                f"{what.format(gives)}, but the denoiser takes {takes}; "
                "these parts belong to different models"
            )
