"""Casts at module edges: planted clashes, islands, foreign modules unchanged, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from everyframe.core.errors import InputError
from everyframe.core.plan import Precision
from everyframe.ops.norm import widen_norms
from everyframe.precision.cast_hooks import add_cast_hooks

FP32 = Precision("float32", "float32")
BF16 = Precision("bfloat16", "bfloat16")
FP16 = Precision("float16", "float16")


class Residual(nn.Module):
    """A stream with a branch and a table that belongs to no layer, as transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.branch = nn.Linear(8, 8)
        self.table = nn.Parameter(torch.ones(8))
        self.register_buffer("positions", torch.linspace(0, 1, 8))
        self.seen: list[torch.dtype] = []

    def forward(self, x_BC: Tensor) -> Tensor:
        x_BC = self.first(x_BC) + self.positions
        x_BC = x_BC + self.table * self.branch(input=self.norm(x_BC))
        self.seen.append(x_BC.dtype)
        return x_BC


def relative_error(got: Tensor, true: Tensor) -> float:
    return ((got.double() - true.double()).norm() / true.double().norm()).item()


def test_a_planted_clash_fails_without_and_passes_with() -> None:
    """imaginAIry's time_embed: fp16 weights, a float32 embedding made by the caller."""
    planted = nn.Sequential(nn.Linear(8, 8).half(), nn.Linear(8, 8).half())
    with pytest.raises(RuntimeError, match="same dtype"):
        planted(torch.ones(2, 8))
    add_cast_hooks(planted, FP16)
    assert planted(torch.ones(2, 8)).dtype == torch.float32


def test_the_stream_stays_float32_and_branches_are_narrow() -> None:
    model = Residual()
    narrow = []
    model.branch.register_forward_hook(lambda m, a, out: narrow.append(out.dtype))
    add_cast_hooks(model, BF16, outputs=())
    assert model(torch.ones(2, 8)).dtype == torch.float32
    assert narrow == [torch.bfloat16]  # given as a keyword, too


def test_islands_and_buffers_stay_float32() -> None:
    model = Residual()
    add_cast_hooks(model, Precision("float16", "float16", islands=("norm", "table")))
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert dtypes["norm.weight"] == dtypes["table"] == dtypes["positions"] == torch.float32
    assert dtypes["branch.weight"] == dtypes["first.bias"] == torch.float16
    seen = []
    model.norm.register_forward_hook(lambda m, args, out: seen.append(args[0].dtype))
    model(torch.ones(2, 8))
    assert seen == [torch.float32]


def test_float32_costs_nothing() -> None:
    model = Residual().half()
    edges = add_cast_hooks(model, FP32)
    assert edges.num_hooks == 0
    assert not any(part._forward_pre_hooks for part in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model(torch.ones(2, 8))


def test_float64_models_work() -> None:
    model = Residual()
    add_cast_hooks(model, Precision("float64", "float64", islands=("norm",)))
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model(torch.ones(2, 8).double()).dtype == torch.float64


def test_hooks_are_removed() -> None:
    model = Residual()
    edges = add_cast_hooks(model, BF16)
    assert edges.num_hooks == 4  # first, norm, branch, and the module's own output
    edges.remove()
    edges.remove()
    assert edges.num_hooks == 0
    assert not any(p._forward_pre_hooks or p._forward_hooks for p in model.modules())
    with pytest.raises(RuntimeError, match="same dtype"):
        model(torch.ones(2, 8))


def test_twice_is_an_error() -> None:
    model = nn.Sequential(Residual())
    add_cast_hooks(model[0], BF16)
    with pytest.raises(InputError, match="already"):
        add_cast_hooks(model, BF16)


@pytest.mark.parametrize(
    ("precision", "outputs", "message"),
    [
        (Precision("float16", "float32"), ("",), "must be the same"),
        (Precision("float16", "float16", islands=("tabel",)), ("",), "'tabel' matches no part"),
        (Precision("float16", "float16", islands=("norm.weight",)), ("",), "cuts 'norm' in two"),
        (FP16, ("decoder",), "'decoder' is no part of this Residual"),
    ],
)
def test_what_is_refused(precision: Precision, outputs: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        add_cast_hooks(Residual(), precision, outputs)


def test_tied_parameters_follow_their_island() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(4, 8), "b": nn.Embedding(4, 8)})
    model["b"].weight = model["a"].weight
    add_cast_hooks(model, Precision("float16", "float16", islands=("b",)))
    assert model["a"].weight is model["b"].weight
    assert model["a"].weight.dtype == torch.float32


