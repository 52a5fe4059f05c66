"""Files of single components: in whatever names and form, they give the module's own tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from diffusers.loaders import single_file_utils
from torch import Tensor, nn

from everyframe.adapters.component_file import MatchedComponent, match_component
from everyframe.checkpoints.strict_load import load_strictly
from everyframe.core.errors import CheckpointError
from everyframe.runtime.components.patchable import table_of_module
from helpers.components import originals, stored

DENOISERS = ("wan", "wan_of_a_picture", "ltx", "hunyuan", "cogvideox", "mochi")
AUTOENCODERS = ("wan_vae", "wan22_vae", "ltx_vae", "hunyuan_vae")
TEXT_ENCODERS = ("umt5", "umt5_llama_cpp", "clip")


def matched(path: Path, name: str) -> MatchedComponent:
    return match_component(path, table_of_module(originals.module(name)), f"tiny {name}")


def loaded(found: MatchedComponent) -> dict[str, Tensor]:
    return {name: found.tensors.load(name) for name in found.tensors}


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model.", "net."])
@pytest.mark.parametrize("name", DENOISERS)
def test_denoisers_by_original_names(name: str, prefix: str, tmp_path: Path) -> None:
    tensors = {prefix + key: each for key, each in originals.original_state(name).items()}
    found = matched(stored.write(tmp_path / "a.safetensors", tensors), name)
    assert_same(loaded(found), originals.state_of(name))
    assert found.notes == ()


@pytest.mark.parametrize("prefix", ["", "vae.", "first_stage_model."])
@pytest.mark.parametrize("name", AUTOENCODERS)
def test_autoencoders_by_original_names(name: str, prefix: str, tmp_path: Path) -> None:
    tensors = {prefix + key: each for key, each in originals.original_state(name).items()}
    found = matched(stored.write(tmp_path / "a.safetensors", tensors), name)
    assert_same(loaded(found), originals.state_of(name))


@pytest.mark.parametrize("name", TEXT_ENCODERS)
def test_text_encoders_by_other_names(name: str, tmp_path: Path) -> None:
    found = matched(stored.write(tmp_path / "a.safetensors", originals.original_state(name)), name)
    assert_same(loaded(found), originals.state_of(name))


@pytest.mark.parametrize("name", [*DENOISERS, *AUTOENCODERS, *TEXT_ENCODERS, "llama"])
def test_the_names_of_the_module(name: str, tmp_path: Path) -> None:
    tensors = {f"model.{key}": each for key, each in originals.state_of(name).items()}
    found = matched(stored.write(tmp_path / "a.safetensors", tensors), name)
    assert_same(loaded(found), originals.state_of(name))


@pytest.mark.parametrize(
    ("name", "convert"),
    [
        ("wan", single_file_utils.convert_wan_transformer_to_diffusers),
        ("ltx", single_file_utils.convert_ltx_transformer_checkpoint_to_diffusers),
        ("wan_vae", single_file_utils.convert_wan_vae_to_diffusers),
        ("ltx_vae", single_file_utils.convert_ltx_vae_checkpoint_to_diffusers),
    ],
)
def test_diffusers_has_the_same_names(name: str, convert: object, tmp_path: Path) -> None:
    """The maps were written from more than one source; diffusers' converter is another program."""
    original = originals.original_state(name)
    prefix = "vae." if name == "ltx_vae" else ""
    assert callable(convert)
    converted = convert({prefix + key: each for key, each in original.items()})
    found = loaded(matched(stored.write(tmp_path / "a.safetensors", original), name))
    # diffusers drops the statistics of LTX's latents (it has them in the config).
    rest = {key: each for key, each in found.items() if not key.startswith("latents_")}
    assert_same({key: each for key, each in converted.items() if key in rest}, rest)


def test_a_module_is_filled(tmp_path: Path) -> None:
    """The tensors go through the strict loader, tied ones and those in bfloat16 too."""
    state = {key: each.bfloat16() for key, each in originals.original_state("umt5").items()}
    found = matched(stored.write(tmp_path / "a.safetensors", state), "umt5")
    with torch.device("meta"):
        module: nn.Module = type(originals.module("umt5"))(originals.module("umt5").config)
    load_strictly(module, found.tensors, dtype=torch.bfloat16)
    wanted = originals.module("umt5").state_dict()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, wanted[name].bfloat16())
    assert module.get_parameter("shared.weight") is module.get_parameter(
        "encoder.embed_tokens.weight"
    )


