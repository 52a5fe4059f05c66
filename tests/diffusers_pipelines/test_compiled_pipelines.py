"""A compiled diffusers pipeline is the pipeline that it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanPipeline

import everyframe
from everyframe.core.errors import InputError
from everyframe.core.request import Request
from everyframe.fast_paths.apply import block_names, swap_modules
from everyframe.fast_paths.compilation import package_store
from everyframe.fast_paths.compilation.block_state import describe
from everyframe.fast_paths.compilation.module_compilation import compiled_blocks, disable_compiled
from everyframe.fast_paths.registry import CATALOGUE
from everyframe.media.video import Video
from helpers.compiled_blocks import compile_for
from helpers.planted_compiler import PlantedCompiler
from helpers.tiny_checkpoints import pipelines
from helpers.tiny_checkpoints.diffusers import CASES

CALL: dict[str, Any] = {"height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 2,
                        "output_type": "np"}  # fmt: skip


@pytest.fixture
def pipe(tmp_path: Path) -> Any:
    pipelines.wan(tmp_path / "wan")
    found = WanPipeline.from_pretrained(tmp_path / "wan")
    found.set_progress_bar_config(disable=True)
    return found


def called(pipe: Any, **more: Any) -> np.ndarray[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    frames: np.ndarray[Any, Any] = pipe("a", generator=generator, **{**CALL, **more}).frames
    return frames


def as_written(pipe: Any, **more: Any) -> np.ndarray[Any, Any]:
    undo = disable_compiled(pipe.transformer)
    frames = called(pipe, **more)
    undo()
    return frames


def test_what_a_call_changes_is_computed(pipe: Any, compiler: PlantedCompiler) -> None:
    compiler.is_dynamic = True
    assert everyframe.compile(pipe) is pipe
    assert type(pipe) is WanPipeline
    seen = []
    for more in ({}, {"guidance_scale": 1.0}, {"num_frames": 9}, {"width": 32}):
        frames = called(pipe, **more)
        # The same programs in float32: a thousandth of a step of eight bits.
        assert np.abs(frames - as_written(pipe, **more)).max() < 1e-5
        seen.append(frames)
    assert all(block.is_compiled for block in compiled_blocks(pipe.transformer).values())
    # One for all sizes; diffusers calls both branches one after the other.
    assert compiler.count == 1
    assert np.abs(seen[0] - seen[1]).max() > 1e-3


def test_it_is_cast_saved_and_loaded(pipe: Any, compiler: PlantedCompiler, tmp_path: Path) -> None:
    everyframe.compile(pipe)
    pipe.to(torch.float64)
    assert np.abs(called(pipe) - as_written(pipe)).max() < 1e-5
    folder = everyframe.save_compiled(pipe, tmp_path / "compiled")
    pipe.save_pretrained(tmp_path / "again")
    other = WanPipeline.from_pretrained(tmp_path / "again", dtype=torch.float64)
    other.set_progress_bar_config(disable=True)
    want = called(other)
    everyframe.load_compiled(folder, other)
    assert np.abs(called(other) - want).max() < 1e-5
    assert compiler.count == 1


def test_other_weights_are_used(pipe: Any, compiler: PlantedCompiler) -> None:
    """As a LoRA that is merged into them."""
    everyframe.compile(pipe)
    before = called(pipe)
    for parameter in pipe.transformer.blocks[0].parameters():
        parameter.data += 0.05
    after = called(pipe)
    assert np.abs(after - before).max() > 1e-4
    assert np.abs(after - as_written(pipe)).max() < 1e-5
    assert compiler.count == 1


def test_a_run_from_files_uses_what_was_compiled_for_it(
    tmp_path: Path, compiler: PlantedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its components cast what they are given, also where all is float32: so must the trial's."""
    pipelines.wan(tmp_path / "wan")
    asked = {"model": str(tmp_path / "wan"), "prompt": "a", "seed": 1, "device": "cpu",
             "dtype": "fp32", "height": 16, "width": 16, "num_frames": 5,
             "num_inference_steps": 10}  # fmt: skip
    compiler.by = 1 + 5e-6  # tells its results from those of blocks as written
    for name in ("transformer", "transformer_2"):
        compile_for(Request(**asked), monkeypatch, name)

    def made(*off: str) -> Video:
        return everyframe.generate(**asked, run_dir="off", output="float", disable=off)

    video, written = made(), made("compile").frames
    assert 0 < np.abs(video.frames - written).max() < 1e-3
    assert "notes" not in video.record

    # Its plan was made, and the packages are gone: each model says so once for the video.
    monkeypatch.setattr(package_store, "find", lambda name: iter(()))
    video = made()
    assert np.array_equal(video.frames, written)
    why = "it isn't compiled yet (`everyframe compile` does it)"
    assert video.record["notes"] == [
        f"{name}: compiled blocks run as written: {why}"
        for name in ("transformer", "transformer_2")
    ]


def test_components_are_named(pipe: Any) -> None:
    with pytest.raises(InputError, match="has no component 'transfomer' among"):
        everyframe.compile(pipe, components=("transfomer",))
    for module in (torch.nn.Linear(2, 2), torch.nn.GELU()):
        with pytest.raises(InputError, match="has no list of blocks that could be compiled"):
            everyframe.compile(module)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_block_can_be_described(name: str) -> None:
    """As written and by the fast paths: what can't be described is never compiled."""
    with CASES[name].within():
        pipe = CASES[name].build()
    modules = [each for each in pipe.components.values() if isinstance(each, torch.nn.Module)]
    assert any(map(block_names, modules))
    for paths in ((), tuple(CATALOGUE)):
        for module in modules:
            swap_modules(module, paths)
            for place in block_names(module):
                assert not describe(module.get_submodule(place)).why_not, place
