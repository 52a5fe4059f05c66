"""A LoRA gives the bits of a checkpoint that was merged by hand, however its weights are loaded."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import everyframe
from everyframe.checkpoints.key_map import KeyMap
from everyframe.checkpoints.patched_file import PatchedTensorFile, with_patches
from everyframe.checkpoints.tensor_file import TensorFile, open_checkpoint
from everyframe.core.errors import CheckpointError
from everyframe.core.lora import Lora
from everyframe.core.request import Request
from everyframe.planning.resolve import PreparedPlan, prepare
from everyframe.runtime.components.component_observers import on_component_loaded
from helpers import plans as planned
from helpers.diagonals import diagonal
from helpers.loras import files as lora_files
from helpers.loras.files import Factors, as_lora, factors_for
from helpers.slow_rows import slow_unless
from helpers.tiny_checkpoints import families as tiny_families

#: Where the denoiser's weights lie in each tiny checkpoint.
DENOISER = {
    "opensora-1.0": "OpenSora-v1-HQ-16x256x256.pth",
    "opensora-1.2": "model.safetensors",
    "opensora2": "Open_Sora_v2.safetensors",
    "svd": "unet",
    "inpaint": "unet",
    "stepvideo": "transformer",
    "wan": "transformer",
    "ltx": "transformer",
    "hunyuan": "transformer",
    "cogvideox": "transformer",
    "animatediff": "unet",
}
#: Of which the fast set has these: what weights a LoRA merges to in each family is tested in
#: `test_lora_models.py`.
FAST = ("opensora-1.2", "wan")
#: Message after the file of a LoRA for a model with two denoisers.
AT = {"wan": "@high"}


def weights_of(name: str, folder: Path) -> dict[str, Tensor]:
    """The denoiser's tensors."""
    file = open_checkpoint(folder / DENOISER[name])
    return {key: file.load(key) for key in file}


def factors_of(name: str, folder: Path, *, seed: int = 0) -> dict[str, Factors]:
    """Small factors for every matrix of the denoiser, with alpha."""
    state = weights_of(name, folder)
    found = factors_for(state, lora_files.matrices(state), alpha=1.5, seed=seed)
    return {key: Factors(each.down * 0.3, each.up * 0.3, each.alpha) for key, each in found.items()}


def merged_by_hand(weight: Tensor, each: Factors, strength: float) -> Tensor:
    """The float32 weight that the order of operations in the documentation gives."""
    delta = (each.up.flatten(1) @ each.down.flatten(1)).reshape(weight.shape)
    return weight.float() + delta * (each.scale * strength)


def with_merged(
    name: str, folder: Path, to: Path, changes: list[tuple[Mapping[str, Factors], float]]
) -> Path:
    """A copy of the checkpoint whose denoiser holds the merged weights."""
    shutil.copytree(folder, to)
    place = to / DENOISER[name]
    for file in [place] if place.is_file() else [*place.glob("*.safetensors")]:
        opened = open_checkpoint(file)
        tensors = {key: opened.load(key) for key in opened}
        for factors, strength in changes:
            for key, each in factors.items():
                if f"{key}.weight" in tensors:
                    weight = tensors[f"{key}.weight"]
                    tensors[f"{key}.weight"] = merged_by_hand(weight, each, strength)
        if file.suffix == ".pth":
            torch.save(tensors, file)
        else:
            save_file(tensors, file, {"format": "pt"})
    return to


@contextmanager
def loaded_states() -> Iterator[list[tuple[str, dict[str, Tensor]]]]:
    """Context: the components that are loaded in it, with copies of their weights."""
    found: list[tuple[str, dict[str, Tensor]]] = []

    def look(name: str, module: nn.Module) -> None:
        state = {key: each.clone() for key, each in module.state_dict().items()}
        found.append((name, state))

    with on_component_loaded(look):
        yield found


def video(name: str, folder: Path, **more: Any) -> tuple[np.ndarray[Any, Any], Any]:
    """Its frames, and the weights that were loaded for it."""
    with loaded_states() as states, warnings.catch_warnings():
        warnings.simplefilter("ignore", everyframe.EveryframeWarning)
        asked = tiny_families.asked(name, model=str(folder), **more)
        made = everyframe.generate(**{**asked, "run_dir": "off"})
    return np.asarray(made.frames), states


