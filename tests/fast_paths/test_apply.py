"""Fast paths on a module: names stay, numbers stay but for rounding, plain without one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.families.opensora.config import STDiT3Config
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.fast_paths.apply import applies_to, apply_fast_paths, block_names, swap_modules
from everyframe.fast_paths.modules.fast_modules import LinearGelu, pairs
from everyframe.ops.attention import AttentionCore

CONFIG = STDiT3Config(
    hidden_size=32, depth=2, num_heads=2, caption_channels=16, model_max_length=8, in_channels=4
)


def build() -> STDiT3:
    torch.manual_seed(0)
    model = STDiT3(CONFIG).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.1)
    return model


def call(model: STDiT3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    text = torch.randn(1, 8, 16, generator=generator)
    x = torch.randn(1, 4, 3, 8, 8, generator=generator)
    with torch.inference_mode():
        context = model.context(text)
        out: Tensor = model(x, torch.tensor([500.0]), context, fps=24.0, height=64.0, width=64.0)
    return out


def test_blocks_are_the_items_of_lists() -> None:
    assert block_names(build()) == (
        "spatial_blocks.0", "spatial_blocks.1", "temporal_blocks.0", "temporal_blocks.1",
    )  # fmt: skip
    assert applies_to("linear-gelu", build())
    assert not applies_to("linear-gelu", nn.ModuleList([nn.Linear(2, 2), nn.GELU()]))


def test_a_fused_layer_keeps_its_names_and_its_numbers() -> None:
    plain, fast = build(), build()
    swap_modules(fast, ("linear-gelu",))
    assert list(fast.state_dict()) == list(plain.state_dict())
    mlp = fast.spatial_blocks[0].get_submodule("mlp")
    assert isinstance(mlp.get_submodule("fc1"), LinearGelu)
    # What is in no block is left alone: nobody tried it.
    assert type(fast.y_embedder.y_proj.fc1) is nn.Linear
    assert len(pairs(plain, block_names(plain))) == 4
    fast.load_state_dict(plain.state_dict())
    want = call(plain)
    # Another order of sums of 32 and 128 products, 4 blocks deep.
    torch.testing.assert_close(call(fast), want, atol=1e-4 * float(want.abs().max()), rtol=0)


def test_a_fused_layer_is_plain_where_there_is_no_such_kernel() -> None:
    layer = LinearGelu(nn.Linear(8, 4), "tanh").requires_grad_(False)
    x = torch.randn(3, 8)
    want = F.gelu(F.linear(x, layer.weight, layer.bias), approximate="tanh")
    # With gradients on, torch's operator has no derivative.
    assert layer(x).equal(want)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), want, atol=1e-6, rtol=1e-5)
        layer.weight.data = layer.weight.data.double()
        layer.bias.data = layer.bias.data.double()
        assert layer(x.double()).dtype == torch.float64


@pytest.mark.parametrize(("paths", "is_fused"), [((), False), (("attention-flash",), True)])
def test_attention_is_plain_unless_a_path_says_otherwise(
    paths: tuple[str, ...], is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = build(), []
    apply_fast_paths(model, paths)

    def forward(self: AttentionCore, *given: Tensor) -> Tensor:
        seen.append(torch.backends.cuda.flash_sdp_enabled())
        return right(self, *given)

    right = AttentionCore.forward
    monkeypatch.setattr(AttentionCore, "forward", forward)
    call(model)
    assert set(seen) == {is_fused}


def test_where_nobody_chose_nothing_is_put_on() -> None:
    model = build()
    swap_modules(model, None)
    apply_fast_paths(model, None)
    assert not any(part._forward_pre_hooks for part in model.modules())
