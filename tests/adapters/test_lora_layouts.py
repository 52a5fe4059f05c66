"""Each layout of LoRA files gives the weights that merging by hand in float64 gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everyframe.adapters.lora_file import lora_digest
from helpers.loras import files as lora_files
from helpers.loras import layouts as lora_layouts
from helpers.loras.files import (
    Factors,
    as_lora,
    factors_for,
    hand_merged,
    largest_error,
    matched,
    merged,
)
from helpers.loras.original_names import ORIGINAL

MODELS = ("wan", "wan_of_a_picture", "ltx", "hunyuan", "cogvideox", "mochi")


@pytest.mark.parametrize("name", lora_layouts.LAYOUTS)
def test_weights_are_those_merged_by_hand(name: str, tmp_path: Path) -> None:
    found, notes = lora_layouts.here(name, tmp_path)
    assert largest_error(found, lora_layouts.wanted(name)) < lora_layouts.LIMIT
    changed = lora_layouts.made(name).wanted
    before = lora_files.state_of(lora_layouts.MODEL)
    assert all(not torch.equal(found[key], before[key]) for key in changed)
    assert all(torch.equal(found[key], before[key]) for key in set(before) - set(changed))
    assert len(notes) == (name == "k_img")


def test_a_left_out_module_is_reported(tmp_path: Path) -> None:
    _, (note,) = lora_layouts.here("k_img", tmp_path)
    assert "4 modules for attention to a picture are left out" in note
    assert "LightX2V/issues/417" in note


@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "transformer."])
@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_by_original_names(
    name: str, prefix: str, is_flat: bool, tmp_path: Path
) -> None:
    """Factors of each original layer, also of one that holds several of diffusers'."""
    original = lora_files.original_state(name)
    factors = factors_for(original, lora_files.matrices(original), alpha=2.0)
    start = "lora_unet_" if is_flat else prefix
    path = lora_files.write(tmp_path / "lora.safetensors", as_lora(factors, start, is_flat=is_flat))
    merged_original = {**original, **hand_merged(original, factors)}
    found = merged(matched(path, name), lora_files.state_of(name))
    again = ORIGINAL[name.split("_")[0]](found)
    assert largest_error(again, merged_original) < lora_layouts.LIMIT
    assert all(
        not torch.equal(again[f"{key}.weight"], original[f"{key}.weight"]) for key in factors
    )


@pytest.mark.parametrize("prefix", ["transformer.", "", "base_model.model."])
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_by_diffusers_names(name: str, prefix: str, tmp_path: Path) -> None:
    state = lora_files.state_of(name)
    factors = factors_for(state, lora_files.matrices(state))
    path = lora_files.write(tmp_path / "lora.safetensors", as_lora(factors, prefix))
    found = merged(matched(path, name), state)
    assert largest_error(found, {**state, **hand_merged(state, factors)}) < lora_layouts.LIMIT


def test_every_bias_norm_and_table_by_original_names(tmp_path: Path) -> None:
    """Differences of all vectors of HunyuanVideo, whose rows change their places."""
    original = lora_files.original_state("hunyuan")
    tensors, wanted = {}, dict(original)
    for number, (key, tensor) in enumerate(original.items()):
        if tensor.ndim > 1:
            continue
        change = lora_files.random(*tensor.shape, seed=number)
        stem, _, kind = key.rpartition(".")
        tensors[f"{stem}.diff" if kind == "weight" else f"{stem}.diff_b"] = change
        wanted[key] = tensor.double() + change.double()
    path = lora_files.write(tmp_path / "lora.safetensors", tensors)
    found = merged(matched(path, "hunyuan"), lora_files.state_of("hunyuan"))
    assert largest_error(ORIGINAL["hunyuan"](found), wanted) < lora_layouts.LIMIT