def same(one: Any, other: Any) -> bool:
    """Whether the same components were loaded with the same bits."""
    assert [name for name, _ in one] == [name for name, _ in other]
    return all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a if not a[key].is_meta)
        for (_, a), (_, b) in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", slow_unless(FAST, DENOISER))
def test_a_lora_gives_the_bits_of_a_merged_checkpoint(
    name: str, tiny_root: Path, tmp_path: Path
) -> None:
    folder = tiny_families.made(name, tiny_root)
    factors, others = factors_of(name, folder), factors_of(name, folder, seed=40)
    one = lora_files.write(tmp_path / "one.safetensors", as_lora(factors, "transformer."))
    two = lora_files.write(
        tmp_path / "two.safetensors", as_lora(others, "lora_unet_", is_flat=True)
    )
    by_hand = with_merged(name, folder, tmp_path / "merged", [(factors, 0.7), (others, -0.4)])
    at = AT.get(name, "")
    second = Lora(str(two), -0.4, at[1:])
    frames, states = video(name, folder, loras=[f"{one}:0.7{at}", second])
    wanted, merged = video(name, by_hand)
    plain, unchanged = video(name, folder)
    assert same(states, merged)
    assert not same(states, unchanged)
    assert np.array_equal(frames, wanted)
    assert not np.array_equal(frames, plain)
    nothing, as_before = video(name, folder, loras=[f"{one}:0{at}", f"{two}:0{at}"])
    assert same(as_before, unchanged)
    assert np.array_equal(nothing, plain)


