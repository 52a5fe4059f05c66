"""Calls and memory savings of the inpainting stages, for the planner. No torch.

Each stage is called once, at the plan's sizes; `stages.py` and `vae_stages.py` have the calls.
ControlNets and UNet run in one call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Settings
from everyframe.dry_run.call import DryRunCall
from everyframe.families.inpaint.components import controlnet_name
from everyframe.families.inpaint.config import InpaintConfig
from everyframe.families.inpaint.scheduler import num_timesteps
from everyframe.families.inpaint.settings import geometry_of, latent_shape, num_painted
from everyframe.runtime import tiling
from everyframe.runtime.interface import MemorySaving
from everyframe.runtime.memory_fallbacks import cfg_batch_size, split_cfg_saving

if TYPE_CHECKING:
    from everyframe.families.inpaint.spec import InpaintSpec


def dry_run_calls(
    spec: InpaintSpec, settings: Settings, num_ranks: int = 1
) -> tuple[DryRunCall, ...]:
    """Dry-run calls: a prompt, source frames, one step of the networks, one batch of frames.

    With `num_ranks`, the calls are those of one rank; each rank has its own batch.
    """
    config = spec.sizes.config
    together = min(int(settings.option("frames_at_once")), num_painted(settings))
    num_batches = ceil(num_painted(settings) / together / num_ranks)
    lot = min(together, settings.saving(tiling.FRAMES, together))
    lots = num_batches * ceil(together / lot)
    tile, given_tile = settings.saving(tiling.DECODE, 0), settings.saving(tiling.ENCODE, 0)
    latents = latent_shape(config, settings)[1:]
    size = (*geometry_of(config, settings).padded, together)
    strength = float(settings.option("strength"))
    steps = num_timesteps(config.scheduler, settings.num_inference_steps, strength) * num_batches
    branches = 1 if settings.guidance_scale <= 1 else 2
    guess = bool(settings.option("guess_mode"))
    networks = (*map(controlnet_name, range(len(config.controlnets))), "unet")

    def one(
        stage: str,
        component: str,
        name: str,
        num_calls: float,
        *key: Hashable,
        components: tuple[str, ...] = (),
    ) -> DryRunCall:
        call = partial(_dry_run, name, spec, settings)
        return spec.sizes.rehearsal(
            stage, component, call, num_calls, *size, *key, components=components
        )

    def one_step(component: str) -> DryRunCall:
        key = (branches, cfg_batch_size(settings, branches), guess)
        return one("denoise", component, "DenoiseStage", steps, *key, components=networks)

    encodes = lots * tiling.num_repeats(*latents, given_tile)
    decodes = lots * tiling.num_repeats(*latents, tile)
    return (
        one("text", "text_encoder", "TextEncodeStage", branches),
        one("given frames", "vae", "SourceLatentStage", encodes, lot, given_tile, strength < 1),
        *map(one_step, networks),
        one("decode", "vae", "DecodeStage", decodes, lot, tile),
    )


def _dry_run(
    name: str, spec: InpaintSpec, settings: Settings, modules: Mapping[str, Any], device: str
) -> object:
    from everyframe.families.inpaint import stages, vae_stages
    from everyframe.families.inpaint.stage_context import InpaintContext

    found = getattr(stages, name, None) or getattr(vae_stages, name)
    return found(InpaintContext(spec, settings)).dry_run(modules, device)


def memory_savings(
    config: InpaintConfig, component: str, settings: Settings
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
    size = latent_shape(config, settings)[1:]
    yield from tiling.tile_savings(settings, *size, tiling.ENCODE)
    yield from tiling.tile_savings(settings, *size)
