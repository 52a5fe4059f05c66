"""The denoisers against upstream's outputs, against themselves in float64, and piece by piece.

Tiny sizes; the released sizes are held by names and counts on the meta device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.shapes.initialise import initialise
from safetensors.torch import load_file
from torch import Tensor, nn

from everyframe.core.errors import InputError
from everyframe.core.plan import Precision
from everyframe.families.opensora.components import build_model
from everyframe.families.opensora.config import STDiT3Config, STDiTConfig
from everyframe.families.opensora.stdit import STDiT
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.precision import cast_hooks

GOLDEN = Path(__file__).parents[2] / "golden"
COMPUTED = {"pos_embed", "pos_embed_temporal", "rope.freqs"}  # in upstream's files, not in ours
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "depth": 2,
    "num_heads": 2,
    "caption_channels": 12,
    "model_max_length": 6,
}


def golden(name: str) -> tuple[STDiT | STDiT3, dict[str, Tensor]]:
    config_type = STDiTConfig if name == "opensora_stdit_v1_0" else STDiT3Config
    config = json.loads((GOLDEN / name / "config.json").read_text())
    model = build_model(config_type.from_json(config))
    weights = load_file(GOLDEN / name / "weights.safetensors")
    model.load_state_dict({k: v for k, v in weights.items() if k not in COMPUTED})
    return model.eval().requires_grad_(False), load_file(GOLDEN / name / "io.safetensors")


def video(io: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: io[name] for name in ("fps", "height", "width") if name in io}


def tiny(kind: type, **sizes: Any) -> Any:
    """A model in float64 whose every parameter is drawn, so that no branch is silent."""
    model = build_model(kind(**{**SIZES, **sizes})).double()
    generator = torch.Generator().manual_seed(1)
    initialise(model, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.requires_grad_(False)


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def call(model: Any, x: Tensor, t: Tensor, context: Any, **kwargs: Any) -> Tensor:
    if isinstance(model, STDiT3):
        kwargs = {"fps": 12, "height": 64, "width": 64, **kwargs}
    out: Tensor = model(x, t, context, **kwargs)
    return out


# ---------------------------------------------------------------- upstream's outputs

# Two float32 programs that sum in another order; seen 3e-6 on outputs of about 3. The last layer's
# sinusoid (angles up to 1000) could make it 1e-4.
ABSOLUTE = 2e-5


def test_1_0_equals_upstream() -> None:
    model, io = golden("opensora_stdit_v1_0")
    for name, mask in (("output", io["mask"]), ("output_without_mask", None)):
        out = model(io["x"], io["timestep"], model.context(io["y"], mask))
        torch.testing.assert_close(out, io[name], atol=ABSOLUTE, rtol=0)


def test_1_2_equals_upstream() -> None:
    model, io = golden("opensora_stdit3_v1_2")
    context = model.context(io["y"], io["mask"])
    for name, x_mask in (("output", None), ("output_with_x_mask", io["x_mask"])):
        out = model(io["x"], io["timestep"], context, x_mask=x_mask, **video(io))
        torch.testing.assert_close(out, io[name], atol=ABSOLUTE, rtol=0)


@pytest.mark.parametrize("name", ["opensora_stdit_v1_0", "opensora_stdit3_v1_2"])
def test_float64_says_that_only_rounding_is_left(name: str) -> None:
    model, io = golden(name)
    kwargs = video(io) | ({"x_mask": io["x_mask"]} if "x_mask" in io else {})
    single = model(io["x"], io["timestep"], model.context(io["y"], io["mask"]), **kwargs)
    model.double()
    context = model.context(io["y"].double(), io["mask"])
    double = model(io["x"].double(), io["timestep"].double(), context, **kwargs)
    assert single.dtype == torch.float32
    assert double.dtype == torch.float64
    # The angle 999.5 * f has an error of 6e-5 in float32; everything else is far below.
    torch.testing.assert_close(single.double(), double, atol=1.5e-4, rtol=0)


# ---------------------------------------------------------------- names and counts


# 550 and 973 keys upstream, less two position tables and rope.freqs.
@pytest.mark.parametrize(
    ("config", "num_keys", "num_parameters"),
    [(STDiTConfig(), 548, 759_620_768), (STDiT3Config(), 972, 1_207_643_972 - 36)],
    ids=["1.0", "1.2"],
)
def test_released_sizes(
    config: STDiTConfig | STDiT3Config, num_keys: int, num_parameters: int
) -> None:
    with torch.device("meta"):
        model = build_model(config)
    state = model.state_dict()
    assert len(state) == num_keys
    # Upstream's counts are of parameters: y_embedding is a buffer there, rope.freqs (36) is none.
    null_text = state.pop("y_embedder.y_embedding")
    assert null_text.shape == (config.model_max_length, 4096)
    assert sum(tensor.numel() for tensor in state.values()) == num_parameters


def test_names_and_shapes_are_upstreams() -> None:
    for name in ("opensora_stdit_v1_0", "opensora_stdit3_v1_2"):
        model, _ = golden(name)
        upstream = load_file(GOLDEN / name / "weights.safetensors")
        expected = {k: v.shape for k, v in upstream.items() if k not in COMPUTED}
        assert {k: v.shape for k, v in model.state_dict().items()} == expected


# ---------------------------------------------------------------- texts

BOTH = pytest.mark.parametrize("kind", [STDiTConfig, STDiT3Config], ids=["1.0", "1.2"])


@BOTH
def test_a_ragged_batch_equals_one_by_one(kind: type) -> None:
    model = tiny(kind)
    x, text, t = randn(3, 4, 3, 4, 6), randn(3, 6, 12, seed=1), torch.tensor([9.0, 500.0, 999.0])
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 0, 0]])
    context = model.context(text, mask)
    assert context.mask is not None
    assert context.blocks[0].keys.shape == (3, 2, 4, 16)  # cut to the longest
    batch = call(model, x, t, context)
    for i in range(3):
        alone = model.context(text[i : i + 1, mask[i].bool()])
        assert alone.mask is None
        expected = call(model, x[i : i + 1], t[i : i + 1], alone)
        # float64: the same sums over other zeros.
        torch.testing.assert_close(batch[i : i + 1], expected, atol=1e-11, rtol=0)
        rows = call(model, x[i : i + 1], t[i : i + 1], context.rows(i, i + 1))
        torch.testing.assert_close(rows, expected, atol=1e-11, rtol=0)


@BOTH
def test_a_full_mask_and_upstreams_layout_change_nothing(kind: type) -> None:
    model, text = tiny(kind), randn(2, 6, 12)
    plain = model.context(text)
    for other in (model.context(text[:, None]), model.context(text, torch.ones(2, 6))):
        assert other.mask is None
        for a, b in zip(plain.blocks, other.blocks, strict=True):
            assert a.keys.equal(b.keys)
            assert a.values.equal(b.values)


@BOTH
@pytest.mark.parametrize("mask", [[[0] * 6, [1] * 6], [[0] * 6, [0] * 6]])
def test_an_empty_text_is_nothing_and_not_nan(kind: type, mask: list[list[int]]) -> None:
    model = tiny(kind)
    x, t = randn(2, 4, 2, 4, 4), torch.tensor([5.0, 5.0])
    outs = [
        call(model, x, t, model.context(randn(2, 6, 12, seed=seed), torch.tensor(mask)))
        for seed in (1, 2)
    ]
    assert outs[0].isfinite().all()
    assert outs[0][0].equal(outs[1][0])  # what lies under the mask does not matter
    assert outs[0][1].equal(outs[1][1]) == (mask[1] == [0] * 6)


@BOTH
def test_null_text_goes_the_way_of_texts(kind: type) -> None:
    model = tiny(kind)
    null = model.null_text()
    assert null.shape == (6, 12)
    context = model.context(null[None].expand(2, -1, -1), torch.tensor([[1, 1, 1, 0, 0, 0]] * 2))
    expected = model.context(null[None, :3])
    torch.testing.assert_close(
        context.blocks[1].values[1, :, :3], expected.blocks[1].values[0], atol=1e-12, rtol=0
    )


# ---------------------------------------------------------------- sizes


@BOTH
@pytest.mark.parametrize("size", [(1, 4, 4), (5, 3, 7), (15, 2, 2), (3, 1, 5)])
def test_any_size_runs_and_padding_is_cut_off(kind: type, size: tuple[int, int, int]) -> None:
    model, x, t = tiny(kind), randn(1, 4, *size), torch.tensor([250.0])
    context = model.context(randn(1, 6, 12))
    out = call(model, x, t, context)
    assert out.shape == (1, 8, *size)
    pad_h, pad_w = -size[1] % 2, -size[2] % 2
    padded = call(model, nn.functional.pad(x, (0, pad_w, 0, pad_h)), t, context)
    torch.testing.assert_close(out, padded[..., : size[1], : size[2]], atol=1e-12, rtol=0)


@BOTH
def test_other_channels_and_patches(kind: type) -> None:
    for patch in ((1, 1, 1), (2, 2, 3)):
        model = tiny(kind, in_channels=6, patch_size=patch, pred_sigma=False)
        out = call(model, randn(2, 6, 4, 4, 6), torch.tensor([1.0, 2.0]),
                   model.context(randn(2, 6, 12)))  # fmt: skip
        assert out.shape == (2, 6, 4, 4, 6)
        assert out.isfinite().all()


def test_a_patch_projection_is_the_convolution_upstream_uses() -> None:
    model = tiny(STDiT3Config)
    proj, x = model.x_embedder.proj, randn(2, 4, 3, 4, 6)
    expected = nn.functional.conv3d(x, proj.weight, proj.bias, stride=(1, 2, 2))
    torch.testing.assert_close(
        model.x_embedder(x), expected.flatten(3).permute(0, 2, 3, 1), atol=1e-12, rtol=0
    )


def test_1_0_positions_follow_the_scales() -> None:
    x, text, t = randn(1, 4, 3, 4, 4), randn(1, 6, 12), torch.tensor([100.0])
    outs = []
    for scales in ({}, {"space_scale": 0.5}, {"time_scale": 2 / 3}, {"input_size": (64, 8, 8)}):
        model = tiny(STDiTConfig, **scales)
        outs.append(model(x, t, model.context(text)))
    assert not torch.allclose(outs[0], outs[1])
    assert not torch.allclose(outs[0], outs[2])
    assert outs[0].equal(outs[3])  # the size that it was trained on is no part of the function


# ---------------------------------------------------------------- 1.2's conditions


def test_numbers_may_be_one_for_all_or_one_a_sample() -> None:
    model, x, t = tiny(STDiT3Config), randn(2, 4, 2, 4, 4), torch.tensor([10.0, 700.0])
    context = model.context(randn(2, 6, 12))
    one = model(x, t, context, fps=24, height=64, width=96)
    two = torch.tensor([24.0, 24.0])
    each = model(x, t, context, fps=two, height=two / 3 * 8, width=two * 4)
    assert one.equal(each)
    mixed = model(
        x, t, context, fps=torch.tensor([24, 8]), height=torch.tensor([64, 128]), width=96
    )
    assert mixed[0].equal(one[0])
    alone = model(x[1:], t[1:], context.rows(1, 2), fps=8, height=128, width=96)
    torch.testing.assert_close(mixed[1:], alone, atol=1e-12, rtol=0)
    assert not torch.allclose(mixed[1], one[1])


def test_an_x_mask_that_is_true_everywhere_is_none() -> None:
    model, x, t = tiny(STDiT3Config), randn(2, 4, 3, 4, 4), torch.tensor([10.0, 700.0])
    context = model.context(randn(2, 6, 12))
    expected = call(model, x, t, context)
    assert call(model, x, t, context, x_mask=torch.ones(2, 3, dtype=torch.bool)).equal(expected)
    given = torch.tensor([[True, True, True], [False, True, True]])
    out = call(model, x, t, context, x_mask=given)
    # A sample without given frames takes the masked path here, to the same numbers.
    torch.testing.assert_close(out[0], expected[0], atol=1e-12, rtol=0)
    assert not torch.allclose(out[1], expected[1])


def test_given_frames_do_not_look_at_the_timestep_themselves() -> None:
    """With attention in time silenced, a frame that is given gives the same at any timestep."""
    model, x = tiny(STDiT3Config, depth=1), randn(1, 4, 3, 4, 4)
    model.temporal_blocks[0].attn.proj.weight.zero_()
    # The quirk of the last layer modulates given frames with t first, and a norm follows: only a
    # table of zeros and t's part of it silenced would hide t from them, so look before it.
    seen: list[Tensor] = []
    model.final_layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    context, x_mask = model.context(randn(1, 6, 12)), torch.tensor([[False, True, True]])
    for t in (100.0, 900.0):
        call(model, x, torch.tensor([t]), context, x_mask=x_mask)
    torch.testing.assert_close(seen[0][:, 0], seen[1][:, 0], atol=1e-12, rtol=0)
    assert not torch.allclose(seen[0][:, 1], seen[1][:, 1])


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["opensora_stdit_v1_0", "opensora_stdit3_v1_2"])
def test_half_precision_keeps_its_stream_and_timesteps_in_float32(name: str, dtype: str) -> None:
    model, io = golden(name)
    cast_hooks.add_cast_hooks(model, Precision(parameters=dtype, compute=dtype))
    streams: list[torch.dtype] = []
    sinusoids: list[torch.dtype] = []
    for part, module in model.named_modules():
        if part.endswith(("norm1", "norm_final")):
            module.register_forward_pre_hook(lambda m, args: streams.append(args[0].dtype))
        if part.endswith("sinusoid"):
            module.register_forward_hook(lambda m, args, out: sinusoids.append(out.dtype))
    out = model(io["x"], io["timestep"], model.context(io["y"], io["mask"]), **video(io))
    assert out.dtype == torch.float32
    assert set(streams) == set(sinusoids) == {torch.float32}
    error = (out - io["output"]).norm() / io["output"].norm()
    # bfloat16 rounds to 2^-9 = 0.2 % a product, float16 to 2^-12; a rounded timestep gives 10 %.
    assert error < {"bfloat16": 2e-2, "float16": 3e-3}[dtype]


def test_a_timestep_is_not_rounded_to_the_parameters_dtype() -> None:
    model, _ = golden("opensora_stdit3_v1_2")
    cast_hooks.add_cast_hooks(model, Precision(parameters="bfloat16", compute="bfloat16"))
    embed = model.t_embedder
    assert not embed(torch.tensor([999.4])).equal(embed(torch.tensor([1000.0])))


# ---------------------------------------------------------------- training


@BOTH
def test_initialised_models_are_silent_reproducible_and_learn(kind: type) -> None:
    model = build_model(kind(**SIZES))
    initialise(model, torch.Generator().manual_seed(3))
    first = {name: value.clone() for name, value in model.state_dict().items()}
    initialise(model, torch.Generator().manual_seed(3))
    assert all(value.equal(first[name]) for name, value in model.state_dict().items())
    x, text, t = randn(2, 4, 2, 4, 4).float(), randn(2, 6, 12).float(), torch.tensor([9.0, 700.0])
    assert not call(model, x, t, model.context(text)).any()
    with torch.no_grad():  # open the layers that start at zero, so that every gradient shows
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    text[1] = model.null_text()
    call(model, x, t, model.context(text)).square().mean().backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


def test_gradients_are_right_with_norms_rotations_masks_and_given_frames() -> None:
    model = tiny(STDiT3Config, depth=1, hidden_size=8, num_heads=2, in_channels=1)
    text, mask = randn(1, 3, 12), torch.tensor([[1, 1, 0]])
    x_mask = torch.tensor([[False, True]])

    def loss(x: Tensor, text: Tensor) -> Tensor:
        context = model.context(text, mask)
        return call(model, x, torch.tensor([300.0]), context, x_mask=x_mask)

    x = randn(1, 1, 2, 2, 2).requires_grad_()
    assert torch.autograd.gradcheck(loss, (x, text.requires_grad_()))


# ---------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (2, 3, 2, 4, 4)}, "latents must be"),
        ({"x": (3, 4, 2, 4, 4)}, "3 latents, but texts for 2"),
        ({"t": (3,)}, "t must be one number or"),
        ({"text": (2, 6, 13)}, "text must be"),
        ({"mask": (2, 5)}, "text's mask must be"),
        ({"x_mask": (2, 3)}, "x_mask must be"),
        ({"height": 0.0}, "height must be one number above 0"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(
    change: dict[str, Any], message: str
) -> None:
    model = tiny(STDiT3Config)
    shapes = {"x": (2, 4, 2, 4, 4), "t": (2,), "text": (2, 6, 12), "mask": (2, 6), "x_mask": (2, 2)}
    given = {n: randn(*change.get(n, shape)).abs() for n, shape in shapes.items()}
    given["x_mask"] = given["x_mask"] > 1
    with pytest.raises(InputError, match=message):
        call(model, given["x"], given["t"], model.context(given["text"], given["mask"]),
             x_mask=given["x_mask"], height=change.get("height", 64))  # fmt: skip
