"""Dry-run calls of Open-Sora's stages, and ways to reduce their memory.

Each stage is called once, through the code that `stages.py` runs, at the plan's sizes and with a
prompt of full length. Host tensors are zeros; device tensors are meta tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Settings
from everyframe.families.opensora.config import OpenSoraConfig
from everyframe.families.opensora.settings import PIECE
from everyframe.families.opensora.vae_config import ImageVAEConfig
from everyframe.runtime import tiling
from everyframe.runtime.interface import DryRunCall, MemorySaving
from everyframe.runtime.memory_fallbacks import cfg_batch_size, split_cfg_saving
from everyframe.runtime.model_spec import ModuleBuilder

if TYPE_CHECKING:
    import torch

    from everyframe.parallel.communicator import Communicator, ParallelContext


def dry_run_calls(
    builder: ModuleBuilder[OpenSoraConfig],
    settings: Settings,
    teams: ParallelContext | None = None,
) -> tuple[DryRunCall, ...]:
    """Dry-run calls: one prompt, conditioning frames if any, one step, one piece.

    With `teams`, the step is that of one of its ranks; see `sharding`.
    """
    team, groups = (None, 1) if teams is None else (teams.team, teams.groups)
    config = builder.config
    size = (settings.num_frames, settings.height, settings.width)
    branches = 1 if settings.guidance_scale == 1 else 2
    together = cfg_batch_size(settings, branches)
    pieces = config.vae.pieces(settings.num_frames)
    given = _is_given(settings)
    length = config.denoiser.model_max_length
    at_once = settings.saving(tiling.FRAMES, 0)
    tile, given_tile = settings.saving(tiling.DECODE, 0), settings.saving(tiling.ENCODE, 0)
    latents = config.vae.latent_size(*size)[1:]

    def one(stage: str, component: str, call: Any, num_calls: float, *told: Any) -> DryRunCall:
        num_calls *= settings.chain if stage != "text" else 1
        return builder.rehearsal(stage, component, call, num_calls, *told)

    prompts = 1 + (settings.negative_prompt is not None)
    stages = [one("text", "text_encoder", partial(_text, length), prompts)]
    if given:
        # What is encoded are given frames: a piece at most.
        frames = min(settings.num_frames, PIECE)
        encode = partial(_encode, (frames, *size[1:]), settings)
        repeats = tiling.num_repeats(*latents, given_tile)
        told = (frames, *size, at_once, given_tile)
        stages.append(one("given frames", "vae", encode, repeats, *told))
    stages += [
        one(
            "denoise", "denoiser", partial(_denoise, config, settings, given, team, groups),
            settings.num_inference_steps, config.version, *size, branches, together, given,
            *(() if team is None else (team.rank, team.weights, groups)),
        ),
        one(
            "decode", "vae", partial(_decode, size, settings),
            settings.num_frames / pieces[0].num_frames * tiling.num_repeats(*latents, tile),
            *size, at_once, tile,
        ),
    ]  # fmt: skip
    return tuple(stages)


def memory_savings(
    config: OpenSoraConfig, component: str, settings: Settings
) -> Iterator[MemorySaving]:
    """Sequential guidance branches; fewer frames per autoencoder call; tiling.

    The spatial stage works frame by frame, so fewer frames per call change no frame.
    """
    if component == "denoiser" and settings.guidance_scale != 1:
        yield split_cfg_saving(settings)
    if component != "vae":
        return
    vae = config.vae
    usual = (vae if isinstance(vae, ImageVAEConfig) else vae.spatial).micro_batch_size
    for saving in tiling.fewer_frames(settings, usual):
        settings = saving.settings
        yield saving
    size = config.vae.latent_size(settings.num_frames, settings.height, settings.width)
    if _is_given(settings):
        yield from tiling.tile_savings(settings, *size[1:], tiling.ENCODE)
    yield from tiling.tile_savings(settings, *size[1:])


def _is_given(settings: Settings) -> bool:
    """Whether conditioning frames are encoded."""
    return bool(settings.given_frames) or settings.chain > 1


def _text(length: int, encoder: Any, device: str) -> object:
    import torch

    from everyframe.families.opensora.text import embed

    ids = torch.zeros(1, length, dtype=torch.long)
    return embed(encoder, ids, torch.ones(1, length, dtype=torch.bool), device)


def _encode(size: tuple[int, int, int], settings: Settings, vae: Any, device: str) -> object:
    import torch

    from everyframe.families.opensora.vae import encoded

    video = torch.zeros(1, 3, *size, device=device)
    return encoded(vae, video, settings, most_tiles=tiling.REHEARSED)


def _denoise(
    config: OpenSoraConfig,
    settings: Settings,
    given: bool,
    team: Communicator | None,
    groups: int,
    model: Any,
    device: str,
) -> object:
    from everyframe.families.opensora import sharding
    from everyframe.parallel.communicator import SingleRank

    put_on = sharding.apply(model, team or SingleRank(), groups)
    try:
        return _one_step(config, settings, given, model, device)
    finally:
        put_on.remove()  # the module is shared by all rehearsals


def _one_step(
    config: OpenSoraConfig,
    settings: Settings,
    given: bool,
    model: Any,
    device: str,
) -> object:
    import torch

    from everyframe.families.opensora.denoiser import Denoiser, PromptEmbeds, timesteps_of
    from everyframe.families.opensora.text import TextEmbedding
    from everyframe.samplers import iddpm, rectified_flow

    length = config.denoiser.model_max_length
    prompt = TextEmbedding(
        torch.zeros(1, length, config.denoiser.caption_channels),
        torch.ones(1, length, dtype=torch.bool),
    )
    negative = None if settings.negative_prompt is None else prompt
    denoise = Denoiser(model, PromptEmbeds(prompt, negative), settings, config, device)
    size = config.vae.latent_size(settings.num_frames, settings.height, settings.width)
    shape = (1, config.vae.latent_channels, *size)
    x = torch.zeros(shape, device=device)

    def fresh(step: int) -> torch.Tensor:
        return torch.zeros(shape)

    if config.version == "1.0":
        return next(iddpm.sample(denoise, x, iddpm.schedule(settings.num_inference_steps), fresh)).x
    timesteps = timesteps_of(settings, config)
    if not given:
        return next(rectified_flow.sample(denoise, x, timesteps)).x
    mask = torch.ones(1, size[0])
    mask[:, 0] = settings.edit_strength
    return next(rectified_flow.sample_masked(denoise, x, timesteps, mask, fresh)).x


def _decode(size: tuple[int, int, int], settings: Settings, vae: Any, device: str) -> object:
    import torch

    from everyframe.families.opensora.vae import decode_frames

    num_frames, height, width = size
    channels = vae.config.latent_channels
    latents = torch.zeros(1, channels, *vae.latent_size(num_frames, height, width), device=device)
    piece = vae.pieces(num_frames)[0]
    pixels = decode_frames(vae, latents, piece, settings, most_tiles=tiling.REHEARSED)
    return pixels.to("cpu", torch.float32)
