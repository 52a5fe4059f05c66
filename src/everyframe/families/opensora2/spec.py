"""Open-Sora 2.0 specs: `MMDiT` with HunyuanVideo's autoencoder or the video DC-AE, T5 and CLIP.

Upstream: hpcaitech/Open-Sora 7ad6a96. Read next: `checkpoint.py` (files), `settings.py` (request to
settings), `components.py` (components), `stages.py` (the run).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from everyframe.core.errors import CheckpointError
from everyframe.core.plan import Settings
from everyframe.core.quality import PREDICTORS, SOLVERS
from everyframe.core.request import Request
from everyframe.families.opensora2 import dry_run
from everyframe.families.opensora2.checkpoint import OpenSora2Files, keys_of
from everyframe.families.opensora2.components import OpenSora2Builder, rank_share
from everyframe.families.opensora2.config import MMDiTConfig, OpenSora2Config
from everyframe.families.opensora2.first_picture_keys import FLUX_VAE_RESHAPES
from everyframe.families.opensora2.options import OpenSora2Options
from everyframe.families.opensora2.settings import (
    frame_tokens,
    latent_shape,
    resolve_settings,
    smaller_settings,
)
from everyframe.families.opensora2.vae_config import DCAEConfig, HunyuanVAEConfig, VAEConfig
from everyframe.families.opensora_parts import DEEP_PART, HUNYUAN_PART, part_of
from everyframe.families.t5_tokenizer import T5_XXL
from everyframe.parallel.head_partition import SEQUENCE_BACKENDS
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from everyframe.runtime.interface import RankShare, VideoGroup
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.runtime.previews.latent_space import LatentSpace, vae_latents

if TYPE_CHECKING:
    from pathlib import Path

    from everyframe.checkpoints.key_map import KeyMap
    from everyframe.checkpoints.tensor_file import TensorFile

#: Config of CLIP ViT-L/14's text half, for plans made before download.
_CLIP_L: Mapping[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 77, "vocab_size": 49408,
    "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "bos_token_id": 49406, "eos_token_id": 2,
}  # fmt: skip
#: FLUX.1-dev and its autoencoder, likewise.
_FLUX = MMDiTConfig(cond_embed=False, guidance_embed=True, fused_qkv=True, use_liger_rope=False)
_FLUX_VAE: Mapping[str, Any] = {
    "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 16,
}  # fmt: skip

_TITLES = {
    "vae": "autoencoder", "first_vae": "autoencoder of FLUX.1", "text_encoder": "text encoder T5",
    "clip": "text encoder CLIP",
}  # fmt: skip


@dataclass(frozen=True)
class OpenSora2Spec(NativeModelSpec[OpenSora2Options, OpenSora2Files, OpenSora2Config]):
    """One Open-Sora 2.0 checkpoint: configs read, weights not loaded."""

    methods = (*SOLVERS, *PREDICTORS)
    lead_rank_components = ("text_encoder", "clip")
    sequence_backends = SEQUENCE_BACKENDS

    dry_run_calls = dry_run.dry_run_calls
    savings = dry_run.memory_savings

    @classmethod
    def read(
        cls, name: str, title: str, files: OpenSora2Files, options: OpenSora2Options
    ) -> OpenSora2Spec:
        first = "first_denoiser" in files.sources
        clip = files.config("clip") if files.has("clip") else _CLIP_L
        vae, first_vae = _vae_config(files, options), _first_vae(files) if first else {}
        config = OpenSora2Config(
            denoiser=_denoiser(files, "denoiser", "vae", vae.latent_channels, _config_of(files)),
            vae=vae,
            text=files.config("text_encoder") if files.has("text_encoder") else T5_XXL,
            clip=_clip_text(clip),
            first_denoiser=(
                _denoiser(files, "first_denoiser", "first_vae", first_vae["latent_channels"], _FLUX)
                if first
                else None
            ),
            first_vae=first_vae,
        )
        _check_fit(config, files, options)
        return cls(name, title, options, files, OpenSora2Builder(config))

    @property
    def latent_space(self) -> LatentSpace:
        vae = self.config.vae
        name = "AutoencoderKLHunyuanVideo" if isinstance(vae, HunyuanVAEConfig) else "VideoDCAE"
        return vae_latents(self, name, vae.latent_channels, scaling_factor=vae.scale_factor)

    def resolve(self, request: Request, seed: int) -> tuple[Settings, tuple[str, ...]]:
        return resolve_settings(self.config, self.title, request, self.options, seed)

    def unread(self, settings: Settings) -> tuple[str, ...]:
        if not self.files.has(*self.lead_rank_components):
            return ()
        from everyframe.families.opensora2 import prompts  # imports torch

        _, cut = prompts.t5_tokens(self.files.path("text_encoder"), settings)
        _, unseen = prompts.clip_tokens(self.files.path("clip"), settings)
        return (*cut, *unseen)

    def smaller(self, settings: Settings) -> Iterator[Settings]:
        return smaller_settings(self.config, settings)

    def num_branches(self, settings: Settings) -> int:
        """Guidance branches of the first step: three with given frames, else two, or one."""
        return dry_run.most_branches(self.config, settings)

    def rank_part(
        self, settings: Settings, video_group: VideoGroup, rank: int, element_bytes: int
    ) -> RankShare:
        """Share of one rank: tokens, heads or their equivalent, and bytes sent."""
        from everyframe.families.opensora2.prompt_lengths import T5_LENGTH

        config = self.config.denoiser
        frames = latent_shape(self.config, settings)[1]
        tokens = T5_LENGTH + frames * frame_tokens(self.config, settings)
        grid = TokenGrid(self.num_branches(settings), config.num_heads, tokens)
        partition = TokenPartition(grid, video_group.weights, video_group.num_cfg_groups)
        share = rank_share(config, partition, video_group.backend, rank, element_bytes)
        # Some steps have fewer branches than the first.
        steps = dry_run.evaluations(self.config, settings) / grid.samples
        return replace(
            share, sent_bytes=round(share.sent_bytes * steps / settings.num_inference_steps)
        )

    def weights(self, component: str) -> tuple[Path | TensorFile, KeyMap]:
        path = self.files.weights_path(component)
        if component == "first_vae":
            from everyframe.checkpoints.reshape import rearranged
            from everyframe.checkpoints.tensor_file import open_checkpoint

            return rearranged(open_checkpoint(path), FLUX_VAE_RESHAPES), keys_of(component, ())
        names = self.builder.num_elements["clip"] if component == "clip" else ()
        return path, keys_of(component, names)


def _shapes(files: OpenSora2Files, component: str) -> tuple[str, dict[str, tuple[int, ...]]]:
    from everyframe.checkpoints.tensor_file import open_checkpoint

    tensors, keys = open_checkpoint(files.weights_path(component)), keys_of(component, ())
    named = ((keys.target(name), name) for name in tensors)
    return str(tensors.source), {ours: tensors.shape(name) for ours, name in named if ours}


def _config_of(files: OpenSora2Files) -> MMDiTConfig:
    """Config of the released denoiser for this autoencoder, for plans made before download."""
    is_deep = "DC-AE" in files.sources["denoiser"].where
    return MMDiTConfig(in_channels=128, patch_size=1) if is_deep else MMDiTConfig()


def _denoiser(
    files: OpenSora2Files, component: str, vae: str, channels: int, released: MMDiTConfig
) -> MMDiTConfig:
    """Config of the denoiser, whose patch may follow from the autoencoder's latent channels."""
    if not files.has(component):
        return released
    source, shapes = _shapes(files, component)
    try:
        return MMDiTConfig.from_shapes(shapes, channels if files.has(vae) else None)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _vae_config(files: OpenSora2Files, options: OpenSora2Options) -> VAEConfig:
    scale = 1.0 if options.vae_scaling is None else options.vae_scaling
    if not files.has("vae"):
        is_deep = "DC-AE" in files.sources["vae"].where
        return DCAEConfig(scale_factor=scale) if is_deep else HunyuanVAEConfig()
    source, shapes = _shapes(files, "vae")
    part = part_of(files.weights_path("vae"))
    if part == HUNYUAN_PART:
        return HunyuanVAEConfig.from_shapes(shapes)
    if part != DEEP_PART:
        held = f"it is {part}" if part else "its tensors are none of theirs"
        raise CheckpointError(
            f"{source}: Open-Sora 2.0 needs HunyuanVideo's autoencoder or the DC-AE, and {held}"
        )
    return replace(DCAEConfig.from_shapes(shapes), scale_factor=scale)


