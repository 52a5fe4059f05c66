"""Dry-run calls of Step-Video's stages, and ways to reduce their memory.

Each stage is called once, through the code that `stages.py` runs, at the plan's sizes and with a
prompt of full length. Host tensors are zeros; device tensors are meta tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Settings
from everyframe.families.stepvideo.config import StepVideoConfig
from everyframe.families.stepvideo.settings import latent_shape
from everyframe.runtime import tiling
from everyframe.runtime.interface import DryRunCall, MemorySaving
from everyframe.runtime.memory_fallbacks import cfg_batch_size, split_cfg_saving
from everyframe.runtime.model_spec import ModuleBuilder

if TYPE_CHECKING:
    from everyframe.families.stepvideo.text import TextStates, Tokens
    from everyframe.parallel.communicator import ParallelContext

#: Tile sides in latents of 16 pixels each: 992x544 takes two tiles, or six.
SIDES = (48, 32, 16)


def dry_run_calls(
    builder: ModuleBuilder[StepVideoConfig],
    settings: Settings,
    teams: ParallelContext | None = None,
) -> tuple[DryRunCall, ...]:
    """Dry-run calls: both texts, one step, one piece.

    With `teams`, the step is that of one of several ranks.
    """
    config = builder.config
    shape = latent_shape(config, settings)
    branches = 1 if settings.guidance_scale == 1 else 2
    together = cfg_batch_size(settings, branches)
    pieces, tile = config.vae.pieces(settings.num_frames), settings.saving(tiling.DECODE, 0)
    calls: dict[str, tuple[Any, ...]] = {
        "step_llm": (_llm, branches),
        "clip": (_clip, branches),
        "denoiser": (
            partial(_denoise, config, settings, teams),
            settings.num_inference_steps,
            *(*shape, branches, together, *_key(teams)),
        ),
        "vae": (
            partial(_decode, config, settings),
            len(pieces) * tiling.num_repeats(*shape[2:], tile),
            *(*shape, tile),
        ),
    }
    return tuple(
        builder.rehearsal(stage, n.name, *calls[n.name]) for n, _, stage in builder.needs()
    )


def memory_savings(
    config: StepVideoConfig, component: str, settings: Settings
) -> Iterator[MemorySaving]:
    """Sequential guidance branches; tiled decoding of pieces."""
    if component == "vae":
        yield from tiling.tile_savings(settings, *latent_shape(config, settings)[2:], sides=SIDES)
    if component == "denoiser" and settings.guidance_scale != 1:
        yield split_cfg_saving(settings)


def _tokens(length: int) -> Tokens:
    import torch

    from everyframe.families.stepvideo.text import Tokens

    ids = torch.zeros(1, length, dtype=torch.long)
    return Tokens(ids, torch.ones(1, length, dtype=torch.bool))


def _llm(model: Any, device: str) -> object:
    from everyframe.families.stepvideo.text import LLM_LENGTH, llm_states

    return llm_states(model, _tokens(LLM_LENGTH), device)


def _clip(model: Any, device: str) -> object:
    from everyframe.families.stepvideo.text import CLIP_LENGTH, clip_states

    return clip_states(model, _tokens(CLIP_LENGTH), device)


def _key(teams: ParallelContext | None) -> tuple[Any, ...]:
    """Key of a rank's work: ranks with equal keys do the same."""
    if teams is None:
        return ()
    return (teams.team.rank, teams.team.weights, teams.groups, teams.way)


def _denoise(
    config: StepVideoConfig,
    settings: Settings,
    teams: ParallelContext | None,
    model: Any,
    device: str,
) -> object:
    from everyframe.families.stepvideo import sharding
    from everyframe.parallel.communicator import ONE

    teams = teams or ONE
    put_on = sharding.apply(model, teams.team, teams.groups, teams.way)
    try:
        return _one_step(config, settings, model, device)
    finally:
        put_on.remove()  # the module is shared by all rehearsals


def _one_step(config: StepVideoConfig, settings: Settings, model: Any, device: str) -> object:
    import torch

    from everyframe.families.stepvideo.denoiser import Denoiser, PromptEmbeds
    from everyframe.families.stepvideo.text import LLM_LENGTH
    from everyframe.samplers import flow_matching

    # A negative prompt is shorter than the prompt, so there is a mask.
    text = PromptEmbeds(
        _states(config, LLM_LENGTH),
        None if settings.guidance_scale == 1 else _states(config, LLM_LENGTH // 4),
    )
    denoise = Denoiser(model, text, settings, device)
    x = torch.zeros(1, *latent_shape(config, settings), device=device)
    sigmas = flow_matching.schedule(settings.num_inference_steps, settings.option("time_shift"))
    return next(flow_matching.sample(denoise, x, sigmas)).x


def _states(config: StepVideoConfig, num_tokens: int) -> TextStates:
    import torch

    from everyframe.families.stepvideo.text import CLIP_LENGTH, LLM_LENGTH, TextStates

    llm, clip = config.denoiser.caption_channels
    mask = torch.arange(LLM_LENGTH, device="cpu")[None] < num_tokens
    return TextStates(torch.zeros(1, LLM_LENGTH, llm), mask, torch.zeros(1, CLIP_LENGTH, clip))


def _decode(config: StepVideoConfig, settings: Settings, vae: Any, device: str) -> object:
    import torch

    from everyframe.families.stepvideo.vae import decode_frames

    latents = torch.zeros(1, *latent_shape(config, settings), device=device)
    piece = vae.pieces(settings.num_frames)[0]
    pixels = decode_frames(vae, latents, piece, settings, most_tiles=tiling.REHEARSED)
    return pixels.to("cpu", torch.float32)
