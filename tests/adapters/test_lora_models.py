"""Each layout of LoRA files on every denoiser: diffusers' and those of our own families."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from everyframe.adapters.patches import match_loras
from everyframe.core.lora import Lora
from everyframe.core.request import Request
from everyframe.planning.find_model import find_model
from everyframe.runtime.components.patchable import PatchableSpec, WeightTable
from helpers.diagonals import diagonal
from helpers.loras import files as lora_files
from helpers.loras import layouts as lora_layouts
from helpers.loras.files import State, as_lora, factors_for, hand_merged, random
from helpers.tiny_checkpoints import families as tiny_families
from helpers.tiny_checkpoints.pipeline_components import made

OURS = {"opensora-1.0": "denoiser", "opensora-1.2": "denoiser", "stepvideo": "denoiser",
        "svd": "unet", "inpaint": "unet"}  # fmt: skip
MODELS = ("ltx", "hunyuan", "cogvideox", "mochi", "svd_of_diffusers", *OURS)


def _svd_of_diffusers() -> nn.Module:
    module: nn.Module = made(
        diffusers.UNetSpatioTemporalConditionModel(
            block_out_channels=(32, 64), num_attention_heads=(2, 4), cross_attention_dim=32,
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            layers_per_block=1, projection_class_embeddings_input_dim=96,
            addition_time_embed_dim=32,
        )
    )  # fmt: skip
    return module


Model = tuple[State, WeightTable]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Random weights and the table of each denoiser."""
    place, found = tmp_path_factory.mktemp("models"), {}

    def get(name: str) -> Model:
        if name in found:
            return found[name]
        if name in OURS:
            folder = tiny_families.made(name, place)
            spec, _ = find_model(Request(prompt="x", model=str(folder)), may_fetch=False)
            assert isinstance(spec, PatchableSpec)
            table = spec.weight_tables()[OURS[name]]
            state = {
                key: random(*shape, seed=number)
                for number, (key, shape) in enumerate(table.shapes.items())
            }
        elif name == "svd_of_diffusers":
            module = _svd_of_diffusers()
            state = {key: each.detach() for key, each in module.named_parameters()}
            shapes = {key: tuple(each.shape) for key, each in state.items()}
            table = WeightTable(type(module).__name__, shapes, is_denoiser=True)
        else:
            state, table = lora_files.state_of(name), lora_files.table(name)
        found[name] = state, table
        return found[name]

    return get


def _matrices(state: State) -> list[str]:
    return [
        key.removesuffix(".weight")
        for key, each in state.items()
        if key.endswith(".weight") and each.ndim == 2
    ]


def _factors(prefix: str, **more: Any) -> Callable[[State], tuple[State, State]]:
    alpha = more.pop("alpha", None)

    def make(state: State) -> tuple[State, State]:
        factors = factors_for(state, _matrices(state), alpha=alpha)
        return as_lora(factors, prefix, **more), hand_merged(state, factors)

    return make


_KOHYA = {"down": ".lora_down.weight", "up": ".lora_up.weight", "alpha": 1.5}


def _each(prefix: str, change: Callable[..., Any]) -> Callable[[State], tuple[State, State]]:
    """Changes of each matrix: `change` gives the tensors by suffix, and the weight in float64."""

    def make(state: State) -> tuple[State, State]:
        tensors, wanted = {}, {}
        for number, module in enumerate(_matrices(state)):
            own, weight = change(state[f"{module}.weight"], number)
            tensors |= {f"{prefix}{module}.{name}": each for name, each in own.items()}
            wanted[f"{module}.weight"] = weight
        return tensors, wanted

    return make


def _loha(weight: Tensor, seed: int) -> Any:
    rows, columns = weight.shape
    own = {
        f"hada_w{n}_{side}": random(*shape, seed=7 * seed + n)
        for n in (1, 2)
        for side, shape in (("a", (rows, 2)), ("b", (2, columns)))
    }
    wide = {name: each.double() for name, each in own.items()}
    product = (wide["hada_w1_a"] @ wide["hada_w1_b"]) * (wide["hada_w2_a"] @ wide["hada_w2_b"])
    return {**own, "alpha": torch.tensor(1.0)}, weight.double() + product * 0.5