@pytest.mark.parametrize(
    ("name", "start"),
    [("inpaint", ""), pytest.param("animatediff", "text_model.", marks=pytest.mark.slow)],
)
def test_text_encoders_by_kohyas_names(
    name: str, start: str, tiny_root: Path, tmp_path: Path
) -> None:
    """CLIP below ``text_model``, as older files have it, and without, as newer ones do."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_families.made(name, tiny_root), folder)
    (file,) = (folder / "text_encoder").glob("*.safetensors")
    opened = open_checkpoint(file)
    tensors = {key.removeprefix("text_model."): opened.load(key) for key in opened}
    factors = factors_for(tensors, lora_files.matrices(tensors, "self_attn"), alpha=1.5)
    merged = {
        **tensors,
        **{
            f"{key}.weight": merged_by_hand(tensors[f"{key}.weight"], each, 0.7)
            for key, each in factors.items()
        },
    }
    path = lora_files.write(
        tmp_path / "one.safetensors",
        as_lora(factors, "lora_te_text_model_", ".lora_down.weight", ".lora_up.weight",
                is_flat=True),
    )  # fmt: skip

    def stored(state: dict[str, Tensor]) -> None:
        named = {start + key: each.contiguous() for key, each in state.items()}
        save_file(named, file, {"format": "pt"})

    stored(tensors)
    _, states = video(name, folder, loras=f"{path}:0.7")
    _, plain = video(name, folder)
    stored(merged)
    _, wanted = video(name, folder)
    assert same(states, wanted)
    assert not same(states, plain)


@pytest.mark.parametrize(
    ("name", "how"), diagonal(["opensora-1.2", "stepvideo", "wan"], ["int8", "fp8", "bf16"])
)
def test_in_every_precision(name: str, how: str, tiny_root: Path, tmp_path: Path) -> None:
    """The sum is rounded once, to what the weight is stored in."""
    if name == "wan" and how != "bf16":
        pytest.skip("pipelines have no weights of eight bits")
    folder = tiny_families.made(name, tiny_root)
    factors = factors_of(name, folder)
    path = lora_files.write(tmp_path / "one.safetensors", as_lora(factors))
    by_hand = with_merged(name, folder, tmp_path / "merged", [(factors, 0.7)])
    more = {"dtype": "bf16"} if how == "bf16" else {"quantize": how}
    frames, states = video(name, folder, loras=f"{path}:0.7{AT.get(name, '')}", force=True, **more)
    wanted, merged = video(name, by_hand, force=True, **more)
    kinds = {each.dtype for _, state in states for each in state.values()}
    assert (torch.bfloat16 if how == "bf16" else torch.int8) in kinds
    assert same(states, merged)
    assert np.array_equal(frames, wanted)


def test_the_order_of_several_counts(tiny_root: Path, tmp_path: Path) -> None:
    """Sums of float32 depend on it, so it is the order in which they are given."""
    folder = tiny_families.made("opensora-1.2", tiny_root)
    factors, others = factors_of("opensora-1.2", folder), factors_of("opensora-1.2", folder, seed=9)
    one = lora_files.write(tmp_path / "one.safetensors", as_lora(factors))
    two = lora_files.write(tmp_path / "two.safetensors", as_lora(others))
    both = [(factors, 0.7), (others, 1.0)]
    for number, changes in enumerate((both, both[::-1])):
        by_hand = with_merged("opensora-1.2", folder, tmp_path / f"merged{number}", changes)
        given = [f"{one}:0.7", str(two)]
        _, states = video("opensora-1.2", folder, loras=given if not number else given[::-1])
        assert same(states, video("opensora-1.2", by_hand)[1])


@pytest.mark.parametrize(("name", "kind"), diagonal(["opensora-1.2", "stepvideo"], ["int8", ""]))
def test_weights_that_wait_elsewhere(name: str, kind: str, tiny_root: Path, tmp_path: Path) -> None:
    """In host memory, or in their file: then each block is merged anew as it is fetched."""
    folder = tiny_families.made(name, tiny_root)
    factors = factors_of(name, folder)
    path = lora_files.write(tmp_path / "one.safetensors", as_lora(factors))
    by_hand = with_merged(name, folder, tmp_path / "merged", [(factors, 0.7)])
    more = {"quantize": kind} if kind else {}

    def prepared(model: Path, **loras: Any) -> PreparedPlan:
        return prepare(Request(**tiny_families.asked(name, model=str(model), **more, **loras)))

    ours, wanted = prepared(folder, loras=f"{path}:0.7"), prepared(by_hand)
    expected = planned.frames_of(wanted, planned.unchanged)
    assert not np.array_equal(planned.frames_of(prepared(folder), planned.unchanged), expected)
    for how in ({}, {"block_offload": True}, {"block_offload": True, "from_disk": True}):
        change = planned.with_components(**how)
        assert np.array_equal(planned.frames_of(ours, change), expected), how


@pytest.mark.slow
def test_weights_that_ranks_hold_between_them(tiny_root: Path, tmp_path: Path) -> None:
    """Each rank merges the blocks that it holds, in a process of its own."""
    folder = tiny_families.made("stepvideo", tiny_root)
    factors = factors_of("stepvideo", folder)
    path = lora_files.write(tmp_path / "one.safetensors", as_lora(factors))
    by_hand = with_merged("stepvideo", folder, tmp_path / "merged", [(factors, 0.7)])
    shared = {"devices": "cpu,cpu", "shard_weights": True}
    found, _ = video("stepvideo", folder, loras=f"{path}:0.7", **shared)
    wanted, _ = video("stepvideo", by_hand, **shared)
    plain, _ = video("stepvideo", folder, **shared)
    assert np.array_equal(found, wanted)
    assert not np.array_equal(found, plain)


# ------------------------------------------------------------------------------- the patched file


def checkpoint(path: Path, **tensors: Tensor) -> TensorFile:
    save_file(tensors, path)
    return open_checkpoint(path)


def test_a_patch_is_computed_in_float32_and_rounded_once(tmp_path: Path) -> None:
    a = torch.randn(3, 5).to(torch.bfloat16)
    base = checkpoint(tmp_path / "a.safetensors", a=a, b=a.clone())
    file = PatchedTensorFile(base, {"a": lambda x: x + 2**-12})
    wide = a.float() + 2**-12
    assert torch.equal(file.load("a"), wide)
    assert torch.equal(file.load("a", dtype=torch.bfloat16), wide.to(torch.bfloat16))
    assert torch.equal(file.load("a", dtype=torch.float16), wide.to(torch.float16))
    assert torch.equal(file.load("b"), a)
    assert file.load("b").dtype == torch.bfloat16
    assert (file.names(), file.shape("a"), file.source) == (base.names(), (3, 5), base.source)


def test_patches_are_by_names_of_the_module(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "a.safetensors", old=torch.zeros(2), tied=torch.zeros(2))
    keys = KeyMap(rename=((r"^old$", "new"),), tied=(("new", "tied"),))
    file = with_patches(base, keys, {"new": lambda x: x + 1})
    assert torch.equal(file.load("old"), torch.ones(2))
    assert torch.equal(file.load("tied"), torch.ones(2)), "tied weights stay equal"
    assert with_patches(base, keys, {}) is base
    with pytest.raises(CheckpointError, match="has no tensor for 'other', which a LoRA changes"):
        with_patches(base, keys, {"other": lambda x: x})
