"""Calls and memory savings of Open-Sora 2.0's stages, for the planner. No torch.

Each stage is called once, at the plan's sizes; `stages.py` has the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Settings
from everyframe.dry_run.call import DryRunCall
from everyframe.families.opensora2.config import OpenSora2Config
from everyframe.families.opensora2.guidance import guidance_of
from everyframe.families.opensora2.settings import (
    first_frame_size,
    is_conditioned,
    is_guided,
    latent_shape,
)
from everyframe.runtime.interface import MemorySaving
from everyframe.runtime.memory.memory_fallbacks import cfg_batch_size, split_cfg_saving
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.runtime.rank_shares import decode_share, key_of_rank
from everyframe.runtime.stages import tiling

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext


def dry_run_calls(
    spec: NativeModelSpec[Any, Any, OpenSora2Config],
    settings: Settings,
    parallel: ParallelContext | None = None,
) -> tuple[DryRunCall, ...]:
    """Dry-run calls: the texts, a first picture, given frames, one step, one tile.

    With `parallel`, the step is that of one of several ranks.
    """
    one = partial(spec.stage_call, settings, parallel=parallel)
    shape = latent_shape(spec.config, settings)
    tiles = settings.saving(tiling.DECODE, 0), settings.saving(tiling.ENCODE, 0)
    first = settings.option("first_frame")
    texts = 1 + is_guided(settings) + bool(first)
    calls = [
        one("text", "text_encoder", "stages.TextEncodeStage", texts),
        one("clip text", "clip", "stages.CLIPEncodeStage", texts),
    ]
    if first:
        size = first_frame_size(settings)
        name = "first_picture_stages."
        count = settings.num_denoiser_calls
        calls += [
            one("first picture", "first_denoiser", f"{name}FirstDenoiseStage", count, *size),
            one("decode first picture", "first_vae", f"{name}FirstDecodeStage", 1, *size),
        ]
    if is_conditioned(settings):
        clip, number = settings.option("given_clip"), len(settings.given_frames)
        encodes = number * _num_repeats(spec.config, settings, clip or 1, encodes=True)
        given = (*settings.given_frames, clip, *tiles)
        calls.append(
            one("given frames", "vae", "stages.ConditioningStage", encodes, *shape, *given)
        )
    branches = most_branches(spec.config, settings)
    steps = evaluations(spec.config, settings) / branches
    key = (*shape, branches, cfg_batch_size(settings, branches), *key_of_rank(parallel))
    given = (is_conditioned(settings), settings.option("given_clip"))
    calls.append(one("denoise", "denoiser", "stages.DenoiseStage", steps, *key, *given))
    decodes = _num_repeats(spec.config, settings, settings.num_frames, encodes=False)
    spans = spec.config.vae.decode_tiles().spans(shape[1:])
    decodes *= decode_share(prod(map(len, spans)), parallel)
    calls.append(one("decode", "vae", "stages.DecodeStage", decodes, *shape, *tiles))
    return tuple(calls)


def memory_savings(
    spec: NativeModelSpec[Any, Any, OpenSora2Config], component: str, settings: Settings
) -> Iterator[MemorySaving]:
    """Sequential guidance branches; smaller tiles than upstream's."""
    if component == "denoiser" and most_branches(spec.config, settings) > 1:
        yield split_cfg_saving(settings)
    if component == "vae":
        side = spec.config.vae.sample_size // spec.config.vae.spatial_factor
        height, width = (min(side, each) for each in latent_shape(spec.config, settings)[2:])
        sides = (side // 2, side // 4)
        if is_conditioned(settings):
            for saving in tiling.tile_savings(settings, height, width, tiling.ENCODE, sides):
                settings = saving.settings
                yield saving
        yield from tiling.tile_savings(settings, height, width, sides=sides)


def most_branches(config: OpenSora2Config, settings: Settings) -> int:
    """Guidance branches of the first step, which has the most."""
    guidance = guidance_of(settings, is_conditioned=is_conditioned(settings))
    return len(guidance.at(0, latent_shape(config, settings)[1]).branches)


def evaluations(config: OpenSora2Config, settings: Settings) -> int:
    """Branches of all steps in which the denoiser is computed."""
    guidance = guidance_of(settings, is_conditioned=is_conditioned(settings))
    method = settings.method
    steps = None if method is None else method.computed_steps(settings.num_inference_steps)
    return guidance.num_evaluations(latent_shape(config, settings)[1], steps)


def _num_repeats(
    config: OpenSora2Config, settings: Settings, num_frames: int, *, encodes: bool
) -> float:
    """Work of all of upstream's tiles, in units of the first, which the dry run computes."""
    vae, size = config.vae, (num_frames, settings.height, settings.width)
    if encodes:
        spans, side = vae.encode_tiles().spans(size), settings.saving(tiling.ENCODE, 0)
    else:
        spans = vae.decode_tiles().spans(vae.latent_size(*size))
        side = settings.saving(tiling.DECODE, 0)
    elements = prod(sum(len(span) for span in axis) for axis in spans)
    first = [len(axis[0]) for axis in spans]
    factor = vae.spatial_factor if encodes else 1
    within = tiling.num_repeats(first[1] // factor, first[2] // factor, side)
    return elements / prod(first) * within