def _lokr(weight: Tensor, seed: int) -> Any:
    rows, columns = weight.shape
    outer = (math.gcd(rows, 4), math.gcd(columns, 2))
    w1 = random(*outer, seed=seed)
    w2 = random(rows // outer[0], columns // outer[1], seed=seed + 1)
    return {"lokr_w1": w1, "lokr_w2": w2}, weight.double() + torch.kron(w1.double(), w2.double())


def _dora(suffix: str, axis: int) -> Callable[..., Any]:
    def change(weight: Tensor, seed: int) -> Any:
        rows, columns = weight.shape
        down, up = random(2, columns, seed=seed), random(rows, 2, seed=seed + 1)
        new = weight.double() + up.double() @ down.double()
        norm = new.norm(dim=axis, keepdim=True)
        magnitude = random(*norm.shape, seed=seed + 2).abs() + 0.5
        own = {"lora_A.weight": down, "lora_B.weight": up}
        is_pefts = suffix != "dora_scale"
        own[suffix] = magnitude.flatten() if is_pefts else magnitude
        return own, new * magnitude.double() / norm

    return change


def _difference(weight: Tensor, seed: int) -> Any:
    change = random(*weight.shape, seed=seed)
    return {"diff": change}, weight.double() + change.double()


def _vectors(norm: str, bias: str) -> Callable[[State], tuple[State, State]]:
    def make(state: State) -> tuple[State, State]:
        tensors, wanted = {}, {}
        for number, (key, each) in enumerate(state.items()):
            stem, _, kind = key.rpartition(".")
            if each.ndim != 1 or kind not in ("weight", "bias") or not stem:
                continue
            change = random(*each.shape, seed=number)
            tensors[f"diffusion_model.{stem}.{norm if kind == 'weight' else bias}"] = change
            wanted[key] = each.double() + change.double()
        return tensors, wanted

    return make


LAYOUTS: Mapping[str, Callable[[State], tuple[State, State]]] = {
    "transformer": _factors("transformer."),
    "unet": _factors("unet."),
    "comfy": _factors("diffusion_model."),
    "comfy-alpha": _factors("diffusion_model.", **_KOHYA),
    "kohya": _factors("lora_unet_", is_flat=True, **_KOHYA),
    "onetrainer": _factors("lora_transformer_", is_flat=True, **_KOHYA),
    "simpletuner": _factors("lycoris_", is_flat=True, **_KOHYA),
    "diffsynth": _factors("", down=".lora_A.default.weight", up=".lora_B.default.weight"),
    "bare": _factors(""),
    "peft": _factors("base_model.model."),
    "original-checkpoint": _factors("model.diffusion_model."),
    "diff": _each("diffusion_model.", _difference),
    "diff-vectors": _vectors("diff", "diff_b"),
    "w_norm": _vectors("w_norm", "b_norm"),
    "loha": _each("diffusion_model.", _loha),
    "lokr": _each("diffusion_model.", _lokr),
    "dora": _each("diffusion_model.", _dora("dora_scale", 1)),
    "dora-input": _each("diffusion_model.", _dora("dora_scale", 0)),
    "dora-peft": _each("base_model.model.", _dora("lora_magnitude_vector", 1)),
}


@pytest.mark.parametrize(("name", "layout"), diagonal(MODELS, LAYOUTS))
def test_weights_are_those_merged_by_hand(
    name: str,
    layout: str,
    model_of: Callable[[str], Model],
    tmp_path: Path,
) -> None:
    state, table = model_of(name)
    tensors, wanted = LAYOUTS[layout](state)
    assert wanted
    path = lora_files.write(tmp_path / "a.safetensors", tensors)
    found = match_loras([Lora(str(path))], {"denoiser": table}, f"tiny {name}")
    merged = lora_files.merged(found, state, "denoiser")
    assert found.applied[0].num_tensors == {"denoiser": len(wanted)}
    for key, each in merged.items():
        if key not in wanted:
            assert torch.equal(each, state[key])
            continue
        scale = max(1.0, wanted[key].abs().max().item())
        error = (each.double() - wanted[key]).abs().max().item()
        assert error < lora_layouts.LIMIT * scale, key
        assert not torch.equal(each, state[key])
