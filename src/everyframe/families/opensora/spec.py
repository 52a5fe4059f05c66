"""Open-Sora specs: versions 1.0 (`STDiT`, IDDPM) and 1.2 (`STDiT3`, rectified flow).

Upstream: hpcaitech/Open-Sora, tags v1.0.0 and v1.2.0. Versions 1.1, 1.3 and 2.0 are detected and
rejected by name. Read next: `checkpoint.py` (files), `settings.py` (request to settings),
`components.py` (components and memory), `stages.py` (the run).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from everyframe.core.errors import CheckpointError
from everyframe.core.plan import Settings
from everyframe.core.quality import PREDICTORS, SOLVERS
from everyframe.core.request import Request
from everyframe.families.opensora import dry_run
from everyframe.families.opensora.checkpoint import OpenSoraFiles, keys_of
from everyframe.families.opensora.components import (
    OpenSoraBuilder,
    sent_bytes,
    token_sizes,
)
from everyframe.families.opensora.config import OpenSoraConfig, STDiT3Config, STDiTConfig
from everyframe.families.opensora.options import OpenSoraOptions
from everyframe.families.opensora.settings import resolve_settings, smaller_settings
from everyframe.families.opensora.vae_config import ImageVAEConfig, VideoVAEConfig
from everyframe.families.opensora_parts import VAE_PARTS, part_of
from everyframe.families.t5_tokenizer import T5_XXL
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from everyframe.runtime.components.component_files import ComponentSource
from everyframe.runtime.interface import RankShare, VideoGroup
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.runtime.previews.latent_space import LatentSpace, vae_latents
from everyframe.runtime.rank_shares import grid_share

if TYPE_CHECKING:
    from pathlib import Path

    from everyframe.checkpoints.key_map import KeyMap

#: Released sizes of 1.0 by training side in pixels: (input_size, space_scale).
_RELEASED_1_0 = {256: ((16, 32, 32), 0.5), 512: ((16, 64, 64), 1.0)}


@dataclass(frozen=True)
class OpenSoraSpec(NativeModelSpec[OpenSoraOptions, OpenSoraFiles, OpenSoraConfig]):
    """One Open-Sora checkpoint: configs read, weights not loaded."""

    methods = (*SOLVERS, *PREDICTORS)
    has_held_guidance = True
    lead_rank_components = ("text_encoder",)

    dry_run_calls = dry_run.dry_run_calls
    savings = dry_run.memory_savings

    @classmethod
    def read(
        cls, name: str, title: str, files: OpenSoraFiles, options: OpenSoraOptions
    ) -> OpenSoraSpec:
        denoiser, square = _denoiser_config(files, name)
        config = OpenSoraConfig(
            version=files.version,
            denoiser=denoiser,
            vae=_vae_config(files),
            text=files.sources["text_encoder"].config() or T5_XXL,
            defaults=files.defaults,
            has_scores=files.version == "1.2"
            and bool(files.defaults.get("has_scores", not files.defaults)),
            square=square,
        )
        _check_fit(config)
        return cls(name, title, options, files, OpenSoraBuilder(config))

    @property
    def latent_space(self) -> LatentSpace:
        vae = self.config.vae
        if isinstance(vae, ImageVAEConfig):
            scale = vae.scaling_factor
            return vae_latents(self, "AutoencoderKL", vae.latent_channels, scaling_factor=scale)
        return vae_latents(self, "VideoVAE", vae.latent_channels)

    def resolve(self, request: Request, seed: int) -> tuple[Settings, tuple[str, ...]]:
        return resolve_settings(self.config, self.title, request, self.options, seed)

    def unread(self, settings: Settings) -> tuple[str, ...]:
        place = self.files.sources["tokenizer"].path
        if place is None:
            return ()
        from everyframe.families.opensora.prompt_tokens import read_prompts
        from everyframe.families.t5_tokenizer import load_tokenizer

        most = self.config.denoiser.model_max_length
        cuts = [cut for _, cut in read_prompts(load_tokenizer(place), settings, most) if cut]
        if not cuts:
            return ()
        from everyframe.runtime.repair.repairs import prompt_truncated_note  # imports torch

        return tuple(prompt_truncated_note(cut).text for cut in cuts)

    def smaller(self, settings: Settings) -> Iterator[Settings]:
        return smaller_settings(self.config, settings)

    def num_branches(self, settings: Settings) -> int:
        """Guidance branches: two with guidance (conditional, unconditional), else one."""
        return 1 if settings.guidance_scale == 1 else 2

    def rank_part(
        self, settings: Settings, video_group: VideoGroup, rank: int, element_bytes: int
    ) -> RankShare:
        """Share of one rank: columns, rows for spatial attention, and bytes sent."""
        grid = TokenGrid(self.num_branches(settings), *token_sizes(self.config, settings))
        partition = TokenPartition(grid, video_group.weights, video_group.num_cfg_groups)
        return grid_share(
            partition, rank, sent_bytes(self.config.denoiser, partition, rank, element_bytes)
        )

    def weights(self, component: str) -> tuple[Path, KeyMap]:
        return self.files.weights_path(component), keys_of(component, self.files.version)


def _denoiser_config(
    files: OpenSoraFiles, name: str
) -> tuple[STDiTConfig | STDiT3Config, int | None]:
    config = files.sources["denoiser"].config()
    if files.version == "1.2":
        return (STDiT3Config.from_json(config) if config else STDiT3Config()), None
    if config is not None:
        found = STDiTConfig.from_json(config)
        return found, found.input_size[1] * 8
    side = _side(files.sources["denoiser"], name)
    input_size, space_scale = _RELEASED_1_0[side]
    return STDiTConfig(input_size=input_size, space_scale=space_scale), side


def _side(denoiser: ComponentSource, name: str) -> int:
    """Training side of 1.0 in pixels: from the file's position table, else from its name.

    A folder's name is ignored: the folder may hold both sizes.
    """
    if denoiser.path is not None:
        from everyframe.checkpoints.tensor_file import open_checkpoint

        tensors = open_checkpoint(denoiser.path)
        if "pos_embed" in tensors:
            side = math.isqrt(tensors.shape("pos_embed")[1]) * 16
            if side in _RELEASED_1_0:
                return side
    for side in _RELEASED_1_0:
        if f"{side}x{side}" in f"{PurePath(name).name} {denoiser.where}":
            return side
    raise CheckpointError(
        f"{denoiser.where}: which Open-Sora 1.0 this is can't be told; put 256x256 or 512x512 "
        "into the file's name, or a config.json with the model's sizes beside it"
    )


def _vae_config(files: OpenSoraFiles) -> ImageVAEConfig | VideoVAEConfig:
    _check_vae_part(files)
    config = files.sources["vae"].config()
    if files.version == "1.0":
        return ImageVAEConfig.from_json(config) if config else ImageVAEConfig()
    return VideoVAEConfig.from_json(config) if config else VideoVAEConfig()


def _check_vae_part(files: OpenSoraFiles) -> None:
    """Raise if the autoencoder's file is known to hold another part, such as one of 2.0."""
    path = files.sources["vae"].path
    if path is None or not path.is_file():
        return
    held = part_of(path)
    if held is not None and held != VAE_PARTS[files.version]:
        raise CheckpointError(
            f"{path}: Open-Sora {files.version} needs {VAE_PARTS[files.version]}, and it is {held}"
        )


def _check_fit(config: OpenSoraConfig) -> None:
    """Raise if options combine components of different models, before anything is loaded."""
    pairs = (
        ("latent channels", "autoencoder", config.vae.latent_channels, config.denoiser.in_channels),
        ("text channels", "text encoder", config.text["d_model"], config.denoiser.caption_channels),
    )
    for what, part, gives, takes in pairs:
        if gives != takes:
            raise CheckpointError(
                f"the {part} has {gives} {what}, but the denoiser takes {takes}; "
                "these components belong to different models"
            )