def _clip_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Config of CLIP's text model, also from a config of both halves."""
    given = config.get("text_config") or config
    return {name: given.get(name, default) for name, default in _CLIP_L.items()}


def _first_vae(files: OpenSora2Files) -> Mapping[str, Any]:
    from everyframe.families.opensora2.first_picture import vae_config

    return vae_config(_shapes(files, "first_vae")[1]) if files.has("first_vae") else _FLUX_VAE


def _check_fit(config: OpenSora2Config, files: OpenSora2Files, options: OpenSora2Options) -> None:
    """Raise if components of different models are combined, before anything is loaded."""
    if options.vae_scaling is not None and not config.is_high_compression:
        raise CheckpointError("vae_scaling is for the DC-AE, and this model has HunyuanVideo's")
    if config.first_denoiser is not None and not config.first_denoiser.guidance_embed:
        raise CheckpointError(
            "the first picture is drawn by FLUX.1-dev, and this FLUX.1 takes no guidance scale "
            "(FLUX.1-schnell?); give FLUX.1-dev's folder with --flux"
        )
    pairs: list[tuple[str, str, Any, str, int]] = []
    channels = {"vae": config.vae.latent_channels}
    if config.first_vae:
        channels["first_vae"] = config.first_vae["latent_channels"]
    denoisers = {"vae": ("denoiser", config.denoiser)}
    if config.first_denoiser is not None:
        denoisers["first_vae"] = ("first_denoiser", config.first_denoiser)
    for vae, (name, sizes) in denoisers.items():
        pairs += [
            (vae, "latent channels", channels[vae], name, sizes.latent_channels),
            ("text_encoder", "channels", config.text.get("d_model"), name, sizes.context_in_dim),
            ("clip", "channels", config.clip["hidden_size"], name, sizes.vec_in_dim),
        ]
    for part, what, gives, name, takes in pairs:
        # Missing files count with their released sizes.
        if gives != takes and files.has(part, name):
            raise CheckpointError(
                f"the {_TITLES[part]} has {gives} {what}, but the denoiser takes {takes}; "
                "these components belong to different models"
            )
