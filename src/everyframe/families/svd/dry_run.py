"""Calls and memory savings of Stable Video Diffusion's stages, for the planner. No torch.

Each stage is called once, at the plan's sizes; `stages.py` has the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Settings
from everyframe.dry_run.call import DryRunCall
from everyframe.families.svd.config import SVDConfig
from everyframe.families.svd.settings import latent_shape
from everyframe.runtime.interface import MemorySaving
from everyframe.runtime.memory.memory_fallbacks import cfg_batch_size, split_cfg_saving
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.runtime.rank_shares import decode_share, key_of_rank
from everyframe.runtime.stages import tiling

if TYPE_CHECKING:
    from everyframe.families.svd.options import SVDOptions
    from everyframe.parallel.communicator import ParallelContext


def dry_run_calls(
    spec: NativeModelSpec[Any, Any, SVDConfig],
    settings: Settings,
    parallel: ParallelContext | None = None,
) -> tuple[DryRunCall, ...]:
    """Dry-run calls: image, its latents, one step, one chunk of frames.

    With `parallel`, the step is that of one of several ranks.
    """
    one = partial(spec.stage_call, settings, parallel=parallel)
    size, frames = (settings.height, settings.width), settings.num_frames
    latents = latent_shape(spec.config, settings)[2:]
    tile, given_tile = settings.saving(tiling.DECODE, 0), settings.saving(tiling.ENCODE, 0)
    chunk = min(int(settings.option("decode_chunk_size")), frames)
    branches = 1 if settings.guidance_scale <= 1 else 2
    step = (*size, frames, branches, cfg_batch_size(settings, branches), *key_of_rank(parallel))
    encodes = tiling.num_repeats(*latents, given_tile)
    chunks = ceil(frames / chunk)
    decodes = chunks * tiling.num_repeats(*latents, tile) * decode_share(chunks, parallel)
    return (
        one("image", "image_encoder", "stages.ImageEmbedStage", 1),
        one("given frames", "vae", "stages.ImageLatentStage", encodes, *size, given_tile),
        one("denoise", "unet", "stages.DenoiseStage", settings.num_denoiser_calls, *step),
        one("decode", "vae", "stages.DecodeStage", decodes, *size, chunk, tile),
    )


def memory_savings(
    spec: NativeModelSpec[SVDOptions, Any, SVDConfig], component: str, settings: Settings
) -> Iterator[MemorySaving]:
    """Sequential guidance branches; fewer frames per decode; tiled encode and decode."""
    if component == "unet" and settings.guidance_scale > 1:
        yield split_cfg_saving(settings)
    if component != "vae":
        return
    size = latent_shape(spec.config, settings)[2:]
    yield from tiling.tile_savings(settings, *size, tiling.ENCODE)
    chunk = int(settings.option("decode_chunk_size"))
    while chunk > 1 and spec.options.decode_chunk_size is None:
        chunk = ceil(chunk / 2)
        settings = settings.with_option("decode_chunk_size", chunk)
        yield MemorySaving(
            settings,
            f"frames are decoded {chunk} at once (decode_chunk_size), which changes the picture a "
            "little: the decoder sees a frame's neighbours only inside of these",
            is_lossy=True,
            stage="decode",
        )
    yield from tiling.tile_savings(settings, *size)
