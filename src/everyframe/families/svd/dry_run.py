"""Dry-run calls of Stable Video Diffusion's stages, and ways to reduce their memory.

Each stage is called once, through the code that `stages.py` runs, at the plan's sizes. Host
tensors are zeros; device tensors are meta tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Settings
from everyframe.families.svd.settings import latent_shape
from everyframe.runtime import tiling
from everyframe.runtime.interface import DryRunCall, MemorySaving
from everyframe.runtime.memory_fallbacks import cfg_batch_size, split_cfg_saving
from everyframe.runtime.model_spec import ModuleBuilder

if TYPE_CHECKING:
    from everyframe.families.svd.config import SVDConfig
    from everyframe.families.svd.options import SVDOptions
    from everyframe.parallel.communicator import Communicator, ParallelContext


def dry_run_calls(
    builder: ModuleBuilder[SVDConfig], settings: Settings, teams: ParallelContext | None = None
) -> tuple[DryRunCall, ...]:
    """Dry-run calls: image, its latents, one step, one chunk of frames.

    With `teams`, the step is that of one of its ranks; see `sharding`.
    """
    team, groups = (None, 1) if teams is None else (teams.team, teams.groups)
    config, size = builder.config, (settings.height, settings.width)
    chunk = min(int(settings.option("decode_chunk_size")), settings.num_frames)
    branches = 1 if settings.guidance_scale <= 1 else 2
    together = cfg_batch_size(settings, branches)
    tile, given_tile = settings.saving(tiling.DECODE, 0), settings.saving(tiling.ENCODE, 0)
    rows, columns = latent_shape(config, settings)[2:]
    one = builder.rehearsal
    return (
        one("image", "image_encoder", partial(_image, config), 1),
        one(
            "given frames", "vae", partial(_encode, config, settings),
            tiling.num_repeats(rows, columns, given_tile), *size, given_tile,
        ),
        one(
            "denoise", "unet", partial(_denoise, config, settings, team, groups),
            settings.num_inference_steps, *size, settings.num_frames, branches, together,
            *(() if team is None else (team.rank, team.weights, groups)),
        ),
        one(
            "decode", "vae", partial(_decode, config, settings, chunk),
            ceil(settings.num_frames / chunk) * tiling.num_repeats(rows, columns, tile),
            *size, chunk, tile,
        ),
    )  # fmt: skip


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
        settings = settings.with_option("decode_chunk_size", chunk)
        yield MemorySaving(
            settings,
            f"frames are decoded {chunk} at once (decode_chunk_size), which changes the picture a "
            "little: the decoder sees a frame's neighbours only inside of these",
            is_lossy=True,
            stage="decode",
        )
    yield from tiling.tile_savings(settings, *size)


def _image(config: SVDConfig, encoder: Any, device: str) -> object:
    import torch

    side = config.image_side
    pixels = torch.zeros(1, 3, side, side).to(device)
    return encoder(pixel_values=pixels).image_embeds[:, None].to("cpu", torch.float32)


def _encode(config: SVDConfig, settings: Settings, vae: Any, device: str) -> object:
    import torch

    from everyframe.families.svd.vae import encode

    picture = torch.zeros(1, 3, settings.height, settings.width, device=device)
    latents = encode(vae, config, picture, settings, most_tiles=tiling.REHEARSED)
    return latents.to("cpu", torch.float32)


def _denoise(
    config: SVDConfig,
    settings: Settings,
    team: Communicator | None,
    groups: int,
    unet: Any,
    device: str,
) -> object:
    from everyframe.families.svd import sharding
    from everyframe.parallel.communicator import SingleRank

    put_on = sharding.apply(unet, team or SingleRank(), groups)
    try:
        return _one_step(config, settings, unet, device)
    finally:
        put_on.remove()  # the module is shared by all rehearsals


def _one_step(config: SVDConfig, settings: Settings, unet: Any, device: str) -> object:
    import torch

    from everyframe.families.svd.denoiser import Denoiser, ImageConditioning
    from everyframe.samplers import euler_karras

    frames, channels, rows, columns = latent_shape(config, settings)
    width = int(config.image_encoder.get("projection_dim", 512))
    picture = ImageConditioning(torch.zeros(1, 1, width), torch.zeros(1, channels, rows, columns))
    denoise = Denoiser(unet, picture, settings, device)
    sigmas = euler_karras.schedule(settings.num_inference_steps, config.sigma_min, config.sigma_max)
    start = torch.zeros(1, frames, channels, rows, columns, device=device)
    return next(euler_karras.sample(denoise, start, sigmas)).x


def _decode(config: SVDConfig, settings: Settings, chunk: int, vae: Any, device: str) -> object:
    import torch

    from everyframe.families.svd.vae import decode

    latents = torch.zeros(chunk, *latent_shape(config, settings)[1:], device=device)
    pixels = decode(vae, config, latents, settings, most_tiles=tiling.REHEARSED)
    return pixels.to("cpu", torch.float32)
