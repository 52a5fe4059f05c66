"""Calls and memory savings of Stable Video Diffusion's stages, for the planner. No torch.

Each stage is called once, at the plan's sizes; `stages.py` has the call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Settings
from everyframe.families.svd.settings import latent_shape
from everyframe.runtime import tiling
from everyframe.runtime.interface import DryRunCall, MemorySaving
from everyframe.runtime.memory_fallbacks import cfg_batch_size, split_cfg_saving
from everyframe.runtime.rank_shares import key_of_rank

if TYPE_CHECKING:
    from everyframe.families.svd.config import SVDConfig
    from everyframe.families.svd.options import SVDOptions
    from everyframe.families.svd.spec import SVDSpec
    from everyframe.parallel.communicator import ParallelContext


def dry_run_calls(
    spec: SVDSpec, settings: Settings, teams: ParallelContext | None = None
) -> tuple[DryRunCall, ...]:
    """Dry-run calls: image, its latents, one step, one chunk of frames.

    With `teams`, the step is that of one of several ranks.
    """

    def one(stage: str, component: str, name: str, num_calls: float, *key: Hashable) -> DryRunCall:
        call = partial(_dry_run, name, spec, settings, teams)
        return spec.sizes.rehearsal(stage, component, call, num_calls, *key)

    size, frames = (settings.height, settings.width), settings.num_frames
    latents = latent_shape(spec.config, settings)[2:]
    tile, given_tile = settings.saving(tiling.DECODE, 0), settings.saving(tiling.ENCODE, 0)
    chunk = min(int(settings.option("decode_chunk_size")), frames)
    branches = spec.num_branches(settings)
    step = (*size, frames, branches, cfg_batch_size(settings, branches), *key_of_rank(teams))
    encodes = tiling.num_repeats(*latents, given_tile)
    decodes = ceil(frames / chunk) * tiling.num_repeats(*latents, tile)
    return (
        one("image", "image_encoder", "ImageEmbedStage", 1),
        one("given frames", "vae", "ImageLatentStage", encodes, *size, given_tile),
        one("denoise", "unet", "DenoiseStage", settings.num_inference_steps, *step),
        one("decode", "vae", "DecodeStage", decodes, *size, chunk, tile),
    )


def _dry_run(
    name: str,
    spec: SVDSpec,
    settings: Settings,
    teams: ParallelContext | None,
    modules: Mapping[str, Any],
    device: str,
) -> object:
    from everyframe.families.svd import stages
    from everyframe.parallel.communicator import ONE

    context = stages.SVDContext(spec, settings, teams or ONE)
    return getattr(stages, name)(context).dry_run(modules, device)


def memory_savings(
    config: SVDConfig, component: str, settings: Settings, options: SVDOptions
) -> Iterator[MemorySaving]:
    """Sequential guidance branches; fewer frames per decode; tiled encode and decode."""
    if component == "unet" and settings.guidance_scale > 1:
        yield split_cfg_saving(settings)
    if component != "vae":
        return
    size = latent_shape(config, settings)[2:]
    yield from tiling.tile_savings(settings, *size, tiling.ENCODE)
    chunk = int(settings.option("decode_chunk_size"))
    while chunk > 1 and options.decode_chunk_size is None:
        chunk = ceil(chunk / 2)
        fewer = dict(settings.options) | {"decode_chunk_size": chunk}
        settings = replace(settings, options=tuple(fewer.items()))
        yield MemorySaving(
            settings,
            f"frames are decoded {chunk} at once (decode_chunk_size), which changes the picture a "
            "little: the decoder sees a frame's neighbours only inside of these",
            is_lossy=True,
            stage="decode",
        )
    yield from tiling.tile_savings(settings, *size)
