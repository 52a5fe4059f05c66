"""Original names mean the modules that diffusers' converters make of them, row for row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from diffusers.loaders import single_file_utils as converters

from everyframe.adapters.name_maps import NAME_MAPS
from everyframe.adapters.weight_sites import Rows, WeightSites, WeightTable
from everyframe.checkpoints.tensor_file import open_checkpoint
from helpers.loras import files as lora_files
from helpers.tiny_checkpoints import pipeline_components, svd, svd_single_file

NAMES = ("wan", "wan_of_a_picture", "ltx", "hunyuan", "cogvideox", "mochi")


def read(name: str) -> dict[str, torch.Tensor]:
    """The original checkpoint, put together again by the names that `WeightSites` finds."""
    sites, found = WeightSites(lora_files.table(name)), {}
    for key, tensor in lora_files.original_state(name).items():
        module, _, kind = key.rpartition(".")
        if kind not in ("weight", "bias"):
            module, kind = key, "weight"
        targets = sites.find(module)
        assert targets is not None, f"{key} is not found"
        assert sites.find(module.replace(".", "_"), is_flat=True) == targets
        for target in targets:
            parameter = sites.parameter(target.module, kind)
            assert parameter is not None
            rows = target.rows or Rows(((0, len(tensor)),), len(tensor))
            found[parameter[0]] = torch.cat([tensor[a:b] for a, b in rows.pieces])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_original_tensor_is_a_parameter(name: str) -> None:
    state, found = lora_files.state_of(name), read(name)
    left = set(state) - set(found)
    assert left <= {"pos_frequencies", *(key for key in left if key.endswith("scale_shift_table"))}
    assert all(torch.equal(found[key], state[key]) for key in found)


@pytest.mark.parametrize("name", ["wan", "wan_of_a_picture"])
def test_bare_parameters_of_wan_have_original_names(name: str) -> None:
    assert set(read(name)) == set(lora_files.state_of(name))


@pytest.mark.parametrize(
    ("name", "convert"),
    [
        ("wan", converters.convert_wan_transformer_to_diffusers),
        ("wan_of_a_picture", converters.convert_wan_transformer_to_diffusers),
        ("ltx", converters.convert_ltx_transformer_checkpoint_to_diffusers),
        ("hunyuan", converters.convert_hunyuan_video_transformer_to_diffusers),
    ],
)
def test_the_names_of_these_tests_are_those_of_diffusers_converters(name: str, convert) -> None:
    state, original = lora_files.state_of(name), lora_files.original_state(name)
    # Of this layer, which holds four, the converter knows the released model's width alone.
    converted = convert({key: each for key, each in original.items() if ".linear1." not in key})
    joined = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp") if name == "hunyuan" else ()
    known = {
        key
        for key in state
        if not key.startswith("single_") or not any(f".{each}." in key for each in joined)
    }
    assert known == set(converted)
    assert all(torch.equal(converted[key], state[key]) for key in known)


def test_every_map_has_a_tiny_model_or_is_of_one_that_has() -> None:
    shown = {id(NAME_MAPS[lora_files.table(name).class_name]) for name in NAMES}
    others = {name for name, each in NAME_MAPS.items() if id(each) not in shown}
    assert others == {"LTX2VideoTransformer3DModel"}


def test_numbered_blocks_of_a_unet_are_those_of_diffusers_converter() -> None:
    """Names that diffusers turns into those of the model, tensor for tensor."""
    unet = pipeline_components.animatediff_parts()["unet"]
    state = {key: each.detach() for key, each in unet.named_parameters()}
    sites = WeightSites(
        WeightTable(type(unet).__name__, {key: tuple(each.shape) for key, each in state.items()})
    )
    numbered = re.compile(r"(input_blocks|middle_block|output_blocks|time_embed|out)\.\d.*")
    names = {
        target.module: name
        for name, targets in sites.names.items()
        for target in targets
        if numbered.fullmatch(name)
    }
    original = {}
    for key, tensor in state.items():
        module, _, kind = key.rpartition(".")
        original[f"model.diffusion_model.{names[module]}.{kind}"] = tensor
    converted = converters.convert_ldm_unet_checkpoint(original, dict(unet.config))
    assert converted.keys() == state.keys()
    assert all(torch.equal(converted[key], state[key]) for key in state)


def test_numbered_blocks_of_a_video_unet(tmp_path: Path) -> None:
    """Stability's own names, by the file that those tests write."""
    folder = svd.svd(tmp_path / "svd", heads_as_released=True)
    file = open_checkpoint(svd_single_file.write(folder, tmp_path / "svd.safetensors"))
    unet = open_checkpoint(folder / "unet")
    sites = WeightSites(WeightTable("VideoUNet", {name: unet.shape(name) for name in unet}))
    prefix, found = "model.diffusion_model.", set()
    for key in file:
        if not key.startswith(prefix):
            continue
        module, _, kind = key.removeprefix(prefix).rpartition(".")
        if kind not in ("weight", "bias"):
            module, kind = key.removeprefix(prefix), "weight"
        (target,) = sites.find(module) or (None,)
        assert target is not None, f"{key} is not found"
        parameter = sites.parameter(target.module, kind)
        assert parameter is not None
        assert torch.equal(unet.load(parameter[0]), file.load(key))
        found.add(parameter[0])
    assert found == set(unet)


def test_a_flat_name_of_two_modules_is_none() -> None:
    sites = WeightSites(WeightTable("Net", {"a.b_c.weight": (2, 2), "a_b.c.weight": (2, 2)}))
    assert sites.find("a.b_c") is not None
    assert sites.find("a_b_c", is_flat=True) is None


def test_diffusers_old_name_of_the_output_layer() -> None:
    sites = WeightSites(lora_files.table("ltx"))
    old = sites.find("transformer_blocks.0.attn1.to_out")
    assert old == sites.find("transformer_blocks.0.attn1.to_out.0")
    assert old is not None
