"""The denoiser against diffusers' FLUX transformer, in both layouts, and the sizes of its tensors.

Golden vectors of upstream's own run are checked in `golden/` and from outside.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from everyframe.core.errors import CheckpointError, InputError
from everyframe.families.opensora2.config import MMDiTConfig
from everyframe.families.opensora2.mmdit import MMDiT
from helpers.references import flux

VIDEO = MMDiTConfig(
    in_channels=16, vec_in_dim=10, context_in_dim=12, hidden_size=48, num_heads=3, depth=2,
    depth_single_blocks=2, axes_dim=(4, 6, 6),
)  # fmt: skip
FLUX = replace(VIDEO, cond_embed=False, guidance_embed=True, fused_qkv=True, use_liger_rope=False)
HIGH_COMPRESSION = replace(VIDEO, in_channels=6, patch_size=1)
CONFIGS = {
    "video": VIDEO,
    "flux": FLUX,
    "high compression": HIGH_COMPRESSION,
    "no condition": replace(VIDEO, cond_embed=False),
    "fused halves": replace(FLUX, use_liger_rope=True),
}


def model_of(config: MMDiTConfig) -> MMDiT:
    """In float64, so that a wrong formula can't hide behind rounding."""
    torch.manual_seed(0)
    model = MMDiT(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def inputs_of(config: MMDiTConfig, frames: int = 3) -> dict[str, Any]:
    torch.manual_seed(1)
    channels = config.latent_channels
    shape = (2, channels, frames, 4, 6)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64)

    found: dict[str, Any] = {
        "x": normal(*shape), "t": torch.tensor([0.9, 0.25], dtype=torch.float64),
        "text": normal(2, 5, config.context_in_dim), "vector": normal(2, config.vec_in_dim),
    }  # fmt: skip
    if config.cond_embed:
        found["cond"] = normal(2, 1 + channels, *shape[2:])
    if config.guidance_embed:
        found["guidance"] = torch.tensor([4.0, 3.5], dtype=torch.float64)
    return found


def answer(model: MMDiT, given: dict[str, Any]) -> Tensor:
    context = model.context(given["text"], given["vector"], given.get("guidance"))
    with torch.inference_mode():
        return model(given["x"], given["t"], context, given.get("cond"))


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_denoiser_equals_the_flux_transformer(name: str, frames: int) -> None:
    config = CONFIGS[name]
    model, given = model_of(config), inputs_of(config, frames)
    reference = flux.flux_of(config, dict(model.state_dict()))
    with torch.inference_mode():
        wanted = flux.velocity(reference, config, **given)
    assert wanted.std() > 0.1
    # diffusers' sinusoids and rotary tables are in float32: angles up to 1000 have 6e-5.
    assert (answer(model, given) - wanted).abs().max() < 2e-4 * wanted.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_follow_from_shapes(name: str) -> None:
    config = CONFIGS[name]
    shapes = {key: tuple(each.shape) for key, each in MMDiT(config).state_dict().items()}
    # A superscript is a digit to Python and no number of a block.
    found = MMDiTConfig.from_shapes({**shapes, "double_blocks.².weight": (1,)})
    # Where q, k and v are fused the layout is FLUX's; without a condition the patch is.
    assert replace(found, use_liger_rope=config.use_liger_rope) == config
    assert found.use_liger_rope == (not config.fused_qkv)


def test_released_sizes_have_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        video, first = MMDiT(MMDiTConfig()), MMDiT(
            MMDiTConfig(cond_embed=False, guidance_embed=True, fused_qkv=True, use_liger_rope=False)
        )  # fmt: skip
        deep = MMDiT(MMDiTConfig(in_channels=128, patch_size=1))
    count = {
        model: sum(parameter.numel() for parameter in model.parameters())
        for model in (video, first, deep)
    }
    assert count[video] == 11_891_390_528
    assert count[first] == 11_901_408_320
    assert count[deep] == 11_891_971_200
    assert (len(video.state_dict()), len(first.state_dict())) == (1082, 780)


def test_no_condition_is_a_condition_of_zeros() -> None:
    model, given = model_of(VIDEO), inputs_of(VIDEO)
    zeros = answer(model, {**given, "cond": torch.zeros_like(given["cond"])})
    del given["cond"]
    assert torch.equal(answer(model, given), zeros)


def test_the_context_is_computed_once_and_changes_nothing() -> None:
    model, given = model_of(VIDEO), inputs_of(VIDEO)
    context = model.context(given["text"], given["vector"])
    whole = answer(model, given)
    one = model(given["x"][1:], given["t"][1:], context.rows(1, 2), given["cond"][1:])
    assert torch.allclose(one, whole[1:], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": torch.zeros(2, 4, 3, 4, 5)}, "multiples of 2"),
        ({"x": torch.zeros(2, 3, 3, 4, 6)}, r"\(batch, 4, frames"),
        ({"t": torch.zeros(3)}, "as many timesteps"),
        ({"text": torch.zeros(2, 5, 11)}, r"\(batch, tokens, 12\)"),
        ({"vector": torch.zeros(2, 11)}, r"\(2, 10\)"),
        ({"guidance": torch.ones(2)}, "doesn't take the guidance"),
    ],
)
def test_wrong_inputs_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        answer(model_of(VIDEO), {**inputs_of(VIDEO), **change})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_heads": 5}, "rotary axes"),
        ({"axes_dim": (5, 5, 6)}, "even"),
        ({"depth": 0}, "whole numbers above 0"),
        ({"depth": 10**9}, "at most"),
        ({"in_channels": 6}, "the patch"),
        ({"qkv_bias": 1}, "true or false"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        replace(VIDEO, **change)


def test_foreign_tensors_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"img_in\.weight"):
        MMDiTConfig.from_shapes({"blocks.0.weight": (2, 2)})
    with pytest.raises(CheckpointError, match="'extra'"):
        MMDiTConfig.from_json({"extra": 1})


def test_switches_that_are_left_out_are_those_of_upstreams_class() -> None:
    """The class is FLUX's, whose rotary channels are pairs; read otherwise, numbers are wrong."""
    config = MMDiTConfig.from_json({"depth": 3})
    assert (config.depth, config.cond_embed, config.fused_qkv, config.use_liger_rope) == (
        3, False, True, False,
    )  # fmt: skip
    assert MMDiTConfig.from_json({"use_liger_rope": True}).use_liger_rope


def test_the_feed_forwards_width_survives_its_ratio() -> None:
    """`int(hidden * (width / hidden))` is one too small for 313 of these pairs."""
    mlp_size = MMDiTConfig.mlp_size.fget  # type: ignore[attr-defined]
    for hidden in range(1, 2500):
        for width in (4 * hidden - 1, 4 * hidden, 4 * hidden + 1, 3 * hidden + 2):
            sizes = SimpleNamespace(hidden_size=hidden, mlp_ratio=width / hidden)
            assert mlp_size(sizes) == width
