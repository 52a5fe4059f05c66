"""Our way through diffusers' layers against diffusers' own, and what is left out on it."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNetSpatioTemporalConditionModel
from torch import Tensor

import everyframe
from everyframe.core.plan import Precision
from everyframe.families.svd import unet
from everyframe.families.svd.blocks import (
    FrameTransformer,
    ResidualBlock,
    SpatialLayer,
    TemporalLayer,
)
from everyframe.families.svd.components import UNET_ISLANDS
from everyframe.precision.cast_hooks import add_cast_hooks
from everyframe.precision.upcast import Upcast
from helpers.tiny_checkpoints import opensora as tiny_opensora
from helpers.tiny_checkpoints import svd as tiny_svd

SIZES: dict[str, Any] = {
    "block_out_channels": (32, 64, 64), "layers_per_block": 2, "cross_attention_dim": 16,
    "num_attention_heads": (1, 2, 2), "projection_class_embeddings_input_dim": 24,
    "addition_time_embed_dim": 8, "num_frames": 3,
    "down_block_types": (
        "CrossAttnDownBlockSpatioTemporal", "CrossAttnDownBlockSpatioTemporal",
        "DownBlockSpatioTemporal",
    ),
    "up_block_types": (
        "UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal",
        "CrossAttnUpBlockSpatioTemporal",
    ),
}  # fmt: skip
LAYERS = (ResidualBlock, FrameTransformer, SpatialLayer, TemporalLayer)


@pytest.fixture(scope="module")
def both() -> tuple[Any, unet.VideoUNet]:
    """diffusers' and ours, with the same random weights."""
    theirs = UNetSpatioTemporalConditionModel(**SIZES).eval().requires_grad_(False)
    ours = unet.build(SIZES).eval().requires_grad_(False)
    state = tiny_opensora.randomised(theirs, 0)
    for module in (theirs, ours):
        module.load_state_dict(state)
    return theirs, ours


def inputs(frames: int, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scaled latents, times, the picture's embeddings, added time ids: two branches."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, frames, 8, height, width, generator=generator)
    picture = torch.cat([torch.zeros(1, 16), torch.randn(1, 16, generator=generator)])
    return x, torch.tensor([1.6, 1.6]), picture, torch.tensor([[6.0, 127.0, 0.02]] * 2)


# 5 and 7 are no multiples of 4: halves are rounded up on the way down.
@pytest.mark.parametrize("size", [(3, 8, 8), (1, 8, 12), (4, 5, 7)])
def test_it_answers_as_diffusers_does(
    both: tuple[Any, unet.VideoUNet], size: tuple[int, int, int]
) -> None:
    theirs, ours = both
    x, t, picture, time_ids = inputs(*size)
    expected = theirs(x, t, picture[:, None], time_ids, return_dict=False)[0]
    context = ours.context(picture, time_ids, size[0])
    assert ours(x, t, context).shape == expected.shape
    # The same sums of float32 in another order, through some sixty layers: 2e-6 measured.
    assert (ours(x, t, context) - expected).abs().max() < 2e-5 * expected.abs().max()
    for row in (0, 1):
        alone = ours(x[row:][:1], t[:1], context.rows(slice(row, row + 1)))
        assert (alone - expected[row]).abs().max() < 2e-5 * expected.abs().max()


def test_it_leaves_what_it_is_given_as_it_was(both: tuple[Any, unet.VideoUNet]) -> None:
    """Sums are made in place; neither the latents nor the context may change by it."""
    _, ours = both
    x, t, picture, time_ids = inputs(3, 8, 8)
    context, before = ours.context(picture, time_ids, 3), x.clone()
    first = ours(x, t, context)
    assert torch.equal(first, ours(x, t, context))
    assert torch.equal(x, before)


def test_names_and_shapes_are_diffusers_own(both: tuple[Any, unet.VideoUNet]) -> None:
    theirs, ours = (module.state_dict() for module in both)
    assert {n: v.shape for n, v in theirs.items()} == {n: v.shape for n, v in ours.items()}


def test_what_does_not_depend_on_latents_is_computed_once_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    build = unet.build

    def count(kind: str, _module: Any, _given: Any, answer: Any) -> None:
        # Plans call it too, with tensors that have no numbers.
        calls[kind] += type(answer) is torch.Tensor and answer.device.type == "cpu"

    def watched(config: Any) -> unet.VideoUNet:
        made = build(config)
        for name, module in made.named_modules():
            module.register_forward_hook(partial(count, ".".join(name.split(".")[-2:])))
        return made

    monkeypatch.setattr(unet, "build", watched)
    folder = tiny_svd.svd(tmp_path / "tiny")
    everyframe.generate(
        model=str(folder), image=np.zeros((32, 32, 3), np.uint8), size="32x32", num_frames=2,
        num_inference_steps=3, seed=1,
    )  # fmt: skip
    # Four transformers, each with a layer over space and one over time.
    assert calls["attn2.to_v"] == 8
    assert calls["attn2.to_q"] == calls["attn2.to_k"] == 0
    assert calls["add_embedding.linear_1"] == 1
    assert calls["time_pos_embed.linear_1"] == 4
    assert calls["time_embedding.linear_1"] == 3
    assert calls["attn1.to_q"] == 3 * 8


def test_each_repaired_layer_fits_the_layers_around_it(both: tuple[Any, unet.VideoUNet]) -> None:
    """A layer in float32 gives float32 to the next one, which computes in bfloat16."""
    ours = unet.build(SIZES).eval().requires_grad_(False)
    ours.load_state_dict(both[1].state_dict())
    add_cast_hooks(ours, Precision("bfloat16", "bfloat16", islands=UNET_ISLANDS))
    x, t, picture, time_ids = inputs(2, 4, 4)
    plain = ours(x, t, ours.context(picture, time_ids, 2))
    layers = [part for part in ours.mid_block.modules() if isinstance(part, LAYERS)]
    assert {*map(type, layers)} == {*LAYERS}
    for layer in layers:
        repair = Upcast(layer, torch.float32)
        repaired = ours(x, t, ours.context(picture, time_ids, 2))
        repair.undo()
        assert 0 < (repaired - plain).norm() < 0.1 * plain.norm()
