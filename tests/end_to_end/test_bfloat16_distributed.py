"""Whole samplings in bfloat16 on several ranks against one, for each family that shares.

Rounding to eight bits at every product makes small differences grow, so no fixed bound says when
ranks differ by rounding alone. The floor does: how far the run of one device comes from itself when
its start latents, which are numbers of bfloat16, are moved by one unit in the last place. Ranks sum
in another order, and must stay within what that makes: of Open-Sora and Step-Video it is half, of
the UNet all, as through its many layers any rounding grows to the same. A rank with other noise is
beyond, and so is one that is wrong by a thirtieth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everyframe.core.plan import Precision
from everyframe.families.opensora import components as opensora
from everyframe.families.opensora.components import build_model
from everyframe.families.opensora.config import STDiT3Config, STDiTConfig
from everyframe.families.opensora.sharding import Sharding as OpenSoraSharding
from everyframe.families.stepvideo import components as stepvideo
from everyframe.families.stepvideo.config import StepVideoModelConfig
from everyframe.families.stepvideo.model import StepVideoModel
from everyframe.families.stepvideo.sharding import Sharding as StepVideoSharding
from everyframe.families.svd import components as svd
from everyframe.families.svd import unet
from everyframe.families.svd.sharding import Sharding as SVDSharding
from everyframe.parallel.communicator import Communicator, ParallelContext, SingleRank
from everyframe.parallel.head_partition import SEQUENCE_BACKENDS
from everyframe.precision import cast_hooks
from everyframe.samplers import euler_karras, flow_matching, iddpm, noise, rectified_flow
from everyframe.samplers.base import Step
from everyframe.samplers.guidance import guide
from helpers.rank_pool import Group, group_of, runs_slow
from helpers.tiny_checkpoints import opensora as tiny_opensora

STEPS, SCALE, WIDTH = 4, 3.0, 12
Denoise = Callable[..., Tensor]
#: A model with what the ranks put on it, its ``denoise`` and its sampler from start latents.
Sampled = tuple[nn.Module, Callable[[Communicator], Any], Callable[[Tensor], Iterator[Step]]]


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Any:
    yield from group_of((2, 3, 5) if runs_slow(request) else (3,))


def narrow(model: nn.Module, islands: tuple[str, ...]) -> Any:
    """With weights of about their real size, in the precision of a plan."""
    model.load_state_dict(tiny_opensora.randomised(model, 0))
    cast_hooks.add_cast_hooks(
        model.eval().requires_grad_(False), Precision("bfloat16", "bfloat16", islands)
    )
    return model


def drawn(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def guided(answer: Callable[[Tensor, Tensor], Tensor], channels: int | None = None) -> Denoise:
    """Both branches at once."""

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        cond, uncond = answer(torch.cat([x, x]), t.expand(2)).chunk(2)
        return guide(cond, uncond, SCALE, channels)

    return denoise


def open_sora(version: str) -> Sampled:
    sizes: dict[str, Any] = {"hidden_size": 32, "depth": 2, "num_heads": 2}
    config = {"1.0": STDiTConfig, "1.2": STDiT3Config}[version]
    islands = {"1.0": opensora.DENOISER_ISLANDS, "1.2": opensora.DENOISER_ISLANDS_1_2}[version]
    model = narrow(
        build_model(config(**sizes, caption_channels=WIDTH, model_max_length=6)), islands
    )
    context = model.context(drawn(2, 6, WIDTH), torch.arange(6) < torch.tensor([[4], [6]]))
    conditions = {} if version == "1.0" else {"fps": 12.0, "height": 64.0, "width": 96.0}

    def answer(x: Tensor, t: Tensor) -> Tensor:
        out: Tensor = model(x, t, context, **conditions)
        return out

    def sample(x: Tensor) -> Iterator[Step]:
        if version == "1.2":
            denoise = guided(lambda x, t: answer(x, t)[:, : x.shape[1]])
            return rectified_flow.sample(denoise, x, rectified_flow.schedule(STEPS))
        plan = iddpm.schedule(STEPS)
        draw = lambda step: noise.step_noise(1, step, x.shape[1:])[None]  # noqa: E731
        return iddpm.sample(guided(answer, 3), x, plan, draw)

    return model, lambda group: OpenSoraSharding(model, ParallelContext(group, group)), sample


def step_video(backend: str) -> Sampled:
    config = StepVideoModelConfig(
        num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2,
        caption_channels=(12, 10),
    )  # fmt: skip
    model = narrow(StepVideoModel(config), stepvideo.DENOISER_ISLANDS)
    mask = (torch.arange(9) < torch.tensor([[4], [9]])).long()
    context = model.context(drawn(2, 6, 12), drawn(2, 3, 10), mask)
    denoise = guided(lambda x, t: model(x, t, context))

    def sample(x: Tensor) -> Iterator[Step]:
        return flow_matching.sample(denoise, x, flow_matching.schedule(STEPS, 3.0))

    def shard(group: Communicator) -> StepVideoSharding:
        return StepVideoSharding(model, ParallelContext(group, group, 1, backend))

    return model, shard, sample


def video_unet() -> Sampled:
    model = narrow(
        unet.build(
            {
                "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 16,
                "num_attention_heads": (1, 2), "projection_class_embeddings_input_dim": 24,
                "addition_time_embed_dim": 8, "num_frames": 3, "transformer_layers_per_block": 1,
                "down_block_types": (
                    "CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal",
                ),
                "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            }
        ),
        svd.UNET_ISLANDS,
    )  # fmt: skip
    conditions = torch.tensor([[6.0, 127.0, 0.02]]).expand(2, -1)
    context, still = model.context(drawn(2, 16), conditions, 5), drawn(2, 1, 4, 4, 6, seed=3)

    def answer(x: Tensor, t: Tensor) -> Tensor:
        with_picture = torch.cat([x, still.expand(-1, x.shape[1], -1, -1, -1)], dim=2)
        out: Tensor = model(with_picture, t, context)
        return out

    def sample(x: Tensor) -> Iterator[Step]:
        sigmas = euler_karras.schedule(STEPS, 0.002, 700.0)
        start = x * euler_karras.start_scale(sigmas)
        return euler_karras.sample(guided(answer), start, sigmas)

    return model, lambda group: SVDSharding(model, ParallelContext(group, group)), sample


#: What is sampled, and its start latents: (1, C, T, h, w), for the UNet (1, T, C, h, w).
MODELS: dict[str, tuple[Callable[[], Sampled], tuple[int, ...]]] = {
    "Open-Sora 1.0": (lambda: open_sora("1.0"), (1, 4, 5, 6, 10)),
    "Open-Sora 1.2": (lambda: open_sora("1.2"), (1, 4, 5, 6, 10)),
    "Stable Video Diffusion": (video_unet, (1, 5, 4, 4, 6)),
    **{
        f"Step-Video, {backend}": (lambda backend=backend: step_video(backend), (1, 4, 3, 6, 10))
        for backend in SEQUENCE_BACKENDS
    },
}


def start_of(name: str) -> Tensor:
    """Start latents, each a number of bfloat16."""
    return drawn(*MODELS[name][1], seed=5).bfloat16().float()


def moved(x: Tensor, seed: int) -> Tensor:
    """Each number moved to one of its two neighbours in bfloat16."""
    up = drawn(*x.shape, seed=seed) > 0
    bits = x.bfloat16().view(torch.int16)
    return torch.where(up, bits + 1, bits - 1).view(torch.bfloat16).float()


def latents(group: Communicator, name: str, x: Tensor, fault: Any = None) -> Tensor:
    """What one rank has in the end."""
    model, apply, sample = MODELS[name][0]()
    patch = apply(group)
    if fault is not None:
        x = fault(group, model, x)
    try:
        last = x
        for step in sample(x):
            last = step.x
    finally:
        patch.remove()
    return last


def distance(one: Tensor, other: Tensor) -> float:
    """The root of their mean squared difference."""
    return float((one - other).square().mean().sqrt())


#: One way of moving the start latents comes out some hundredths further than another; the floor is
#: the furthest of so many, and so much more is within it.
MOVES, SPREAD = 3, 1.1
FLOORS: dict[str, tuple[Tensor, float]] = {}


def floor_of(name: str) -> tuple[Tensor, float]:
    """The latents of one device, and how far it comes from them by one unit in the last place."""
    if name not in FLOORS:
        with torch.no_grad():
            x = start_of(name)
            right = latents(SingleRank(), name, x)
            others = (latents(SingleRank(), name, moved(x, seed)) for seed in range(MOVES))
            FLOORS[name] = (right, max(distance(other, right) for other in others))
    return FLOORS[name]


@pytest.mark.parametrize(
    "size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 5))]
)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_are_as_near_as_one_unit_in_the_last_place(
    ranks: Group, name: str, size: int
) -> None:
    right, floor = floor_of(name)
    found = ranks.run(size, latents, name, start_of(name))
    assert all(torch.equal(each, found[0]) for each in found)
    assert 0 < distance(found[0], right) < SPREAD * floor


def other_noise(group: Communicator, model: nn.Module, x: Tensor) -> Tensor:
    """The last rank has noise of its own."""
    return drawn(*x.shape, seed=7) if group.rank == group.size - 1 else x


def slightly_wrong(group: Communicator, model: nn.Module, x: Tensor) -> Tensor:
    """The last rank's products are wrong by a thirtieth."""

    def more(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * (1 + 1 / 30)

    for part in model.modules():
        if isinstance(part, nn.Linear) and group.rank == group.size - 1:
            part.register_forward_hook(more)
    return x


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(
            name,
            fault,
            marks=[pytest.mark.slow] * (name != "Open-Sora 1.2" or fault is not slightly_wrong),
        )
        for name in MODELS
        for fault in (slightly_wrong, other_noise)
    ],
)
def test_what_is_not_rounding_is_beyond_it(ranks: Group, name: str, fault: Any) -> None:
    right, floor = floor_of(name)
    found = ranks.run(3, latents, name, start_of(name), fault=fault)
    assert max(distance(each, right) for each in found) > 1.5 * floor
