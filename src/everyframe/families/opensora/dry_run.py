"""Calls and memory savings of Open-Sora's stages, for the planner. No torch.

Each stage is called once, at the plan's sizes; `stages.py` has the call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Settings
from everyframe.dry_run.call import DryRunCall
from everyframe.families.opensora.config import OpenSoraConfig
from everyframe.families.opensora.settings import PIECE
from everyframe.families.opensora.vae_config import ImageVAEConfig
from everyframe.runtime.interface import MemorySaving
from everyframe.runtime.memory.memory_fallbacks import cfg_batch_size, split_cfg_saving
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.runtime.rank_shares import decode_share, key_of_rank
from everyframe.runtime.stages import tiling

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext


def dry_run_calls(
    spec: NativeModelSpec[Any, Any, OpenSoraConfig],
    settings: Settings,
    parallel: ParallelContext | None = None,
) -> tuple[DryRunCall, ...]:
    """Dry-run calls: one prompt, conditioning frames if any, one step, one piece.

    With `parallel`, the step is that of one of several ranks.
    """
    vae, chain = spec.config.vae, settings.chain
    size = (settings.num_frames, settings.height, settings.width)
    branches = 1 if settings.guidance_scale == 1 else 2
    at_once = settings.saving(tiling.FRAMES, 0)
    tile, given_tile = settings.saving(tiling.DECODE, 0), settings.saving(tiling.ENCODE, 0)
    latents, pieces = vae.latent_size(*size)[1:], vae.pieces(settings.num_frames)
    given = is_conditioned(settings)
    one = partial(spec.stage_call, settings, parallel=parallel)
    prompts = 1 + (settings.negative_prompt is not None)
    calls = [one("text", "text_encoder", "stages.TextEncodeStage", prompts)]
    if given:
        repeats = tiling.num_repeats(*latents, given_tile)
        given_size = (min(settings.num_frames, PIECE), *size, at_once, given_tile)
        name = "stages.ConditioningStage"
        calls.append(one("given frames", "vae", name, repeats * chain, *given_size))
    step = (branches, cfg_batch_size(settings, branches), prompts)
    key: tuple[Hashable, ...] = (*size, *step, given, *key_of_rank(parallel))
    steps = settings.num_denoiser_calls * chain
    calls.append(one("denoise", "denoiser", "stages.DenoiseStage", steps, *key))
    repeats = tiling.num_repeats(*latents, tile) * decode_share(len(pieces), parallel)
    decodes = settings.num_frames / pieces[0].num_frames * repeats * chain
    calls.append(one("decode", "vae", "stages.DecodeStage", decodes, *size, at_once, tile))
    return tuple(calls)


def memory_savings(
    spec: NativeModelSpec[Any, Any, OpenSoraConfig], component: str, settings: Settings
) -> Iterator[MemorySaving]:
    """Sequential guidance branches; fewer frames per autoencoder call; tiling.

    The spatial stage works frame by frame, so fewer frames per call change no frame.
    """
    if component == "denoiser" and settings.guidance_scale != 1:
        yield split_cfg_saving(settings)
    if component != "vae":
        return
    vae = spec.config.vae
    usual = (vae if isinstance(vae, ImageVAEConfig) else vae.spatial).micro_batch_size
    for saving in tiling.fewer_frames(settings, usual):
        settings = saving.settings
        yield saving
    size = spec.config.vae.latent_size(settings.num_frames, settings.height, settings.width)
    if is_conditioned(settings):
        yield from tiling.tile_savings(settings, *size[1:], tiling.ENCODE)
    yield from tiling.tile_savings(settings, *size[1:])


def is_conditioned(settings: Settings) -> bool:
    """Whether conditioning frames are encoded."""
    return bool(settings.given_frames) or settings.chain > 1
