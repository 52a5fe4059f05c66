"""The stages of a Step-Video, each called once for a dry run, and how to save memory.

What is called is what `stages.py` calls, at the plan's sizes and for a prompt of full length; host
tensors are zeros, and those on the device have no numbers.
Read next: `everyframe.precision.rehearse`, `stages.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Settings
from everyframe.families import tiles
from everyframe.families.family import Rehearsal, Saving
from everyframe.families.sparing import branches_at_once, one_branch_at_once
from everyframe.families.stepvideo.components import PARTS, Sizes
from everyframe.families.stepvideo.settle import Facts, latent_shape

if TYPE_CHECKING:
    from everyframe.families.stepvideo.text import TextStates, Tokens
    from everyframe.parallel.team import Teams

#: Rows and columns of latents in a tile, each 16 pixels: 992x544 in two tiles, or in six.
SIDES = (48, 32, 16)


def rehearsals(
    sizes: Sizes, facts: Facts, settings: Settings, teams: Teams | None = None
) -> tuple[Rehearsal, ...]:
    """Both texts, one step, one piece; with `teams` the step is that of one of several ranks."""
    shape = latent_shape(facts, settings)
    branches = 1 if settings.guidance_scale == 1 else 2
    together = branches_at_once(settings, branches)
    pieces, tile = facts.vae.pieces(settings.num_frames), settings.saving(tiles.DECODE, 0)
    calls: dict[str, tuple[Any, ...]] = {
        "step_llm": (_llm, branches),
        "clip": (_clip, branches),
        "denoiser": (
            partial(_denoise, sizes, facts, settings, teams),
            settings.num_inference_steps,
            *(*shape, branches, together, *_key(teams)),
        ),
        "vae": (
            partial(_decode, facts, settings),
            len(pieces) * tiles.num_repeats(*shape[2:], tile),
            *(*shape, tile),
        ),
    }
    return tuple(sizes.rehearsal(stage, name, *calls[name]) for name, _, stage in PARTS)


def savings(facts: Facts, component: str, settings: Settings) -> Iterator[Saving]:
    """One branch of guidance after the other; tiles, in which pieces are decoded."""
    if component == "vae":
        yield from tiles.tile_savings(settings, *latent_shape(facts, settings)[2:], sides=SIDES)
    if component == "denoiser" and settings.guidance_scale != 1:
        yield one_branch_at_once(settings)


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


def _key(teams: Teams | None) -> tuple[Any, ...]:
    """Two ranks of equal keys do the same."""
    if teams is None:
        return ()
    return (teams.team.rank, teams.team.weights, teams.groups, teams.way)


def _denoise(
    sizes: Sizes,
    facts: Facts,
    settings: Settings,
    teams: Teams | None,
    model: Any,
    device: str,
) -> object:
    from everyframe.families.stepvideo import sharding
    from everyframe.parallel.team import ONE

    teams = teams or ONE
    put_on = sharding.apply(model, teams.team, teams.groups, teams.way)
    try:
        return _one_step(sizes, facts, settings, model, device)
    finally:
        put_on.remove()  # the module is shared by all rehearsals


def _one_step(sizes: Sizes, facts: Facts, settings: Settings, model: Any, device: str) -> object:
    import torch

    from everyframe.families.stepvideo.denoise import Denoiser, Text
    from everyframe.families.stepvideo.text import LLM_LENGTH
    from everyframe.samplers import flow_match

    # A negative prompt is shorter than the prompt, so there is a mask.
    text = Text(
        _states(sizes, LLM_LENGTH),
        None if settings.guidance_scale == 1 else _states(sizes, LLM_LENGTH // 4),
    )
    denoise = Denoiser(model, text, settings, device)
    x = torch.zeros(1, *latent_shape(facts, settings), device=device)
    sigmas = flow_match.schedule(settings.num_inference_steps, settings.option("time_shift"))
    return next(flow_match.sample(denoise, x, sigmas)).x


def _states(sizes: Sizes, num_tokens: int) -> TextStates:
    import torch

    from everyframe.families.stepvideo.text import CLIP_LENGTH, LLM_LENGTH, TextStates

    llm, clip = sizes.denoiser.caption_channels
    mask = torch.arange(LLM_LENGTH, device="cpu")[None] < num_tokens
    return TextStates(torch.zeros(1, LLM_LENGTH, llm), mask, torch.zeros(1, CLIP_LENGTH, clip))


def _decode(facts: Facts, settings: Settings, vae: Any, device: str) -> object:
    import torch

    from everyframe.families.stepvideo.coding import decoded

    latents = torch.zeros(1, *latent_shape(facts, settings), device=device)
    piece = vae.pieces(settings.num_frames)[0]
    pixels = decoded(vae, latents, piece, settings, most_tiles=tiles.REHEARSED)
    return pixels.to("cpu", torch.float32)