# -------------------------------------------------------------------------------------- eight bits


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("name", ["wan", "ltx", "hunyuan", "umt5", "cogvideox"])
def test_scaled_weights(name: str, is_mixed: bool, by_rows: bool, tmp_path: Path) -> None:
    """Products of scale and value, to half a unit of float32's last place of float64's."""
    original, prefix = originals.original_state(name), "model.diffusion_model."
    if name == "umt5":
        prefix = ""
    tensors, meant = stored.scaled(original, prefix, is_mixed=is_mixed, by_rows=by_rows)
    found = matched(stored.write(tmp_path / "a.safetensors", tensors), name)
    plain = matched(
        stored.write(tmp_path / "b.safetensors", {k: v.double() for k, v in meant.items()}), name
    )
    wanted = loaded(plain)
    for key, each in loaded(found).items():
        error = (each.double() - wanted[key]).abs()
        assert (error <= wanted[key].abs() * 2.0**-24).all(), key
    assert any("stored in 8-bit with scales" in note for note in found.notes)


def test_a_wrong_scale_would_be_seen(tmp_path: Path) -> None:
    tensors, meant = stored.scaled(originals.original_state("wan"))
    key = "blocks.0.self_attn.q.scale_weight"
    tensors[key] = tensors[key] * 1.001
    found = loaded(matched(stored.write(tmp_path / "a.safetensors", tensors), "wan"))
    wanted = meant["blocks.0.self_attn.q.weight"]
    error = (found["blocks.0.attn1.to_q.weight"].double() - wanted).abs()
    assert (error > wanted.abs() * 2.0**-24).any()


def test_formats_in_the_header(tmp_path: Path) -> None:
    tensors, meant = stored.scaled(originals.state_of("wan"), is_mixed=True)
    layers = [key.removesuffix(".comfy_quant") for key in tensors if key.endswith(".comfy_quant")]
    rest = {key: each for key, each in tensors.items() if not key.endswith(".comfy_quant")}
    kinds = ", ".join(f'"{layer}": {{"format": "float8_e4m3fn"}}' for layer in layers)
    text = f'{{"format_version": "1.0", "layers": {{{kinds}}}}}'
    path = stored.write(tmp_path / "a.safetensors", rest, {"_quantization_metadata": text})
    found = loaded(matched(path, "wan"))
    for key, each in found.items():
        assert torch.equal(each.double(), meant[key].float().double())


def test_int8_by_tensors(tmp_path: Path) -> None:
    state = originals.state_of("wan")
    key = "blocks.0.attn1.to_q"
    scale = torch.tensor(0.003)
    values = (state[f"{key}.weight"] / scale).round().clamp(-127, 127).to(torch.int8)
    kind = torch.tensor(list(b'{"format": "int8_tensorwise"}'), dtype=torch.uint8)
    changed = {f"{key}.weight": values, f"{key}.weight_scale": scale, f"{key}.comfy_quant": kind}
    found = loaded(matched(stored.write(tmp_path / "a.safetensors", {**state, **changed}), "wan"))
    assert torch.equal(found[f"{key}.weight"], values.float() * scale)


def test_eight_bits_without_scales_are_reported(tmp_path: Path) -> None:
    tensors, meant = stored.plain_fp8(originals.original_state("wan"))
    found = matched(stored.write(tmp_path / "a.safetensors", tensors), "wan")
    (note,) = found.notes
    assert "in 8-bit without scales" in note
    plain = matched(stored.write(tmp_path / "b.safetensors", meant), "wan")
    wanted = loaded(plain)
    assert all(torch.equal(e.double(), wanted[key]) for key, e in loaded(found).items())


def _quant(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


_Q = "blocks.0.attn1.to_q"
_PLAIN_SCALE = {f"{_Q}.scale_weight": torch.tensor(1.0)}
_FP8 = {f"{_Q}.weight": torch.zeros(24, 24, dtype=torch.float8_e4m3fn)}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (_PLAIN_SCALE, "has a scale and is stored in torch.float32"),
        ({"nothing.scale_weight": torch.tensor(1.0)}, "is a scale without 'nothing.weight'"),
        ({**_FP8, f"{_Q}.scale_weight": torch.ones(7)}, "expected one number or one for each"),
        ({**_FP8, f"{_Q}.scale_weight": torch.ones(1, 24)}, "expected one number or one for each"),
        ({**_FP8, f"{_Q}.scale_weight": torch.ones(24).bool()}, "a scale and stored in torch.bool"),
        ({**_FP8, **_PLAIN_SCALE, f"{_Q}.weight_scale": torch.ones(1)}, "has two scales"),
        ({f"{_Q}.weight": torch.ones(24, 24).char()}, "in int8 without a scale"),
        ({"x.scale_input": torch.tensor(1.0)}, "are for no parameter of it: 'x.scale_input'"),
        (
            {"x.weight": _FP8[f"{_Q}.weight"][0, 0], "x.scale_weight": torch.ones(2)},
            "'x.weight', which has shape ()",
        ),
        ({f"{_Q}.comfy_quant": torch.zeros(2, 2, dtype=torch.uint8)}, "is no JSON"),
        ({"scaled_fp8": torch.zeros(2)}, "is marked scaled_fp8 and has no scale_weight"),
        ({f"{_Q}.comfy_quant": _quant("{")}, "is no JSON"),
        ({f"{_Q}.comfy_quant": _quant("[]")}, "is no JSON object"),
        ({f"{_Q}.comfy_quant": torch.ones(3)}, "is no JSON in bytes"),
        ({f"{_Q}.comfy_quant": _quant('{"format": "nvfp4"}')}, "stored as 'nvfp4', which is not"),
        ({f"{_Q}.comfy_quant": _quant('{"format": "float8_e4m3fn"}')}, "has no"),
        (
            {f"{_Q}.comfy_quant": _quant('{"format": "int8_tensorwise", "convrot": true}')},
            "with convrot, which is not read",
        ),
    ],
)
def test_what_is_no_scaled_file(changed: dict[str, Tensor], text: str, tmp_path: Path) -> None:
    path = stored.write(tmp_path / "a.safetensors", {**originals.state_of("wan"), **changed})
    with pytest.raises(CheckpointError, match=re.escape(text)):
        matched(path, "wan")


