"""The watch over module calls in a worker: compiled blocks are used under it, as anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

import everyframe
from everyframe.checkpoints import read_progress
from everyframe.core.request import Request
from everyframe.engine.workers.flight_recorder import FlightRecorder, read_last_position
from everyframe.engine.workers.module_watch import ModuleWatch
from everyframe.fast_paths.compilation import package_store
from everyframe.fast_paths.compilation.loaded_package import LoadedPackage
from everyframe.fast_paths.compilation.module_compilation import compiled_blocks
from everyframe.fast_paths.compilation.toolchain import why_not
from helpers.compiled_blocks import Model, compile_for, inputs, made
from helpers.planted_compiler import PlantedCompiler
from helpers.tiny_checkpoints import families as tiny_families


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hooks of all modules, and watchers of reads, are gone after the test."""
    monkeypatch.setattr(read_progress, "_WATCHERS", [])
    before = set(global_hooks._global_forward_pre_hooks)
    yield
    for key in set(global_hooks._global_forward_pre_hooks) - before:
        del global_hooks._global_forward_pre_hooks[key]


def used(model: Model) -> bool:
    """Call a compiled model; whether its blocks were computed by their packages."""
    with torch.no_grad():
        want = made()(*inputs())
        torch.testing.assert_close(model(*inputs()), want, rtol=2e-5, atol=2e-5)
    return all(each.report.packages for each in compiled_blocks(model).values())


def test_compiled_blocks_are_used_and_recorded(
    compiler: PlantedCompiler, hooks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that dies in compiled code names the block."""
    trail = FlightRecorder(tmp_path / "trail")
    watch = ModuleWatch(trail)
    watch.add("denoiser")
    trail.at("denoise", 1, 2)
    model = everyframe.compile(made())
    assert used(model)
    assert compiler.count == 1
    places, run = [], LoadedPackage.run

    def look(self: LoadedPackage, *given: Any) -> Any:
        places.append(read_last_position(tmp_path / "trail").module)
        return run(self, *given)

    monkeypatch.setattr(LoadedPackage, "run", look)
    watch.begin()
    watch.add("denoiser")
    with torch.no_grad():
        everyframe.compile(model)(*inputs())
    assert places == ["denoiser.blocks.0 (Block)", "denoiser.blocks.1 (Block)"]
    trail.close()


def test_a_watch_that_may_change_a_call_is_obeyed(
    compiler: PlantedCompiler, hooks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModuleWatch, "only_watches", False)
    ModuleWatch(FlightRecorder(tmp_path / "trail"))
    assert not used(everyframe.compile(made()))
    assert compiler.count == 0


def test_a_hook_beside_the_watch_is_obeyed(
    compiler: PlantedCompiler, hooks: None, tmp_path: Path
) -> None:
    ModuleWatch(FlightRecorder(tmp_path / "trail"))
    model, x = everyframe.compile(made()), inputs()

    def double(module: nn.Module, args: Any, result: Tensor) -> Tensor | None:
        return result * 2 if isinstance(module, nn.LayerNorm) else None

    assert used(model)
    with torch.no_grad():
        plain = model(*x)
        handle = nn.modules.module.register_module_forward_hook(double)
        try:
            changed, want = model(*x), made()(*x)
        finally:
            handle.remove()
        torch.testing.assert_close(changed, want)
        assert float((changed - plain).abs().max()) > 0.01


@pytest.mark.slow
@pytest.mark.skipif(bool(missing := why_not()), reason=str(missing))
def test_compiled_blocks_are_used_by_engines_and_their_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real compiler; float32 bits tell whose result it is, as sums have another order."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    folder = str(tiny_families.made("stepvideo", tmp_path))
    asked = tiny_families.asked(
        "stepvideo", num_inference_steps=4, model=folder, dtype="fp32", run_dir="off",
        output="float",
    )  # fmt: skip
    request = {name: value for name, value in asked.items() if name not in ("run_dir", "output")}
    compile_for(Request(**request), monkeypatch)
    files = sorted(package_store.packages_folder().rglob("*"))
    seeds, off = (3, 4), {"disable": ["compile"]}
    videos = [everyframe.generate(**{**asked, "seed": each}) for each in seeds]
    compiled = [video.frames for video in videos]
    written = [everyframe.generate(**{**asked, "seed": each}, **off).frames for each in seeds]
    for mine, other in zip(compiled, written, strict=True):
        assert not np.array_equal(mine, other)
        assert np.abs(mine - other).max() < 1e-3
    for isolate in (False, True):
        with everyframe.load(folder, isolate=isolate) as engine:
            for number in (0, 0, 1):
                own = {name: value for name, value in asked.items() if name != "model"}
                video = engine.generate(**{**own, "seed": seeds[number]})
                assert np.array_equal(video.frames, compiled[number]), (isolate, number)
                videos.append(video)
    assert sorted(package_store.packages_folder().rglob("*")) == files, "compiled once more"
    assert not [video for video in videos if "run as written" in str(video.record.get("notes"))]
