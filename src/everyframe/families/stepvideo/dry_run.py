"""Calls and memory savings of Step-Video's stages, for the planner. No torch.

Each stage is called once, at the plan's sizes; `stages.py` has the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Settings
from everyframe.dry_run.call import DryRunCall
from everyframe.families.stepvideo.config import StepVideoConfig
from everyframe.families.stepvideo.settings import latent_shape
from everyframe.runtime.interface import MemorySaving
from everyframe.runtime.memory.memory_fallbacks import cfg_batch_size, split_cfg_saving
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.runtime.rank_shares import decode_share, key_of_rank
from everyframe.runtime.stages import tiling

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext

#: Tile sides in latents of 16 pixels each: 992x544 takes two tiles, or six.
SIDES = (48, 32, 16)


def dry_run_calls(
    spec: NativeModelSpec[Any, Any, StepVideoConfig],
    settings: Settings,
    parallel: ParallelContext | None = None,
) -> tuple[DryRunCall, ...]:
    """Dry-run calls: both texts, one step, one piece.

    With `parallel`, the step is that of one of several ranks.
    """
    one = partial(spec.stage_call, settings, parallel=parallel)
    shape, tile = latent_shape(spec.config, settings), settings.saving(tiling.DECODE, 0)
    branches = 2 if settings.guidance_scale > 1 else 1
    step = (*shape, branches, cfg_batch_size(settings, branches), *key_of_rank(parallel))
    pieces = len(spec.config.vae.pieces(settings.num_frames))
    decodes = pieces * tiling.num_repeats(*shape[2:], tile) * decode_share(pieces, parallel)
    return (
        one("text", "step_llm", "stages.LLMEncodeStage", branches),
        one("clip text", "clip", "stages.CLIPEncodeStage", branches),
        one("denoise", "denoiser", "stages.DenoiseStage", settings.num_denoiser_calls, *step),
        one("decode", "vae", "stages.DecodeStage", decodes, *shape, tile),
    )


def memory_savings(
    spec: NativeModelSpec[Any, Any, StepVideoConfig], component: str, settings: Settings
) -> Iterator[MemorySaving]:
    """Sequential guidance branches; tiled decoding of pieces."""
    if component == "vae":
        yield from tiling.tile_savings(
            settings, *latent_shape(spec.config, settings)[2:], sides=SIDES
        )
    if component == "denoiser" and settings.guidance_scale > 1:
        yield split_cfg_saving(settings)
