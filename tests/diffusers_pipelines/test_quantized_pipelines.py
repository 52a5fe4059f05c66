"""Pipelines by folder with weights in eight bits, or in the blocks of a GGUF file."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everyframe
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.core.errors import InputError
from everyframe.core.plan import Precision
from everyframe.precision.quantization import layers, quantize
from helpers.components import originals, stored
from helpers.loras import files as lora_files
from helpers.loras.files import as_lora, factors_for
from helpers.tiny_checkpoints import families as tiny_families
from helpers.tiny_checkpoints.pipelines import loaded

KINDS = ["int8", pytest.param("fp8", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def wan(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("wan")


def frames(model: Path, **more: Any) -> np.ndarray[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", everyframe.EveryframeWarning)
        video = everyframe.generate(
            **tiny_families.asked("wan", model=str(model), run_dir="off", dtype="fp32", **more)
        )
    assert isinstance(video, everyframe.Video)
    return np.asarray(video.frames)


def rounded(module: nn.Module, islands: tuple[str, ...], kind: str) -> None:
    """The weights that eight bits stand for, in the module's own layers."""
    precision = Precision("float32", "float32", islands, kind)
    for layer in layers(module, precision).values():
        codes, scales = quantize(layer.weight.detach(), kind, torch.device("cpu"))
        wide = codes if kind == "int8" else codes.view(torch.float8_e4m3fn)
        layer.weight.data = wide.float() * scales


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_that_of_the_rounded_weights(wan: Path, kind: str) -> None:
    asked = tiny_families.asked("wan", model=str(wan), dtype="fp32", quantize=kind)
    plan = everyframe.plan(**asked)
    whole = everyframe.plan(**{**asked, "quantize": "none"})
    pipe = loaded(wan)
    for part in plan.components:
        is_narrow = part.name != "vae"
        assert part.precision.weight_dtype == (kind if is_narrow else "")
        if is_narrow:
            assert part.weight_bytes < 0.75 * whole.component(part.name).weight_bytes
            rounded(getattr(pipe, part.name), part.precision.islands, kind)
    wanted = everyframe.run(pipe, **{name: asked[name] for name in asked if name not in (
        "model", "dtype", "quantize")})  # fmt: skip
    found = frames(wan, quantize=kind)
    assert np.abs(found.astype(int) - np.asarray(wanted.frames)).max() <= 1
    assert not np.array_equal(found, frames(wan, quantize="none"))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_called_by_the_name_of_their_input(
    tiny_models: Callable[[str], Path], kind: str
) -> None:
    """AnimateDiff's motion modules call ``proj_in(input=...)``, which no quantized layer took."""
    asked = tiny_families.asked("animatediff", model=str(tiny_models("animatediff")), dtype="fp32")
    found, wanted = (
        everyframe.generate(**{**asked, "run_dir": "off", "quantize": each})
        for each in (kind, "none")
    )
    assert isinstance(found, everyframe.Video)
    assert isinstance(wanted, everyframe.Video)
    assert found.frames.shape == wanted.frames.shape
    assert not np.array_equal(found.frames, wanted.frames)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_has_the_same_bits(wan: Path, tmp_path: Path, kind: str) -> None:
    everyframe.save(wan, tmp_path / "saved", quantize=kind)
    wanted = frames(wan, quantize=kind)
    assert np.array_equal(frames(tmp_path / "saved", quantize=kind), wanted)
    size = [sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
            for folder in (wan / "transformer", tmp_path / "saved" / "transformer")]  # fmt: skip
    assert size[1] < size[0]
    # Without the option the same rounded weights are widened as they are loaded.
    wide = frames(tmp_path / "saved", quantize="none")
    assert np.abs(wide.astype(int) - wanted.astype(int)).max() <= 1


