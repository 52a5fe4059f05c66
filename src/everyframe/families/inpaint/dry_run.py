"""Calls and memory savings of the inpainting stages, for the planner. No torch.

Each stage is called once, at the plan's sizes; `stages.py` and `vae_stages.py` have the calls.
ControlNets and UNet run in one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Settings
from everyframe.dry_run.call import DryRunCall
from everyframe.families.inpaint.components import controlnet_name
from everyframe.families.inpaint.config import InpaintConfig
from everyframe.families.inpaint.scheduler import num_timesteps
from everyframe.families.inpaint.settings import geometry_of, latent_shape, num_painted
from everyframe.runtime.interface import MemorySaving
from everyframe.runtime.memory.memory_fallbacks import cfg_batch_size, split_cfg_saving
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.runtime.rank_shares import active_ranks
from everyframe.runtime.stages import tiling

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext


def dry_run_calls(
    spec: NativeModelSpec[Any, Any, InpaintConfig],
    settings: Settings,
    parallel: ParallelContext | None = None,
) -> tuple[DryRunCall, ...]:
    """Dry-run calls: a prompt, source frames, one step of the networks, one batch of frames.

    With `parallel`, the calls are those of one of its ranks; each rank has its own batch.
    """
    num_ranks = 1 if parallel is None else len(active_ranks(parallel.video_group.weights))
    config = spec.config
    together = min(int(settings.option("frames_at_once")), num_painted(settings))
    num_batches = ceil(num_painted(settings) / together / num_ranks)
    lot = min(together, settings.saving(tiling.FRAMES, together))
    lots = num_batches * ceil(together / lot)
    tile, given_tile = settings.saving(tiling.DECODE, 0), settings.saving(tiling.ENCODE, 0)
    latents = latent_shape(config, settings)[1:]
    size = (*geometry_of(config, settings).padded, together)
    strength = float(settings.option("strength"))
    steps: float = num_timesteps(config.scheduler, settings.num_inference_steps, strength)
    if settings.method is not None:
        steps = settings.method.num_calls(int(steps))
    steps *= num_batches
    branches = 1 if settings.guidance_scale <= 1 else 2
    step = (branches, cfg_batch_size(settings, branches), bool(settings.option("guess_mode")))
    networks = (*map(controlnet_name, range(len(config.controlnets))), "unet")
    encodes = lots * tiling.num_repeats(*latents, given_tile)
    decodes = lots * tiling.num_repeats(*latents, tile)
    encoded = (*size, lot, given_tile, strength < 1)
    one = partial(spec.stage_call, settings)
    one_step = partial(one, "denoise", components=networks)
    return (
        one("text", "text_encoder", "stages.TextEncodeStage", branches, *size),
        one("given frames", "vae", "vae_stages.SourceLatentStage", encodes, *encoded),
        *(one_step(name, "stages.DenoiseStage", steps, *size, *step) for name in networks),
        one("decode", "vae", "vae_stages.DecodeStage", decodes, *size, lot, tile),
    )


def memory_savings(
    spec: NativeModelSpec[Any, Any, InpaintConfig], component: str, settings: Settings
) -> Iterator[MemorySaving]:
    """Sequential guidance branches; fewer frames per autoencoder call; tiling.

    The number of frames denoised at once stays as requested.
    """
    is_net = component == "unet" or component.startswith("controlnet")
    if is_net and settings.guidance_scale > 1:
        yield split_cfg_saving(settings)
    if component != "vae":
        return
    together = min(int(settings.option("frames_at_once")), num_painted(settings))
    for saving in tiling.fewer_frames(settings, together):
        settings = saving.settings
        yield saving
    size = latent_shape(spec.config, settings)[1:]
    yield from tiling.tile_savings(settings, *size, tiling.ENCODE)
    yield from tiling.tile_savings(settings, *size)
