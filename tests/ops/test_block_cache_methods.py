"""What the benchmark of caches between blocks puts in the model's place computes the same video."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import everyframe
from everyframe.runtime.components.component_observers import on_component_loaded

PLACE = Path(__file__).parents[2] / "benchmarks" / "block_cache_methods.py"


@pytest.fixture
def block_cache_methods(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("block_cache_methods", PLACE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "block_cache_methods", made)
    spec.loader.exec_module(made)
    return made


def test_a_cache_that_computes_every_block_gives_the_exact_video(block_cache_methods: Any) -> None:
    wanted: dict[str, Any] = {"num_inference_steps": 2, "num_frames": 1, "seed": 1}
    wanted |= {"output": "float", "run_dir": "off", "device": "cpu"}
    stacks: list[Any] = []

    def compute_all(x: Tensor, t: float, blocks: Any) -> Tensor:
        return block_cache_methods.through(x, blocks)  # type: ignore[no-any-return]

    def put_in_place(name: str, module: nn.Module) -> None:
        if name == "denoiser":
            stacks.append(block_cache_methods.CachedStack(module, compute_all))
            stacks[-1].__enter__()

    with on_component_loaded(put_in_place):
        cached = everyframe.generate("a red circle", **wanted)
    (stack,) = stacks
    assert stack.num_steps == 2
    assert stack.num_computed == 2 * 8
    exact = everyframe.generate("a red circle", **wanted)
    assert (cached.frames == exact.frames).all()
