"""Dry-run calls of the inpainting stages, and ways to reduce their memory.

Each stage is called once, through the code that `stages.py` and `vae_stages.py` run, at the plan's
sizes. Host tensors are zeros; device tensors are meta tensors. ControlNet and UNet are called
separately, each with placeholder inputs in place of the other's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Settings
from everyframe.families.inpaint.components import controlnet_name
from everyframe.families.inpaint.config import InpaintConfig
from everyframe.families.inpaint.scheduler import num_timesteps
from everyframe.families.inpaint.settings import geometry_of, latent_shape, num_painted
from everyframe.runtime import tiling
from everyframe.runtime.interface import DryRunCall, MemorySaving
from everyframe.runtime.memory_fallbacks import cfg_batch_size, split_cfg_saving
from everyframe.runtime.model_spec import ModuleBuilder
from everyframe.runtime.rank_shares import active_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from everyframe.parallel.communicator import ParallelContext


def dry_run_calls(
    builder: ModuleBuilder[InpaintConfig], settings: Settings, teams: ParallelContext | None = None
) -> tuple[DryRunCall, ...]:
    """Dry-run calls: a prompt, source frames, one step of each network, one batch of frames.

    With `teams`, the calls are those of one of its ranks; each rank has its own batch.
    """
    num_ranks = 1 if teams is None else len(active_ranks(teams.team.weights))
    config = builder.config
    together = min(int(settings.option("frames_at_once")), num_painted(settings))
    num_batches = ceil(num_painted(settings) / together / num_ranks)
    lot = min(together, settings.saving(tiling.FRAMES, together))
    lots = num_batches * ceil(together / lot)
    decode_tile, given_tile = settings.saving(tiling.DECODE, 0), settings.saving(tiling.ENCODE, 0)
    latents = latent_shape(config, settings)[1:]
    size = geometry_of(config, settings).padded
    strength = float(settings.option("strength"))
    each = num_timesteps(config.scheduler, settings.num_inference_steps, strength)
    steps = num_batches * each
    branches = 1 if settings.guidance_scale <= 1 else 2
    at_once = cfg_batch_size(settings, branches)
    guess = bool(settings.option("guess_mode"))

    def one(stage: str, component: str, call: Any, num_calls: float, *told: Any) -> DryRunCall:
        return builder.rehearsal(stage, component, call, num_calls, *size, together, *told)

    step = (branches, at_once, guess)
    nets = [
        one("denoise", name, partial(_steer, config, settings, together), steps, *step)
        for name in map(controlnet_name, range(len(config.controlnets)))
    ]
    denoise = partial(_denoise, config, settings, together)
    return (
        one("text", "text_encoder", partial(_text, config), branches),
        one(
            "given frames", "vae", partial(_encode, config, settings, lot),
            lots * tiling.num_repeats(*latents, given_tile), lot, given_tile,
        ),
        *nets,
        one("denoise", "unet", denoise, steps, *step),
        one(
            "decode", "vae", partial(_decode, config, settings, lot),
            lots * tiling.num_repeats(*latents, decode_tile), lot, decode_tile,
        ),
    )  # fmt: skip


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


def _text(config: InpaintConfig, encoder: Any, device: str) -> object:
    import torch

    from everyframe.families.inpaint.text import embed

    ids = torch.zeros(1, config.num_tokens, dtype=torch.long)
    uses_mask = bool(config.text_encoder.get("use_attention_mask"))
    return embed(encoder, ids, torch.ones_like(ids), device=device, uses_mask=uses_mask)


def _encode(
    config: InpaintConfig, settings: Settings, frames: int, vae: Any, device: str
) -> object:
    import torch

    from everyframe.families.inpaint.vae import posterior

    size = geometry_of(config, settings).padded
    pictures = torch.zeros(frames, 3, *size, device=device)
    factor = config.spatial_factor
    return posterior(vae, pictures, factor, settings, most_tiles=tiling.REHEARSED)


def _decode(
    config: InpaintConfig, settings: Settings, frames: int, vae: Any, device: str
) -> object:
    import torch

    from everyframe.families.inpaint.vae import decode

    latents = torch.zeros(frames, *latent_shape(config, settings), device=device)
    return decode(vae, latents, settings, most_tiles=tiling.REHEARSED)


def _steer(
    config: InpaintConfig, settings: Settings, together: int, net: Any, device: str
) -> object:
    """Run one ControlNet with a placeholder UNet."""
    import torch

    def unet(x: Tensor, *_: Any, **given: Any) -> tuple[Tensor]:
        return (torch.zeros_like(x[:, :4]),)

    return _called(config, settings, together, unet, net, device)


def _denoise(
    config: InpaintConfig, settings: Settings, together: int, unet: Any, device: str
) -> object:
    """Run the UNet with a placeholder ControlNet."""
    import torch

    def net(x: Tensor, *_: Any, **given: Any) -> tuple[list[Tensor], Tensor]:
        shapes = residual_shapes(config, len(x), x.shape[-2], x.shape[-1])
        *down, middle = [torch.zeros(shape, device=device) for shape in shapes]
        return down, middle

    return _called(config, settings, together, unet, net, device)


def residual_shapes(
    config: InpaintConfig, batch: int, rows: int, columns: int
) -> list[tuple[int, int, int, int]]:
    """Shapes of ControlNet residuals: input, each layer, each downsampling, middle."""
    channels = [int(c) for c in config.unet.get("block_out_channels", (320, 640, 1280, 1280))]
    given = config.unet.get("layers_per_block", 2)
    layers = given if isinstance(given, (list, tuple)) else [given] * len(channels)
    shapes = [(batch, channels[0], rows, columns)]
    for number, (width, count) in enumerate(zip(channels, layers, strict=True)):
        shapes += [(batch, width, rows, columns)] * int(count)
        if number < len(channels) - 1:
            rows, columns = ceil(rows / 2), ceil(columns / 2)
            shapes.append((batch, width, rows, columns))
    return [*shapes, shapes[-1]]


def _called(
    config: InpaintConfig, settings: Settings, together: int, unet: Any, net: Any, device: str
) -> object:
    import torch

    from everyframe.families.inpaint.denoiser import ControlNetInputs, ControlNetScale, Denoiser

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(together, *shape, device=device)

    shape = latent_shape(config, settings)
    branches = 1 if settings.guidance_scale <= 1 else 2
    width = int(config.text_encoder.get("hidden_size", 512))
    conditions = ControlNetInputs(
        text=torch.zeros(branches, config.num_tokens, width, device=device),
        controls=(zeros(3, *geometry_of(config, settings).padded),),
        mask=zeros(1, *shape[1:]) if config.takes_mask else None,
        masked=zeros(*shape) if config.takes_mask else None,
    )
    denoise = Denoiser(
        unet,
        [net],
        conditions,
        [ControlNetScale(1.0, 0.0, 1.0)],
        guidance_scale=settings.guidance_scale,
        guess_mode=bool(settings.option("guess_mode")),
        num_steps=1,
        branches_at_once=cfg_batch_size(settings, branches),
    )
    return denoise(zeros(*shape), torch.zeros(together, device=device))
