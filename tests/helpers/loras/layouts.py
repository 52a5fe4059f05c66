"""Every layout of LoRA files for one tiny Wan, each with the weights of a manual merge.

Read next: `formats_page.py`, the results of diffusers for each.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everyframe.core.errors import CheckpointError
from helpers.loras import files as lora_files
from helpers.loras.files import Factors, State, as_lora, factors_for, hand_merged, random

#: The model of all of them: Wan for text, and so without attention to a picture.
MODEL = "wan"
#: Error by which float32 may differ from float64 here.
LIMIT = 1e-6

#: Diffusers' names of the modules of the attention, and of the feed-forward layers.
_ATTENTION = {
    f"{ours}.{b}": f"{theirs}.{a}"
    for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
    for a, b in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
}
_FORWARD = {"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}


@dataclass(frozen=True)
class Made:
    """A file's tensors, its metadata, and the weights that merging it by hand gives."""

    tensors: State
    wanted: Mapping[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """One layout: who makes it, a key of it, and how its file is made."""

    makers: str
    key: str
    make: Callable[[], Made]
    note: str = ""


def _modules(*, forward: bool = True) -> dict[str, str]:
    """Diffusers' name -> original name of the modules that LoRAs change."""
    own = {**_ATTENTION, **(_FORWARD if forward else {})}
    return {
        f"blocks.{n}.{ours}": f"blocks.{n}.{theirs}"
        for n in range(2)
        for ours, theirs in own.items()
    }


def _factors(alpha: float | None = None, *, forward: bool = True) -> dict[str, Factors]:
    return factors_for(lora_files.state_of(MODEL), _modules(forward=forward), alpha=alpha)


def _original(factors: Mapping[str, Factors]) -> dict[str, Factors]:
    return {_modules()[name]: each for name, each in factors.items()}


def _plain(
    prefix: str, *, original: bool, alpha: float | None = None, forward: bool = True, **layout: Any
) -> Made:
    factors = _factors(alpha, forward=forward)
    named = _original(factors) if original else factors
    return Made(as_lora(named, prefix, **layout), hand_merged(lora_files.state_of(MODEL), factors))


_KOHYA = {"down": ".lora_down.weight", "up": ".lora_up.weight"}
_DEFAULT = {"down": ".lora_A.default.weight", "up": ".lora_B.default.weight"}


def _with_metadata() -> Made:
    factors = _factors(alpha=6.0)
    tensors = {k: v for k, v in as_lora(factors, "transformer.").items() if "alpha" not in k}
    config = {"transformer.r": 3, "transformer.lora_alpha": 6.0}
    config["transformer.target_modules"] = ["to_q", "to_k", "to_v", "to_out.0", "proj", "net.2"]
    metadata = {"lora_adapter_metadata": json.dumps(config), "format": "pt"}
    return Made(tensors, hand_merged(lora_files.state_of(MODEL), factors), metadata)


def _and(changes: Mapping[str, tuple[str, Tensor]]) -> Made:
    """Factors and plain differences: key of the file -> (parameter, difference)."""
    made, state = _plain("diffusion_model.", original=True, **_KOHYA), lora_files.state_of(MODEL)
    wanted = dict(made.wanted)
    for name, change in changes.values():
        wanted[name] = wanted.get(name, state[name].double()) + change.double()
    tensors = {f"diffusion_model.{key}": change for key, (_, change) in changes.items()}
    return Made({**made.tensors, **tensors}, wanted)


def _difference(key: str, name: str) -> Made:
    return _and({key: (name, random(*lora_files.state_of(MODEL)[name].shape, seed=77))})


def _biases() -> Made:
    state = lora_files.state_of(MODEL)
    return _and(
        {
            f"{theirs}.diff_b": (f"{ours}.bias", random(*state[f"{ours}.bias"].shape, seed=n))
            for n, (ours, theirs) in enumerate(_modules().items())
        }
    )


def _modulation() -> Made:
    shapes = lora_files.state_of(MODEL)
    changes = {f"blocks.{n}.diff_m": f"blocks.{n}.scale_shift_table" for n in range(2)} | {
        "head.diff_m": "scale_shift_table"
    }
    return _and({k: (v, random(*shapes[v].shape, seed=5)) for k, v in changes.items()})


def _to_a_picture() -> Made:
    made = _plain("diffusion_model.", original=True, **_KOHYA)
    more = {
        f"diffusion_model.blocks.{n}.cross_attn.{name}.lora_{side}.weight": random(*shape, seed=n)
        for n in range(2)
        for name in ("k_img", "v_img")
        for side, shape in (("down", (3, 24)), ("up", (24, 3)))
    }
    return Made({**made.tensors, **more}, made.wanted)


def _loha() -> Made:
    state, wanted, tensors = lora_files.state_of(MODEL), {}, {}
    for number, (ours, theirs) in enumerate(_modules().items()):
        rows, columns = state[f"{ours}.weight"].shape
        parts = {
            f"hada_w{n}_{side}": random(*shape, seed=10 * number + 2 * n + (side == "a"))
            for n in (1, 2)
            for side, shape in (("a", (rows, 3)), ("b", (3, columns)))
        }
        product = parts["hada_w1_a"].double() @ parts["hada_w1_b"].double()
        product = product * (parts["hada_w2_a"].double() @ parts["hada_w2_b"].double())
        wanted[f"{ours}.weight"] = state[f"{ours}.weight"].double() + product * (2.0 / 3)
        stem = f"diffusion_model.{theirs}"
        tensors |= {f"{stem}.{name}": each for name, each in parts.items()}
        tensors[f"{stem}.alpha"] = torch.tensor(2.0)
    return Made(tensors, wanted)


def _lokr() -> Made:
    state, wanted, tensors = lora_files.state_of(MODEL), {}, {}
    for number, (ours, theirs) in enumerate(_modules().items()):
        rows, columns = state[f"{ours}.weight"].shape
        w1 = random(4, 2, seed=number)
        a, b = random(rows // 4, 3, seed=number + 50), random(3, columns // 2, seed=number + 90)
        product = torch.kron(w1.double(), a.double() @ b.double()) * (1.5 / 3)
        wanted[f"{ours}.weight"] = state[f"{ours}.weight"].double() + product
        own = {"lokr_w1": w1, "lokr_w2_a": a, "lokr_w2_b": b, "alpha": torch.tensor(1.5)}
        tensors |= {f"lycoris_{theirs.replace('.', '_')}.{name}": own[name] for name in own}
    return Made(tensors, wanted)


def _dora(suffix: str, prefix: str, *, original: bool, per_input: bool = False) -> Made:
    state, factors = lora_files.state_of(MODEL), _factors()
    tensors = as_lora(_original(factors) if original else factors, prefix)
    wanted = {}
    for number, (ours, each) in enumerate(factors.items()):
        changed = state[f"{ours}.weight"].double() + each.delta()
        axis = 0 if per_input else 1
        norm = changed.square().sum(axis, keepdim=True).sqrt()
        magnitude = random(*norm.shape, seed=number).abs() + 0.5
        wanted[f"{ours}.weight"] = changed * magnitude.double() / norm
        stem = prefix + (_modules()[ours] if original else ours)
        tensors[stem + suffix] = magnitude if suffix == ".dora_scale" else magnitude.flatten()
    return Made(tensors, wanted)


LAYOUTS: Mapping[str, Layout] = {
    "diffusers": Layout(
        "diffusers, PEFT", "transformer.blocks.0.attn1.to_q.lora_A.weight",
        lambda: _plain("transformer.", original=False),
    ),
    "metadata": Layout(
        "diffusers, alpha in the header", "transformer.blocks.0.attn1.to_q.lora_A.weight",
        _with_metadata,
    ),
    "comfy": Layout(
        "ComfyUI, ai-toolkit", "diffusion_model.blocks.0.self_attn.q.lora_A.weight",
        lambda: _plain("diffusion_model.", original=True),
    ),
    "comfy-alpha": Layout(
        "ComfyUI with `.alpha`", "diffusion_model.blocks.0.self_attn.q.lora_down.weight",
        lambda: _plain("diffusion_model.", original=True, alpha=1.5, **_KOHYA),
    ),
    "kohya": Layout(
        "kohya, musubi-tuner", "lora_unet_blocks_0_self_attn_q.lora_down.weight",
        lambda: _plain("lora_unet_", original=True, alpha=1.5, is_flat=True, **_KOHYA),
    ),
    "kohya-attention": Layout(
        "the same, attention only", "lora_unet_blocks_0_self_attn_q.lora_down.weight",
        lambda: _plain(
            "lora_unet_", original=True, alpha=1.5, forward=False, is_flat=True, **_KOHYA
        ),
    ),
    "diffsynth": Layout(
        "DiffSynth", "blocks.0.self_attn.q.lora_A.default.weight",
        lambda: _plain("", original=True, **_DEFAULT),
    ),
    "bare-original": Layout(
        "original names alone", "blocks.0.self_attn.q.lora_A.weight",
        lambda: _plain("", original=True),
    ),
    "bare": Layout(
        "diffusers' names alone", "blocks.0.attn1.to_q.lora_A.weight",
        lambda: _plain("", original=False),
    ),
    "peft": Layout(
        "PEFT's own file", "base_model.model.blocks.0.self_attn.q.lora_A.weight",
        lambda: _plain("base_model.model.", original=True),
    ),
    "original-checkpoint": Layout(
        "prefix of original checkpoints",
        "model.diffusion_model.blocks.0.self_attn.q.lora_A.weight",
        lambda: _plain("model.diffusion_model.", original=True),
    ),
    "onetrainer": Layout(
        "OneTrainer", "lora_transformer_blocks_0_attn1_to_q.lora_down.weight",
        lambda: _plain("lora_transformer_", original=False, alpha=1.5, is_flat=True, **_KOHYA),
    ),
    "simpletuner": Layout(
        "SimpleTuner (LyCORIS)", "lycoris_blocks_0_attn1_to_q.lora_down.weight",
        lambda: _plain("lycoris_", original=False, alpha=1.5, is_flat=True, **_KOHYA),
    ),
    "diff_b": Layout(
        "lightx2v, CausVid: biases", "diffusion_model.blocks.0.self_attn.q.diff_b", _biases
    ),
    "diff": Layout(
        "lightx2v: a whole layer's difference", "diffusion_model.patch_embedding.diff",
        lambda: _difference("patch_embedding.diff", "patch_embedding.weight"),
    ),
    "diff-norm": Layout(
        "lightx2v: a norm's difference", "diffusion_model.blocks.0.norm3.diff",
        lambda: _difference("blocks.0.norm3.diff", "blocks.0.norm2.weight"),
    ),
    "w_norm": Layout(
        "LyCORIS: a norm's difference", "diffusion_model.blocks.0.norm3.w_norm",
        lambda: _difference("blocks.0.norm3.w_norm", "blocks.0.norm2.weight"),
    ),
    "diff_m": Layout(
        "lightx2v: modulation", "diffusion_model.blocks.0.diff_m", _modulation
    ),
    "k_img": Layout(
        "attention to a picture that the model lacks",
        "diffusion_model.blocks.0.cross_attn.k_img.lora_down.weight", _to_a_picture,
        note="left out, as [its makers say](https://github.com/ModelTC/LightX2V/issues/417); "
        "the plan says so",
    ),
    "loha": Layout("LoHa", "diffusion_model.blocks.0.self_attn.q.hada_w1_a", _loha),
    "lokr": Layout("LoKr", "lycoris_blocks_0_self_attn_q.lokr_w1", _lokr),
    "dora": Layout(
        "DoRA of kohya and ComfyUI", "diffusion_model.blocks.0.self_attn.q.dora_scale",
        lambda: _dora(".dora_scale", "diffusion_model.", original=True),
    ),
    "dora-input": Layout(
        "DoRA, a magnitude for each input", "diffusion_model.blocks.0.self_attn.q.dora_scale",
        lambda: _dora(".dora_scale", "diffusion_model.", original=True, per_input=True),
    ),
    "dora-peft": Layout(
        "DoRA of PEFT", "transformer.blocks.0.attn1.to_q.lora_magnitude_vector",
        lambda: _dora(".lora_magnitude_vector", "transformer.", original=False),
    ),
}  # fmt: skip


@cache
def made(name: str) -> Made:
    """The file of a layout."""
    return LAYOUTS[name].make()


def wanted(name: str) -> State:
    """All weights of the model, merged by hand in float64."""
    return {**lora_files.state_of(MODEL), **made(name).wanted}


def here(name: str, folder: Path) -> tuple[State, tuple[str, ...]]:
    """The merged weights of Everyframe, and its notes."""
    own = made(name)
    path = lora_files.write(folder / f"{name}.safetensors", own.tensors, own.metadata)
    patches = lora_files.matched(path, MODEL)
    notes = tuple(note for each in patches.applied for note in each.notes)
    return lora_files.merged(patches, lora_files.state_of(MODEL)), notes


def is_right(name: str) -> bool:
    """Whether the weights here are those of merging by hand."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found, _ = here(name, Path(folder))
        except CheckpointError:
            return False
    return lora_files.largest_error(found, wanted(name)) < LIMIT
