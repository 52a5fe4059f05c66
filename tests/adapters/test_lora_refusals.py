"""Each fault of a LoRA file is one line that names the tensor; nothing is left out in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from everyframe.adapters.lora_file import read_lora
from everyframe.adapters.patches import match_loras
from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.lora import Lora
from helpers.loras import files as lora_files
from helpers.loras.files import State, as_lora, factors_for, matched, random, write

KEY = "diffusion_model.blocks.0.self_attn.q"


def good() -> State:
    """Factors of all attention of a tiny Wan, with alpha, in ComfyUI's names."""
    original = lora_files.original_state("wan")
    modules = lora_files.matrices(original, "_attn.")
    factors = factors_for(original, modules, alpha=2.0)
    return as_lora(factors, "diffusion_model.")


def _without(key: str) -> Callable[[State], object]:
    return lambda tensors: tensors.pop(key)


def _with(key: str, tensor: torch.Tensor) -> Callable[[State], object]:
    return lambda tensors: tensors.update({key: tensor})


FAULTS: dict[str, tuple[Callable[[State], object], str]] = {
    "a lone down factor": (
        _without(f"{KEY}.lora_B.weight"), f"'{KEY}' has down and lacks up"
    ),
    "a lone up factor": (
        _without(f"{KEY}.lora_A.weight"), f"'{KEY}' has up and lacks down"
    ),
    "alpha beside a difference": (
        lambda tensors: tensors.update(
            {
                "diffusion_model.patch_embedding.diff": random(24, 16, 1, 2, 2, seed=1),
                "diffusion_model.patch_embedding.alpha": torch.tensor(1.0),
            }
        ),
        "'diffusion_model.patch_embedding' has alpha beside a difference",
    ),
    "a lone alpha": (
        _with("diffusion_model.blocks.9.self_attn.q.alpha", torch.tensor(1.0)),
        "'diffusion_model.blocks.9.self_attn.q' has alpha without factors",
    ),
    "an unknown suffix": (
        _with(f"{KEY}.lora_C.weight", random(3, 24, seed=1)),
        f"'{KEY}.lora_C.weight' is no tensor of any known kind",
    ),
    "a whole weight": (
        _with("diffusion_model.patch_embedding.weight", random(24, 16, seed=1)),
        "'diffusion_model.patch_embedding.weight' is no tensor of any known kind",
    ),
    "two ranks": (
        _with(f"{KEY}.lora_B.weight", random(24, 2, seed=1)),
        f"'{KEY}' has factors of two ranks, (24, 2) and (3, 24)",
    ),
    "no rank at all": (
        lambda tensors: tensors.update(
            {f"{KEY}.lora_B.weight": torch.zeros(24, 0), f"{KEY}.lora_A.weight": torch.zeros(0, 24)}
        ),
        f"'{KEY}' has tensors without numbers: ",
    ),
    "another width": (
        _with(f"{KEY}.lora_A.weight", random(3, 25, seed=1)),
        f"'{KEY}' has factors (24, 3) and (3, 25), the weight is (24, 24)",
    ),
    "another height": (
        _with(f"{KEY}.lora_B.weight", random(23, 3, seed=1)),
        f"'{KEY}' has factors (23, 3) and (3, 24), the weight is (24, 24)",
    ),
    "a vector for a factor": (
        _with(f"{KEY}.lora_B.weight", random(24, seed=1)),
        f"'{KEY}' has factors of two ranks, (24,) and (3, 24)",
    ),
    "factors of a norm": (
        lambda tensors: tensors.update(
            {
                "blocks.0.norm3.lora_A.weight": random(1, 24, seed=1),
                "blocks.0.norm3.lora_B.weight": random(24, 1, seed=1),
            }
        ),
        "'blocks.0.norm3' has factors, the weight is a vector (24,)",
    ),
    "a difference of another shape": (
        _with("diffusion_model.blocks.0.norm3.diff", random(23, seed=1)),
        "'diffusion_model.blocks.0.norm3' has a difference (23,), the weight is (24,)",
    ),
    "a bias of another shape": (
        _with(f"{KEY}.diff_b", random(23, seed=1)),
        f"'{KEY}.diff_b' is (23,), the bias (24,)",
    ),
    "a bias that is not there": (
        _with("diffusion_model.blocks.0.self_attn.norm_q.diff_b", random(24, seed=1)),
        "'diffusion_model.blocks.0.self_attn.norm_q' changes a bias, and blocks.0.attn1.norm_q "
        "has none",
    ),
    "a modulation of another shape": (
        _with("diffusion_model.blocks.0.diff_m", random(6, 24, seed=1)),
        "'diffusion_model.blocks.0' has a difference (6, 24), the weight is (1, 6, 24)",
    ),
    "a block too many": (
        lambda tensors: tensors.update(
            {
                "diffusion_model.blocks.7.self_attn.q.lora_A.weight": random(3, 24, seed=1),
                "diffusion_model.blocks.7.self_attn.q.lora_B.weight": random(24, 3, seed=1),
            }
        ),
        "the model lacks 1 of the 17 modules: 'diffusion_model.blocks.7.self_attn.q'; closest is "
        "'blocks.1.self_attn.q'",
    ),
    "two kinds": (
        _with(f"{KEY}.diff", random(24, 24, seed=1)),
        f"'{KEY}' has changes of 2 kinds, lora and diff",
    ),
    "two adapters": (
        _with(f"{KEY}.lora_A.second.weight", random(3, 24, seed=1)),
        "are the same tensor of two adapters",
    ),
    "one module by two names": (
        lambda tensors: tensors.update(
            {
                "transformer.blocks.0.attn1.to_q.lora_A.weight": random(3, 24, seed=1),
                "transformer.blocks.0.attn1.to_q.lora_B.weight": random(24, 3, seed=1),
            }
        ),
        f"'{KEY}' and 'transformer.blocks.0.attn1.to_q' are both for 'blocks.0.attn1.to_q.weight'",
    ),
    "part of LoHa": (
        _with("blocks.1.ffn.0.hada_w1_a", random(32, 2, seed=1)),
        "'blocks.1.ffn.0' has hada_w1_a and lacks hada_w1_b, hada_w2_a, hada_w2_b",
    ),
    "half a core of LoHa": (
        lambda tensors: tensors.update(
            {
                f"blocks.1.ffn.0.hada_{name}": random(2, 2, seed=1)
                for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1")
            }
        ),
        "'blocks.1.ffn.0' has one of hada_t1 and hada_t2",
    ),
    "LoHa of another shape": (
        lambda tensors: tensors.update(
            {
                f"blocks.1.ffn.0.hada_w{n}_{side}": random(*shape, seed=1)
                for n in (1, 2)
                for side, shape in (("a", (32, 2)), ("b", (2, 23)))
            }
        ),
        "'blocks.1.ffn.0' has LoHa factors (32, 2), (2, 23), (32, 2), (2, 23), the weight is "
        "(32, 24)",
    ),
    "LoKr of another shape": (
        lambda tensors: tensors.update(
            {
                "blocks.1.ffn.0.lokr_w1": random(4, 2, seed=1),
                "blocks.1.ffn.0.lokr_w2": random(8, 11, seed=1),
            }
        ),
        "'blocks.1.ffn.0' has LoKr factors w1 (4, 2), w2 (8, 11), the weight is (32, 24)",
    ),
    "part of LoKr": (
        _with("blocks.1.ffn.0.lokr_w2_a", random(8, 2, seed=1)),
        "'blocks.1.ffn.0' has lokr_w2_a and lacks",
    ),
    "a magnitude without factors": (
        _with("blocks.1.ffn.0.dora_scale", random(32, 1, seed=1)),
        "'blocks.1.ffn.0' has dora without factors",
    ),
    "a magnitude of a new weight": (
        lambda tensors: tensors.update(
            {
                "blocks.1.ffn.0.set_weight": random(32, 24, seed=1),
                "blocks.1.ffn.0.dora_scale": random(32, 1, seed=2),
            }
        ),
        "'blocks.1.ffn.0' has a DoRA magnitude beside a new weight",
    ),
    "a magnitude of another shape": (
        _with(f"{KEY}.dora_scale", random(23, 1, seed=1)),
        f"'{KEY}' has a DoRA magnitude (23, 1), the weight is (24, 24)",
    ),
    "an alpha of several numbers": (
        _with(f"{KEY}.alpha", random(2, seed=1)), f"'{KEY}.alpha' has shape (2,), expected one"
    ),
    "an alpha of nothing": (
        _with(f"{KEY}.alpha", torch.tensor(0.0)), f"'{KEY}.alpha' is 0.0, expected a finite number"
    ),
    "an alpha that is none": (
        _with(f"{KEY}.alpha", torch.tensor(float("nan"))), f"'{KEY}.alpha' is nan, expected"
    ),
    "whole numbers": (
        _with(f"{KEY}.lora_A.weight", torch.ones(3, 24, dtype=torch.int8)),
        f"'{KEY}.lora_A.weight' is of torch.int8, expected floating-point numbers",
    ),
    "a layer of PEFT's": (
        _with("base_model.model.head.modules_to_save.default.weight", random(64, 24, seed=1)),
        "is not read: it is a whole layer that PEFT saved beside the adapter",
    ),
    "another shape for a layer": (
        _with(f"{KEY}.reshape_weight", torch.tensor([24.0, 48.0])),
        f"'{KEY}.reshape_weight' is not read: it gives the layer another shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, tmp_path: Path) -> None:
    plant, text = FAULTS[fault]
    tensors = good()
    matched(write(tmp_path / "good.safetensors", tensors), "wan")
    plant(tensors)
    path = write(tmp_path / "bad.safetensors", tensors)
    with pytest.raises(CheckpointError) as caught:
        matched(path, "wan")
    assert text in str(caught.value)
    assert "bad.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {key: each.to(dtype) for key, each in good().items()}
    file = read_lora(write(tmp_path / "good.safetensors", tensors))
    file.check_values()
    tensors[f"{KEY}.lora_B.weight"][5, 1] = value
    file = read_lora(write(tmp_path / "bad.safetensors", tensors))
    with pytest.raises(CheckpointError, match=f"bad.safetensors: '{KEY}.lora_B.weight' holds"):
        file.check_values()


@pytest.mark.parametrize("length", [5, 100, -1])
def test_a_truncated_file(length: int, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.safetensors", good())
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"bad\.safetensors.*truncated"):
        read_lora(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no LoRA file"):
        read_lora(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="there is no LoRA file"):
        read_lora(tmp_path)
    (tmp_path / "text.safetensors").write_text("<!DOCTYPE html>")
    with pytest.raises(CheckpointError, match="a web page"):
        read_lora(tmp_path / "text.safetensors")
    (tmp_path / "text.txt").write_text("words")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        read_lora(tmp_path / "text.txt")
    write(tmp_path / "empty.safetensors", {})
    with pytest.raises(CheckpointError, match=r"empty\.safetensors holds no tensors"):
        read_lora(tmp_path / "empty.safetensors")


def test_a_pickle_with_more_than_tensors_is_not_run(tmp_path: Path) -> None:
    torch.save({f"{KEY}.lora_A.weight": Path("here")}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="its pickle would run code"):
        read_lora(tmp_path / "bad.pt")


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_broken_metadata(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.safetensors", good(), {"lora_adapter_metadata": text})
    with pytest.raises(CheckpointError, match=r"bad\.safetensors: its lora_adapter_metadata is no"):
        read_lora(path)


def test_a_pattern_that_is_none(tmp_path: Path) -> None:
    factors = factors_for(lora_files.state_of("wan"), ["blocks.0.attn1.to_q"])
    config = '{"transformer.alpha_pattern": {"(": 2}, "transformer.lora_alpha": 1}'
    path = write(
        tmp_path / "bad.safetensors", as_lora(factors, "transformer."),
        {"lora_adapter_metadata": config},
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"alpha_pattern '\(' can't be read"):
        read_lora(path)


def pair(stem: str, rows: int, columns: int) -> State:
    """Factors of one layer of a released model, of rank 1."""
    return {
        f"{stem}.lora_A.weight": random(1, columns, seed=1),
        f"{stem}.lora_B.weight": random(rows, 1, seed=2),
    }


OTHERS = {
    "Wan 14B image to video": {
        **pair("diffusion_model.blocks.0.self_attn.q", 5120, 5120),
        **pair("diffusion_model.blocks.0.cross_attn.k_img", 5120, 5120),
    },
    "Wan 1.3B": pair("lora_unet_blocks_0_self_attn_q", 1536, 1536),
    "LTX-Video 2B": pair("diffusion_model.transformer_blocks.0.attn1.to_q", 2048, 2048),
    "CogVideoX 5B": pair("transformer.transformer_blocks.0.attn1.to_q", 3072, 3072),
    "HunyuanVideo or FLUX.1": pair("diffusion_model.double_blocks.0.img_attn_qkv", 9216, 3072),
    "Stable Diffusion 1": pair(
        "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k", 320, 768
    ),
    "Stable Diffusion XL": pair(
        "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k", 640, 2048
    ),
    "Stable Video Diffusion": {
        **pair("unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k", 320, 1024),
        **pair(
            "unet.down_blocks.0.attentions.0.temporal_transformer_blocks.0.attn1.to_q", 320, 320
        ),
    },
    "a text encoder": pair("lora_te_text_model_encoder_layers_0_self_attn_q_proj", 768, 768),
}


@pytest.mark.parametrize("made_for", OTHERS)
def test_a_lora_of_another_model_says_which(made_for: str, tmp_path: Path) -> None:
    path = write(tmp_path / "other.safetensors", OTHERS[made_for])
    with pytest.raises(CheckpointError) as caught:
        matched(path, "wan" if "Wan" in made_for else "hunyuan" if "LTX" in made_for else "ltx")
    assert str(caught.value).endswith(f"; it looks made for {made_for}")


def test_components_and_experts(tmp_path: Path) -> None:
    """A model with two denoisers: the file says which it is for, or the person does."""
    tables = {"transformer": lora_files.table("wan"), "transformer_2": lora_files.table("wan")}
    plain = write(tmp_path / "plain.safetensors", good())

    def components(path: Path, component: str = "") -> tuple[list[str], tuple[str, ...]]:
        found = match_loras([Lora(str(path), 1.0, component)], tables, "Wan 2.2")
        return sorted(found.patches), found.applied[0].notes

    with pytest.raises(InputError, match=r"two denoisers and plain.safetensors names none"):
        components(plain)
    assert components(plain, "high") == (["transformer"], ())
    assert components(plain, "low") == (["transformer_2"], ())
    assert components(plain, "transformer_2") == (["transformer_2"], ())
    assert components(plain, "both") == (["transformer", "transformer_2"], ())
    with pytest.raises(InputError, match="it has transformer, transformer_2, high, low, both"):
        components(plain, "unet")

    factors = factors_for(lora_files.state_of("wan"), ["blocks.0.attn1.to_q"])
    first = write(tmp_path / "first.safetensors", as_lora(factors, "transformer."))
    named, (note,) = components(first)
    assert named == ["transformer"]
    assert "changes transformer alone, which it names; @both changes both" in note
    assert components(first, "low") == (["transformer_2"], ())
    second = write(tmp_path / "second.safetensors", as_lora(factors, "transformer_2."))
    assert components(second) == (["transformer_2"], ())
    each = {**as_lora(factors, "transformer."), **as_lora(factors, "transformer_2.")}
    both = write(tmp_path / "both.safetensors", {k: v.clone() for k, v in each.items()})
    assert components(both) == (["transformer", "transformer_2"], ())
    with pytest.raises(InputError, match="names both denoisers itself; leave out @low"):
        components(both, "low")
    with pytest.raises(CheckpointError, match="the model has none of the 1 modules"):
        matched(second, "wan")


def test_two_parts_of_a_pair_in_different_experts_do_not_meet(tmp_path: Path) -> None:
    factors = factors_for(lora_files.state_of("wan"), ["blocks.0.attn1.to_q"])
    tensors = as_lora(factors, "transformer.")
    tensors["transformer_2.blocks.0.attn1.to_q.lora_B.weight"] = tensors.pop(
        "transformer.blocks.0.attn1.to_q.lora_B.weight"
    )
    with pytest.raises(CheckpointError, match="has down and lacks up"):
        read_lora(write(tmp_path / "bad.safetensors", tensors))


def test_a_lora_of_strength_zero_is_read_and_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "plain.safetensors", good())
    found = matched(path, "wan", strength=0.0)
    assert found.patches == {}
    assert sum(found.applied[0].num_tensors.values()) == 16
    tensors = good()
    tensors.pop(f"{KEY}.lora_B.weight")
    with pytest.raises(CheckpointError, match="lacks up"):
        matched(write(tmp_path / "bad.safetensors", tensors), "wan", strength=0.0)