class Pair(NamedTuple):
    left: Tensor
    right: int


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: (x, 3), lambda out: out[0]),
        (lambda x: {"x": [x]}, lambda out: out["x"][0]),
        (lambda x: Pair(x, 3), lambda out: out.left),
    ],
)
def test_results_are_widened_where_they_are(
    wrap: Callable[[Tensor], object], unwrap: Callable[[object], Tensor]
) -> None:
    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x_BC: Tensor) -> object:
            return wrap(self.linear(x_BC))

    model = Wraps()
    add_cast_hooks(model, BF16)
    result = model(torch.ones(2, 8))
    assert type(result) is type(wrap(torch.ones(1)))
    assert unwrap(result).dtype == torch.float32


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Conv3d(4, 4, 3), (torch.ones(1, 4, 4, 4, 4),)),
        (nn.GroupNorm(2, 4), (torch.ones(1, 4, 4, 4),)),
        (nn.RMSNorm(8), (torch.ones(2, 8),)),
        (nn.Embedding(4, 8), (torch.tensor([1, 2]),)),
        (nn.MultiheadAttention(8, 2, batch_first=True), (torch.ones(1, 3, 8),) * 3),
        (nn.GRU(8, 8), (torch.ones(3, 1, 8),)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_kind_of_layer(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    add_cast_hooks(nn.Sequential(layer), BF16, outputs=())
    result = layer(*inputs)
    first = result if isinstance(result, Tensor) else result[0]
    assert first.dtype == torch.bfloat16
    assert first.isfinite().all()


def test_batch_norms_stay_with_their_statistics() -> None:
    layer = nn.BatchNorm2d(4).eval()
    add_cast_hooks(nn.Sequential(layer), BF16, outputs=())
    assert layer(torch.ones(1, 4, 4, 4, dtype=torch.bfloat16)).dtype == torch.float32


@torch.no_grad()
def test_t5_as_it_comes() -> None:
    """transformers' own encoder, `wo` in float32 behind bf16; half of the prompt is padding."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=100,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=4,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    model = T5EncoderModel(config).eval()
    ids = torch.randint(1, 100, (2, 12))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 6:] = 0
    true = model(input_ids=ids, attention_mask=mask).last_hidden_state
    islands = ("*.wo", "shared", "*layer_norm")
    add_cast_hooks(model, Precision("bfloat16", "bfloat16", islands=islands))
    result = model(input_ids=ids, attention_mask=mask)
    assert result.last_hidden_state.dtype == torch.float32
    # Weights alone are off by 2**-9 of themselves (0.17 % rms); a few layers of that, uncorrelated.
    assert 1e-4 < relative_error(result.last_hidden_state[0], true[0]) < 1.5e-2
    assert relative_error(result.last_hidden_state[1, :6], true[1, :6]) < 1.5e-2


@torch.no_grad()
@pytest.mark.parametrize("islands", [(), ("decoder.conv_in", "decoder.conv_out")])
def test_autoencoder_as_it_comes(islands: tuple[str, ...]) -> None:
    """diffusers' AutoencoderKL through encode and decode, which are no calls of the module."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    model = AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
    ).eval()
    image = torch.randn(1, 3, 32, 32)
    latents = torch.randn(1, 4, 16, 16)
    true_mode = model.encode(image).latent_dist.mode()
    true_frame = model.decode(latents).sample
    add_cast_hooks(
        model, Precision("bfloat16", "bfloat16", islands), outputs=("quant_conv", "decoder")
    )
    mode = model.encode(image).latent_dist.mode()
    frame = model.decode(latents).sample
    assert mode.dtype == frame.dtype == torch.float32
    # About twenty bf16 roundings in a row on the way, each 0.17 % rms, and a small last layer.
    assert 1e-4 < relative_error(frame, true_frame) < 2e-2
    assert 1e-4 < relative_error(mode, true_mode) < 2e-2


def test_wide_norms_are_not_given_another_dtype_at_their_edges() -> None:
    """Their parameters are float32, and what comes in stays as narrow as it is."""
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    widen_norms(module)
    hooks = add_cast_hooks(module, Precision("bfloat16", "bfloat16", ("1",)))
    seen: list[torch.dtype] = []
    module[1].register_forward_hook(
        lambda _, given, answer: seen.extend((given[0].dtype, answer.dtype))
    )
    assert module(torch.ones(2, 8)).dtype == torch.float32
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert module[1].weight.dtype == torch.float32
    assert hooks.num_hooks == 3  # two layers' inputs, and the answer