def test_names_of_an_older_diffusers_are_read_by_it(wan: Path, tmp_path: Path) -> None:
    """Such a folder is quantized after it is loaded, and can't be saved so."""
    from everyframe.diffusers_pipelines import loading
    from everyframe.diffusers_pipelines.files import component_tensors, saved_files

    wanted = frames(wan, quantize="int8")
    with pytest.MonkeyPatch.context() as patch:
        for module in (component_tensors, loading, saved_files):
            patch.setattr(module, "has_own_names", lambda part: False)
        # The libraries' own way to build a module leads to other kernels in the last bits.
        assert np.abs(frames(wan, quantize="int8").astype(int) - wanted).max() <= 1
        with pytest.raises(InputError, match="by names of an older diffusers"):
            everyframe.save(wan, tmp_path / "saved", quantize="int8")
    assert not (tmp_path / "saved").exists()


# ------------------------------------------------------------------------------------------ GGUF


@pytest.fixture(scope="module")
def umt5(wan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text encoder, whose rows are whole blocks, by its own names as GGUF."""
    pytest.importorskip("gguf", reason="the package that reads GGUF is not installed")
    opened = open_checkpoint(wan / "text_encoder")
    state = {name: opened.load(name) for name in opened}
    path = tmp_path_factory.mktemp("gguf") / "umt5.gguf"
    return stored.write_gguf(path, originals.OTHER_NAMES["umt5"](state), "Q8_0", "t5")[0]


def test_blocks_stay_in_memory_and_give_the_same_bits(wan: Path, umt5: Path) -> None:
    components = {"text_encoder": umt5}
    wanted = frames(wan, components=components, quantize="none")
    assert np.array_equal(frames(wan, components=components, quantize="gguf"), wanted)
    asked = tiny_families.asked("wan", model=str(wan), dtype="fp32", components=components)
    packed, wide = (everyframe.plan(**asked, quantize=kind) for kind in ("gguf", "none"))
    part = packed.component("text_encoder")
    assert part.precision.weight_dtype == "gguf"
    assert packed.component("transformer").precision.weight_dtype == ""
    assert part.weight_bytes < 0.75 * wide.component("text_encoder").weight_bytes
    assert any("stay in the blocks of their GGUF file" in note for note in packed.notes)


def test_a_lora_on_blocks_is_merged_into_what_it_changes(
    wan: Path, umt5: Path, tmp_path: Path
) -> None:
    opened = open_checkpoint(wan / "text_encoder")
    state = {name: opened.load(name) for name in opened}
    factors = factors_for(state, lora_files.matrices(state, "SelfAttention")[:2], alpha=0.4)
    lora_files.write(tmp_path / "a.safetensors", as_lora(factors, "text_encoder."))
    more = {"components": {"text_encoder": umt5}, "loras": [str(tmp_path / "a.safetensors")]}
    wanted = frames(wan, quantize="none", **more)
    assert not np.array_equal(wanted, frames(wan, quantize="none", components=more["components"]))
    assert np.array_equal(frames(wan, quantize="gguf", **more), wanted)


def test_what_has_no_blocks_or_is_not_on_the_cpu_is_refused(wan: Path, umt5: Path) -> None:
    asked = tiny_families.asked("wan", model=str(wan), quantize="gguf")
    with pytest.raises(InputError, match="quantize has no effect"):
        everyframe.plan(**asked)
    with pytest.raises(InputError, match="on the CPU only, not on"):
        everyframe.plan(**asked, components={"text_encoder": umt5}, profile="cuda-sm89")


def test_blocks_stay_where_nothing_else_fits(wan: Path, umt5: Path) -> None:
    """`auto` keeps a file's own blocks before it rounds anything."""
    asked = tiny_families.asked("wan", model=str(wan), components={"text_encoder": umt5})
    whole = everyframe.plan(**asked, quantize="none")
    assert not [note for note in everyframe.plan(**asked).notes if "blocks" in note]
    least = everyframe.plan(**asked, quantize="gguf")
    between = (whole.peak_bytes + least.peak_bytes) // 2
    assert least.peak_bytes < between < whole.peak_bytes
    plan = everyframe.plan(**asked, max_memory=str(between), max_host_memory=str(between))
    kinds = {part.name: part.precision.weight_dtype for part in plan.components}
    assert kinds["text_encoder"] == "gguf"
    assert plan.infeasible is None