@pytest.mark.parametrize("kind", ["loha", "lokr", "dora", "diff"])
def test_kinds_on_a_layer_that_holds_several(kind: str, tmp_path: Path) -> None:
    """Rows of an original layer go where its rows are, whatever makes them."""
    original, key = lora_files.original_state("hunyuan"), "double_blocks.0.img_attn_qkv"
    weight = original[f"{key}.weight"]
    rows, columns = weight.shape
    random = lora_files.random
    tensors = {
        "loha": {
            "hada_w1_a": random(rows, 2, seed=1), "hada_w1_b": random(2, columns, seed=2),
            "hada_w2_a": random(rows, 2, seed=3), "hada_w2_b": random(2, columns, seed=4),
        },
        "lokr": {"lokr_w1": random(6, 4, seed=1), "lokr_w2": random(rows // 6, 5, seed=2)},
        "dora": {
            "lora_A.weight": random(2, columns, seed=1), "lora_B.weight": random(rows, 2, seed=2),
            "dora_scale": random(rows, 1, seed=3).abs() + 0.5,
        },
        "diff": {"diff": random(rows, columns, seed=1)},
    }[kind]  # fmt: skip
    wide = {name: each.double() for name, each in tensors.items()}
    if kind == "loha":
        change = (wide["hada_w1_a"] @ wide["hada_w1_b"]) * (wide["hada_w2_a"] @ wide["hada_w2_b"])
    elif kind == "lokr":
        change = torch.kron(wide["lokr_w1"], wide["lokr_w2"])
    elif kind == "dora":
        new = weight.double() + wide["lora_B.weight"] @ wide["lora_A.weight"]
        change = new * wide["dora_scale"] / new.norm(dim=1, keepdim=True) - weight.double()
    else:
        change = wide["diff"]
    path = lora_files.write(
        tmp_path / "lora.safetensors", {f"{key}.{name}": each for name, each in tensors.items()}
    )
    found = merged(matched(path, "hunyuan"), lora_files.state_of("hunyuan"))
    wanted = {**original, f"{key}.weight": weight.double() + change}
    assert largest_error(ORIGINAL["hunyuan"](found), wanted) < lora_layouts.LIMIT


def test_tucker_factors_of_a_kernel(tmp_path: Path) -> None:
    """A kernel (24, 16, 1, 2, 2) by a core and two factors, of LoCon, LoHa and LoKr."""
    state, random = lora_files.state_of("wan"), lora_files.random
    weight = state["patch_embedding.weight"]
    out, inner, *kernel = weight.shape
    core, core2 = random(2, 2, *kernel, seed=1), random(2, 2, *kernel, seed=2)
    a, b = random(2, out, seed=3), random(2, inner, seed=4)
    one = torch.einsum("ijtkl,ip,jq->pqtkl", core.double(), a.double(), b.double())
    two = torch.einsum("ijtkl,ip,jq->pqtkl", core2.double(), a.double(), b.double())
    half = a[:, : out // 2]
    w2 = torch.einsum("ijtkl,ip,jq->pqtkl", core.double(), half.double(), b.double())
    w1 = random(2, 1, seed=5)
    files = {
        "locon": (
            {
                "lora_up.weight": a.T.reshape(out, 2, 1, 1, 1), "lora_mid.weight": core,
                "lora_down.weight": b.reshape(2, inner, 1, 1, 1),
            },
            one,
        ),
        "loha": (
            {
                "hada_t1": core, "hada_w1_a": a, "hada_w1_b": b,
                "hada_t2": core2, "hada_w2_a": a, "hada_w2_b": b,
            },
            one * two,
        ),
        "lokr": (
            {"lokr_w1": w1, "lokr_t2": core, "lokr_w2_a": half, "lokr_w2_b": b},
            torch.kron(w1.double().reshape(2, 1, 1, 1, 1), w2),
        ),
    }  # fmt: skip
    for name, (tensors, change) in files.items():
        path = lora_files.write(
            tmp_path / f"{name}.safetensors",
            {f"patch_embedding.{key}": each for key, each in tensors.items()},
        )
        found = merged(matched(path, "wan"), state)["patch_embedding.weight"]
        wanted = weight.double() + change
        assert (found.double() - wanted).abs().max() < lora_layouts.LIMIT, name


def test_a_set_weight_replaces(tmp_path: Path) -> None:
    state = lora_files.state_of("wan")
    new = lora_files.random(*state["proj_out.weight"].shape, seed=1)
    path = lora_files.write(tmp_path / "lora.safetensors", {"head.head.set_weight": new})
    assert torch.equal(merged(matched(path, "wan"), state)["proj_out.weight"], new)


def test_bias_of_the_up_factor(tmp_path: Path) -> None:
    """PEFT's ``lora_bias``: it is scaled like the factors."""
    state, key = lora_files.state_of("wan"), "blocks.0.attn1.to_q"
    factors = factors_for(state, [key], alpha=6.0)
    change = lora_files.random(24, seed=9)
    tensors = as_lora(factors, "transformer.") | {f"transformer.{key}.lora_B.bias": change}
    path = lora_files.write(tmp_path / "lora.safetensors", tensors)
    found = merged(matched(path, "wan"), state)[f"{key}.bias"]
    wanted = state[f"{key}.bias"].double() + 2.0 * change.double()
    assert (found.double() - wanted).abs().max() < lora_layouts.LIMIT


def test_alpha_by_pattern_and_root_in_the_header(tmp_path: Path) -> None:
    state = lora_files.state_of("wan")
    keys = ["blocks.0.attn1.to_q", "blocks.0.attn1.to_k"]
    factors = factors_for(state, keys, rank=4)
    config = '{"transformer.lora_alpha": 8, "transformer.use_rslora": true, '
    config += '"transformer.alpha_pattern": {"attn1.to_k": 2}}'
    path = lora_files.write(
        tmp_path / "lora.safetensors",
        as_lora(factors, "transformer."),
        {"lora_adapter_metadata": config},
    )
    found = merged(matched(path, "wan"), state)
    for key, scale in zip(keys, (8 / 2, 2 / 2), strict=True):
        wanted = state[f"{key}.weight"].double() + scale * factors[key].delta()
        assert (found[f"{key}.weight"].double() - wanted).abs().max() < lora_layouts.LIMIT


def test_alpha_in_pefts_config_beside(tmp_path: Path) -> None:
    state, key = lora_files.state_of("wan"), "blocks.0.attn1.to_q"
    factors = factors_for(state, [key])
    path = lora_files.write(
        tmp_path / "adapter_model.safetensors", as_lora(factors, "base_model.model.")
    )
    before = lora_digest(path)
    (tmp_path / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 12}')
    found = matched(path, "wan")
    wanted = state[f"{key}.weight"].double() + 4.0 * factors[key].delta()
    error = merged(found, state)[f"{key}.weight"].double() - wanted
    assert error.abs().max() < lora_layouts.LIMIT
    assert lora_digest(path) != before, "the config counts as part of the file"


def test_a_pickle_of_tensors(tmp_path: Path) -> None:
    state, key = lora_files.state_of("wan"), "blocks.0.attn1.to_q"
    factors = factors_for(state, [key])
    torch.save(as_lora(factors, "transformer."), tmp_path / "lora.pt")
    found = merged(matched(tmp_path / "lora.pt", "wan"), state)
    wanted = hand_merged(state, factors)[f"{key}.weight"]
    assert (found[f"{key}.weight"].double() - wanted).abs().max() < lora_layouts.LIMIT


def test_factors_in_half_precision_and_eight_bits(tmp_path: Path) -> None:
    state, key = lora_files.state_of("wan"), "blocks.0.attn1.to_q"
    (exact,) = factors_for(state, [key]).values()
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        stored = Factors(exact.down.to(dtype), exact.up.to(dtype))
        path = lora_files.write(tmp_path / "lora.safetensors", as_lora({key: stored}))
        found = merged(matched(path, "wan"), state)[f"{key}.weight"]
        wanted = hand_merged(state, {key: stored})[f"{key}.weight"]
        assert (found.double() - wanted).abs().max() < lora_layouts.LIMIT
