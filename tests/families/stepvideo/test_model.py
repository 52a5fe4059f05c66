"""Step-Video's denoiser: its tensors' names and number, ragged texts, long rows, pieces, bfloat16.

That its arithmetic is upstream's is held by the golden folders (`tests/golden`).
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.plan import Precision
from everyframe.families.stepvideo import layers
from everyframe.families.stepvideo.components import DENOISER_ISLANDS
from everyframe.families.stepvideo.config import StepLLMConfig, StepVideoModelConfig
from everyframe.families.stepvideo.llm import StepLLM
from everyframe.families.stepvideo.model import StepVideoModel
from everyframe.ops.rope import axes_table, rotate_axes
from everyframe.precision import cast_hooks
from everyframe.runtime.components.meta_init import build_on_meta, count_elements

TINY = StepVideoModelConfig(
    num_attention_heads=3,
    attention_head_dim=16,
    in_channels=4,
    out_channels=4,
    num_layers=2,
    caption_channels=(12, 10),
)


def tiny(seed: int = 0, config: StepVideoModelConfig = TINY) -> StepVideoModel:
    """A model whose every parameter is drawn."""
    torch.manual_seed(seed)
    model = StepVideoModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3 if "table" in name else 0.2)
    return model.eval().requires_grad_(False)


def texts(batch: int, llm: int = 9, clip: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(batch, llm, 12), torch.randn(batch, clip, 10)


def prefix(lengths: list[int], size: int) -> Tensor:
    return (torch.arange(size) < torch.tensor(lengths)[:, None]).long()


# Read off the published checkpoint by others; the shape of each is in the architecture's notes.
NAMES = r"""
pos_embed\.proj\.(weight|bias)
adaln_single\.emb\.timestep_embedder\.linear_[12]\.(weight|bias)
adaln_single\.linear\.(weight|bias)
caption_projection\.linear_[12]\.(weight|bias)
clip_projection\.(weight|bias)
transformer_blocks\.\d+\.scale_shift_table
transformer_blocks\.\d+\.norm[12]\.(weight|bias)
transformer_blocks\.\d+\.attn1\.(wqkv|wo|q_norm|k_norm)\.weight
transformer_blocks\.\d+\.attn2\.(wq|wkv|wo|q_norm|k_norm)\.weight
transformer_blocks\.\d+\.ff\.net\.(0\.proj|2)\.weight
scale_shift_table
proj_out\.(weight|bias)
"""


def test_names_and_number_of_tensors_are_upstream_s() -> None:
    found = count_elements(build_on_meta(lambda: StepVideoModel(StepVideoModelConfig())))
    patterns = NAMES.split()
    for name in found:
        assert any(re.fullmatch(pattern, name) for pattern in patterns), name
    for pattern in patterns:
        assert any(re.fullmatch(pattern, name) for name in found), pattern
    assert len(found) == 2 + 4 + 2 + 4 + 2 + 48 * (1 + 4 + 4 + 5 + 2) + 1 + 2
    # Its six files of bfloat16 are 58.7 GB.
    assert 2 * sum(found.values()) == pytest.approx(58.7e9, rel=1e-3)


def test_number_of_step_llm_s_parameters() -> None:
    found = count_elements(build_on_meta(lambda: StepLLM(StepLLMConfig())))
    assert sum(found.values()) == pytest.approx(19.58e9, rel=1e-3)  # 39.16 GB of bfloat16


def test_each_row_of_a_ragged_batch_is_as_alone() -> None:
    """Also where a row is cut, and whatever its padding says: float64, so nothing but order."""
    model = tiny().double()
    llm, clip = (each.double() for each in texts(3))
    lengths = [12, 5, 3]  # the last has CLIP's tokens alone
    mask = prefix(lengths, 12)
    x = torch.randn(3, 4, 2, 3, 2, dtype=torch.float64)
    t = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    together = model(x, t, model.context(llm, clip, mask))
    noisy = llm.clone()
    noisy[1, 2:] = 1e3
    assert torch.equal(together, model(x, t, model.context(noisy, clip, mask)))
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        context = model.context(llm[one, : length - 3], clip[one], prefix([length], length))
        assert context.mask is None
        torch.testing.assert_close(
            together[one], model(x[one], t[one], context), rtol=0, atol=1e-12
        )


def test_only_the_number_of_tokens_in_a_row_counts() -> None:
    model = tiny()
    llm, clip = texts(1)
    scattered = torch.tensor([[1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0]])
    a, b = (model.context(llm, clip, mask) for mask in (scattered, prefix([5], 12)))
    assert torch.equal(a.blocks[1].keys, b.blocks[1].keys)
    assert a.blocks[0].keys.shape[2] == 5


@pytest.mark.parametrize("length", [257, 259, 397])
def test_masks_beyond_256_tokens_are_summed_exactly(length: int) -> None:
    """bfloat16 has no odd number there: upstream drops a token or takes in a pad."""
    assert int(prefix([length], 400).to(torch.bfloat16).sum()) != length
    model = tiny()
    llm, clip = texts(1, llm=397)
    assert model.context(llm, clip, prefix([length], 400)).blocks[0].keys.shape[2] == length


def test_a_row_without_any_token_attends_to_nothing() -> None:
    model = tiny()
    llm, clip = texts(2)
    context = model.context(llm, clip, prefix([0, 4], 12))
    out = model(torch.randn(2, 4, 1, 2, 2), torch.full((2,), 0.5), context)
    assert torch.isfinite(out).all()
    assert torch.equal(context.blocks[0].values[0], torch.zeros_like(context.blocks[0].values[0]))


def test_a_model_without_clip() -> None:
    config = StepVideoModelConfig.from_json({
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": None,
        "num_layers": 1, "caption_channels": 12,
    })  # fmt: skip
    model = tiny(config=config)
    llm, clip = texts(1)
    out = model(
        torch.randn(1, 4, 1, 2, 2), torch.zeros(1), model.context(llm, None, prefix([4], 9))
    )
    assert out.shape == (1, 4, 1, 2, 2)
    with pytest.raises(InputError, match=r"texts must be \(batch, tokens, 12\), got"):
        model.context(llm, clip, prefix([4], 12))


def test_a_feed_forward_in_pieces_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny().double()
    llm, clip = (each.double() for each in texts(1))
    context = model.context(llm, clip, prefix([12], 12))
    x, t = torch.randn(1, 4, 2, 3, 2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    whole = model(x, t, context)
    monkeypatch.setattr(layers, "_TOKENS_AT_ONCE", 5)
    torch.testing.assert_close(model(x, t, context), whole, rtol=0, atol=1e-12)


def test_bfloat16_keeps_stream_angles_and_modulation_wide() -> None:
    model, wide = tiny(), tiny()
    precision = Precision("bfloat16", "bfloat16", DENOISER_ISLANDS)
    cast_hooks.add_cast_hooks(model, precision)
    assert model.transformer_blocks[0].attn1.wqkv.weight.dtype == torch.bfloat16
    seen: dict[str, torch.dtype] = {}

    def note(name: str, part: torch.nn.Module) -> None:
        def hook(_: object, __: object, out: object) -> None:
            seen[name] = _dtype(out)

        part.register_forward_hook(hook)

    for name in ("rope", "adaln_single", "transformer_blocks.0", "transformer_blocks.1.modulation"):
        note(name, model.get_submodule(name))
    llm, clip = texts(2)
    mask = prefix([12, 7], 12)
    x, t = torch.randn(2, 4, 3, 4, 4), torch.tensor([0.3, 0.31])
    got = model(x, t, model.context(llm, clip, mask))
    assert set(seen.values()) == {torch.float32}
    want = wide(x, t, wide.context(llm, clip, mask))
    # bfloat16 keeps 8 bits: a product is off by 4e-3 at most, and errors of branches average out.
    assert float((got - want).norm() / want.norm()) < 0.03


def _dtype(out: object) -> torch.dtype:
    first = out[0] if isinstance(out, tuple) else out
    assert isinstance(first, Tensor)
    return first.dtype


def test_rotations_depend_on_distances_alone() -> None:
    """And not on the place itself, along each axis by its own channels: what rope is for."""
    torch.manual_seed(3)
    widths, sizes = (8, 4, 4), (5, 4, 3)
    table = axes_table(sizes, widths, dtype=torch.float64)
    q, k = torch.randn(2, 16, dtype=torch.float64)
    turned_q, turned_k = (
        rotate_axes(each.expand(60, 16), table).reshape(*sizes, 16) for each in (q, k)
    )
    for axis, width in enumerate(widths):
        start = sum(widths[:axis])
        part = slice(start, start + width)
        scores = [
            float(turned_q[_at(axis, i)][part] @ turned_k[_at(axis, i + 1)][part])
            for i in range(sizes[axis] - 1)
        ]
        assert scores == pytest.approx([scores[0]] * len(scores), abs=1e-12)
        apart = float(turned_q[_at(axis, 0)][part] @ turned_k[_at(axis, 2)][part])
        assert abs(apart - scores[0]) > 1e-3
    assert torch.equal(turned_q[0, 0, 0], q)


def _at(axis: int, place: int) -> tuple[int, int, int]:
    at = [1, 1, 1]
    at[axis] = place
    return at[0], at[1], at[2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"norm_type": "layer_norm"}, "norm_type otherwise than to 'ada_norm_single'"),
        ({"use_additional_conditions": True}, "use_additional_conditions"),
        ({"num_layer": 3}, "unknown key: 'num_layer'.*num_layers"),
        ({"num_layers": 0}, "num_layers must be a whole number above 0, got 0"),
        ({"caption_channels": [1, 2, 3]}, "one number .* or two"),
        ({"rope_ch_split": [64, 32, 31]}, "128 channels must be split"),
        ({"norm_eps": 0}, "norm_eps must be a number above 0"),
    ],
)
def test_a_wrong_config_is_reported(change: dict[str, object], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        StepVideoModelConfig.from_json({"_class_name": "StepVideoModel", **change})


@pytest.mark.parametrize(
    ("x", "t", "says"),
    [
        ((1, 3, 1, 2, 2), (1,), r"latents must be \(batch, 4, frames, rows, columns\)"),
        ((1, 4, 1, 2, 2), (2,), "as many timesteps and texts"),
        ((2, 4, 1, 2, 2), (2,), "as many timesteps and texts"),
    ],
)
def test_wrong_shapes_are_reported(x: tuple[int, ...], t: tuple[int, ...], says: str) -> None:
    model = tiny()
    llm, clip = texts(1)
    context = model.context(llm, clip, prefix([12], 12))
    with pytest.raises(InputError, match=says):
        model(torch.zeros(x), torch.zeros(t), context)
    with pytest.raises(InputError, match=r"mask must be \(1, 12\), CLIP's tokens first"):
        model.context(llm, clip, prefix([9], 9))


def test_the_released_sizes_are_built_without_memory() -> None:
    model = build_on_meta(lambda: StepVideoModel(StepVideoModelConfig()))
    assert model.config.split == (64, 32, 32)
    assert next(model.parameters()).is_meta
