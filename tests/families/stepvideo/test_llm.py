"""Step-LLM against its formula written out, its three biases, and padding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from everyframe.core.errors import CheckpointError
from everyframe.families.stepvideo.config import StepLLMConfig
from everyframe.families.stepvideo.llm import Bias, StepLLM, causal_bias, slopes

TINY = StepLLMConfig(
    hidden_size=24,
    num_attention_heads=6,
    num_attention_groups=2,
    num_layers=2,
    ffn_hidden_size=20,
    padded_vocab_size=40,
)


def tiny(bias: Bias = Bias.SQRT) -> StepLLM:
    torch.manual_seed(0)
    model = StepLLM(TINY, bias)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval().requires_grad_(False)


def written_out(model: StepLLM, ids: Tensor) -> Tensor:
    """One row, token by token and head by head: no attention kernel, no bias table."""

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    x = model.tok_embeddings.word_embeddings.weight[ids]
    heads, groups, d = 6, 2, 4
    slope = [2.0 ** (-8 * h / 4) for h in (1, 2, 3, 4)] + [2.0**-1, 2.0**-3]
    for layer in model.transformer.layers:
        qkv = rms(x, layer.attention_norm.weight) @ layer.attention.wqkv.weight.T
        made = torch.zeros(len(ids), heads * d, dtype=x.dtype)
        for h in range(heads):
            at = heads * d + (h // (heads // groups)) * 2 * d
            for i in range(len(ids)):
                q = qkv[i, h * d : (h + 1) * d]
                scores = [
                    float(q @ qkv[j, at : at + d]) / math.sqrt(d) - slope[h] * math.sqrt(i - j)
                    for j in range(i + 1)
                ]
                weights = torch.tensor(scores, dtype=x.dtype).softmax(0)
                made[i, h * d : (h + 1) * d] = weights @ qkv[: i + 1, at + d : at + 2 * d]
        x = x + made @ layer.attention.wo.weight.T
        gate, value = (rms(x, layer.ffn_norm.weight) @ layer.feed_forward.w1.weight.T).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * value) @ layer.feed_forward.w2.weight.T
    return x


def test_it_is_the_formula() -> None:
    model = tiny().double()
    ids = torch.tensor([1, 17, 4, 33, 9, 2])
    # The bias is kept in float32, to which it is exact.
    torch.testing.assert_close(model(ids[None])[0], written_out(model, ids), rtol=0, atol=1e-6)


def test_padding_changes_nothing_before_it() -> None:
    model = tiny()
    a, b = torch.tensor([[1, 5, 6, 2, 2, 2]]), torch.tensor([[1, 5, 6, 2, 9, 30]])
    assert torch.equal(model(a)[:, :4], model(b)[:, :4])


def test_slopes_of_the_released_number_of_heads() -> None:
    """48: the series of 32, then every other of the series of 64."""
    found = slopes(48)
    assert found[:32].tolist() == pytest.approx([2 ** (-8 * h / 32) for h in range(1, 33)])
    assert found[32:].tolist() == pytest.approx([2 ** (-8 * h / 64) for h in range(1, 32, 2)])


@pytest.mark.parametrize(
    ("kind", "far"), [(Bias.SQRT, -2.0), (Bias.LINEAR, -4.0), (Bias.NONE, 0.0)]
)
def test_biases_by_name(kind: Bias, far: float) -> None:
    bias = causal_bias(8, 5, kind)
    assert bias[0, 4, 0] == 0.5 * far
    assert bias[0, 0, 0] == 0
    assert bias[0, 0, 1] == -math.inf
    ids = torch.tensor([[1, 7, 7, 8, 2]])
    others = [tiny(other)(ids) for other in Bias if other is not kind]
    assert all(not torch.allclose(tiny(kind)(ids), other, atol=1e-3) for other in others)


def test_sizes_must_be_given_and_fit() -> None:
    sizes = {
        "hidden_size": 24, "num_attention_heads": 6, "num_attention_groups": 2, "num_layers": 2,
        "ffn_hidden_size": 20, "padded_vocab_size": 40, "layernorm_epsilon": 1e-5,
        "some_switch_of_training": True,
    }  # fmt: skip
    assert StepLLMConfig.from_json(sizes) == TINY
    with pytest.raises(CheckpointError, match="lacks 'num_layers'"):
        StepLLMConfig.from_json({k: v for k, v in sizes.items() if k != "num_layers"})
    with pytest.raises(CheckpointError, match="num_attention_groups must divide"):
        StepLLMConfig.from_json({**sizes, "num_attention_groups": 4})