def test_codes_of_a_kernel_of_one_position(tmp_path: Path) -> None:
    """A linear layer that is stored as a convolution: its codes have the layer's shape."""
    codes = torch.randint(-127, 128, (24, 24, 1, 1), dtype=torch.int8)
    changed = {f"{_Q}.weight": codes, f"{_Q}.weight_scale": torch.ones(24)}
    path = stored.write(tmp_path / "a.safetensors", {**originals.state_of("wan"), **changed})
    found = matched(path, "wan").tensors.quantized(f"{_Q}.weight", "int8")
    assert found is not None
    assert torch.equal(found[0], codes[..., 0, 0])


def test_a_scale_that_is_not_finite(tmp_path: Path) -> None:
    changed = {**_FP8, f"{_Q}.scale_weight": torch.tensor(float("nan"))}
    path = stored.write(tmp_path / "a.safetensors", {**originals.state_of("wan"), **changed})
    found = matched(path, "wan")
    with pytest.raises(CheckpointError, match="not finite"):
        found.tensors.load(f"{_Q}.weight")


# -------------------------------------------------------------------------------------- strictness


def test_what_may_be_left_out_is_reported(tmp_path: Path) -> None:
    more = {"spiece_model": torch.zeros(5, dtype=torch.uint8), "logit_scale": torch.ones(())}
    tensors = {**originals.original_state("umt5"), **more}
    found = matched(stored.write(tmp_path / "a.safetensors", tensors), "umt5")
    assert [note.partition(": ")[2] for note in found.notes] == [
        "1 tensors are left out: layers after the text encoder's last",
        "1 tensors are left out: a tokenizer, which the model's own is",
    ]


def test_one_component_of_a_file_of_several(tmp_path: Path) -> None:
    tensors = {
        **{f"model.diffusion_model.{k}": e for k, e in originals.original_state("ltx").items()},
        **{f"vae.{k}": e for k, e in originals.original_state("ltx_vae").items()},
    }
    path = stored.write(tmp_path / "a.safetensors", tensors)
    for name in ("ltx", "ltx_vae"):
        found = matched(path, name)
        assert_same(loaded(found), originals.state_of(name))
        assert "other components" in found.notes[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("drop", "it lacks 1 of 69 tensors: 'blocks.1.attn2.to_k.weight'"),
        ("more", "1 tensors are for no parameter of it: 'blocks.7.what.weight'"),
        ("shape", "'blocks.1.cross_attn.k.weight' has shape (3, 24), expected (24, 24)"),
        ("twice", "are both for one parameter"),
    ],
)
def test_each_tensor_is_used_or_named(change: str, text: str, tmp_path: Path) -> None:
    tensors = originals.original_state("wan")
    key = "blocks.1.cross_attn.k.weight"
    if change == "drop":
        del tensors[key]
    elif change == "more":
        tensors["blocks.7.what.weight"] = torch.zeros(2)
    elif change == "shape":
        tensors[key] = tensors[key][:3]
    else:
        tensors["blocks.1.attn2.to_k.weight"] = tensors[key]
    path = stored.write(tmp_path / "a.safetensors", tensors)
    with pytest.raises(CheckpointError, match=re.escape(text)):
        matched(path, "wan")


def test_another_model_is_named(tmp_path: Path) -> None:
    path = stored.write(tmp_path / "a.safetensors", originals.original_state("ltx"))
    with pytest.raises(CheckpointError, match=r"a\.safetensors is no file for tiny wan.*LTX"):
        matched(path, "wan")
    path = stored.write(tmp_path / "a.safetensors", originals.state_of("clip"))
    with pytest.raises(CheckpointError, match=r"has none of its .* tensors.*a text encoder"):
        matched(path, "wan")
