"""PEFT's configs: alpha and rank of each kind of adapter, DoRA, and values that nobody can use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from everyframe.adapters.patches import match_loras
from everyframe.core.errors import CheckpointError
from everyframe.core.lora import Lora
from everyframe.runtime.components.patchable import WeightTable
from helpers.loras import files as lora_files
from helpers.loras import layouts as lora_layouts
from helpers.loras.files import State, as_lora, factors_for, matched, merged, random, write

KEY = "blocks.0.attn1.to_q"

LOHA = {
    "hada_w1_a": random(24, 2, seed=1), "hada_w1_b": random(2, 24, seed=2),
    "hada_w2_a": random(24, 2, seed=3), "hada_w2_b": random(2, 24, seed=4),
}  # fmt: skip
WHOLE_LOKR = {"lokr_w1": random(4, 4, seed=1), "lokr_w2": random(6, 6, seed=2)}
LOKR = {
    "lokr_w1": random(4, 4, seed=1),
    "lokr_w2_a": random(6, 2, seed=2), "lokr_w2_b": random(2, 6, seed=3),
}  # fmt: skip


def _loha_delta() -> torch.Tensor:
    a, b, c, d = (each.double() for each in LOHA.values())
    return (a @ b) * (c @ d)


def _lokr_delta(factors: State) -> torch.Tensor:
    first, *second = (each.double() for each in factors.values())
    return torch.kron(first, second[0] if len(second) == 1 else second[0] @ second[1])


CONFIGS: dict[str, tuple[State, dict[str, Any], torch.Tensor]] = {
    "loha": (LOHA, {"peft_type": "LOHA", "r": 2, "alpha": 6}, _loha_delta() * 3),
    "lokr": (LOKR, {"peft_type": "LOKR", "r": 2, "alpha": 6}, _lokr_delta(LOKR) * 3),
    # PEFT scales a LoKr of whole factors too, by the rank of its config.
    "whole lokr": (
        WHOLE_LOKR, {"peft_type": "LOKR", "r": 8, "alpha": 4}, _lokr_delta(WHOLE_LOKR) / 2
    ),
    "lokr by pattern": (
        WHOLE_LOKR,
        {"r": 8, "alpha": 4, "rank_pattern": {"to_q": 2}, "alpha_pattern": {"attn1.to_q": 6}},
        _lokr_delta(WHOLE_LOKR) * 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_alpha_of_lycoris_kinds(name: str, tmp_path: Path) -> None:
    """PEFT calls it ``alpha`` in the configs of LoHa and LoKr."""
    factors, config, delta = CONFIGS[name]
    tensors = {f"base_model.model.{KEY}.{role}": each for role, each in factors.items()}
    path = write(tmp_path / "adapter_model.safetensors", tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    state = lora_files.state_of("wan")
    found = merged(matched(path, "wan"), state)[f"{KEY}.weight"]
    error = found.double() - (state[f"{KEY}.weight"].double() + delta)
    assert error.abs().max() < lora_layouts.LIMIT


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ('{"transformer.lora_alpha": 0}', "its lora_alpha is 0, expected"),
        ('{"transformer.lora_alpha": NaN}', "its lora_alpha is nan, expected"),
        ('{"transformer.lora_alpha": 1e999}', "its lora_alpha is inf, expected"),
        ('{"transformer.lora_alpha": "6"}', "its lora_alpha is '6', expected"),
        (f'{{"transformer.lora_alpha": 1{"0" * 400}}}', "its lora_alpha is 1000"),
        ('{"transformer.alpha_pattern": {"to_q": true}}', "its alpha_pattern is True, expected"),
        ('{"transformer.alpha_pattern": {"(a|a)*x": 2}}', "repeats a group, or more than 2 times"),
        ('{"transformer.alpha_pattern": {".*.*.*x": 2}}', "repeats a group, or more than 2 times"),
        ('{"transformer.alpha_pattern": {"a{99999999999}": 1}}', "can't be read: the repetition"),
        (
            '{"transformer.alpha_pattern": {"' + "(" * 5000 + ")" * 5000 + '": 1}}',
            "can't be read: maximum recursion",
        ),
        (
            '{"transformer.lora_alpha": 3, "transformer.init_lora_weights": "pissa_niter_4"}',
            "its factors began as 'pissa_niter_4', which changes the base weights too",
        ),
    ],
)
def test_a_value_that_nobody_can_use_is_named(config: str, text: str, tmp_path: Path) -> None:
    tensors = as_lora(factors_for(lora_files.state_of("wan"), [KEY]), "transformer.")
    path = write(tmp_path / "bad.safetensors", tensors, {"lora_adapter_metadata": config})
    with pytest.raises(CheckpointError) as caught:
        matched(path, "wan")
    assert text in str(caught.value)
    assert "bad.safetensors" in str(caught.value)


def test_dora_of_a_convolution(tmp_path: Path) -> None:
    """PEFT has (1, out, 1, 1) for each output channel, LyCORIS the same for each input channel."""
    weight = random(6, 6, 3, 3, seed=1)
    down, up = random(2, 6, 3, 3, seed=2), random(6, 2, 1, 1, seed=3)
    magnitude = random(1, 6, 1, 1, seed=4).abs() + 0.5
    new = weight.double() + (up.flatten(1).double() @ down.flatten(1).double()).view(6, 6, 3, 3)
    columns = torch.linalg.vector_norm(new, dim=(0, 2, 3), keepdim=True)
    rows = torch.linalg.vector_norm(new, dim=(1, 2, 3), keepdim=True)
    wanted = {
        "lora_magnitude_vector": new * magnitude.transpose(0, 1) / rows,
        "lora_magnitude_vector.weight": new * magnitude.transpose(0, 1) / rows,
        "dora_scale": new * magnitude / columns,
    }
    table = WeightTable("UNet", {"conv.weight": (6, 6, 3, 3)}, is_denoiser=True)
    for name, each in wanted.items():
        path = write(
            tmp_path / f"{name}.safetensors",
            {"conv.lora_A.weight": down, "conv.lora_B.weight": up, f"conv.{name}": magnitude},
        )
        found = match_loras([Lora(str(path))], {"unet": table}, "a UNet")
        patched = found.patches["unet"]["conv.weight"](weight)
        assert (patched.double() - each).abs().max() < lora_layouts.LIMIT, name


def test_dora_of_a_channel_of_zeros(tmp_path: Path) -> None:
    """It has no direction; it stays zero and does not become NaN."""
    weight = random(4, 4, seed=1)
    weight[2] = 0
    up = random(4, 2, seed=3)
    up[2] = 0
    table = WeightTable("UNet", {"layer.weight": (4, 4)}, is_denoiser=True)
    path = write(
        tmp_path / "lora.safetensors",
        {
            "layer.lora_A.weight": random(2, 4, seed=2), "layer.lora_B.weight": up,
            "layer.lora_magnitude_vector": torch.tensor([1.0, 2.0, 0.0, 3.0]),
        },
    )  # fmt: skip
    found = match_loras([Lora(str(path))], {"unet": table}, "a UNet")
    patched = found.patches["unet"]["layer.weight"](weight)
    assert torch.equal(patched[2], torch.zeros(4))
    assert torch.allclose(patched.norm(dim=1), torch.tensor([1.0, 2.0, 0.0, 3.0]))
