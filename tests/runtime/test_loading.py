"""One component out of a plan: strictly filled, in its precision, ready to be called."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from everyframe.checkpoints.key_map import KeyMap
from everyframe.core.errors import CheckpointError
from everyframe.core.plan import ComponentPlan, Precision
from everyframe.runtime import loading
from everyframe.runtime.components.meta_init import build_on_meta, count_elements
from everyframe.runtime.loading import (
    load_component,
    release_components,
)


class Small(nn.Module):
    """A wide embedding table, a buffer that is stored, one that is not, and a tied weight."""

    table: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.inner.weight
        self.register_buffer("table", torch.ones(5))
        self.register_buffer("steps", torch.zeros(1), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        self.steps = torch.full((1,), 7.0)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.inner(x)) * self.steps + self.table[:3]
        return answer


def part(precision: str = "float32") -> ComponentPlan:
    return ComponentPlan(
        "small", "small", "stage", "here", 0, "cpu", Precision(precision, precision), 0, 0
    )


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "small.safetensors"
    tensors = {
        "inner.weight": torch.eye(3), "inner.bias": torch.tensor([0.0, 1, 2]),
        "table": torch.full((5,), 1 + 2.0**-20),
    }  # fmt: skip
    save_file(tensors, path)
    return path


def test_it_is_filled_and_ready(weights: Path) -> None:
    module = load_component(part(), Small, weights, KeyMap())
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())
    assert module.head.weight is module.inner.weight
    assert module.steps.item() == 7
    x = torch.ones(1, 3)
    torch.testing.assert_close(module(x), torch.tensor([[8.0, 15, 22]]) + 2.0**-20)


def test_buffers_stay_wide_and_results_too(weights: Path) -> None:
    module = load_component(part("bfloat16"), Small, weights, KeyMap())
    assert module.inner.weight.dtype == torch.bfloat16
    assert module.table.dtype == torch.float32
    assert module.table[0].item() == 1 + 2.0**-20
    assert module(torch.ones(1, 3)).dtype == torch.float32


def test_it_is_strict(weights: Path) -> None:
    save_file({"inner.weight": torch.eye(3), "table": torch.ones(5)}, weights)
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor: 'inner.bias'"):
        load_component(part(), Small, weights, KeyMap())


def test_parameters_are_counted_once_and_not_allocated() -> None:
    assert count_elements(build_on_meta(Small)) == {"inner.weight": 9, "inner.bias": 3, "table": 5}
    huge = count_elements(build_on_meta(lambda: nn.Linear(1_000_000, 1_000_000, bias=False)))
    assert huge == {"weight": 10**12}


def test_weights_are_not_drawn_where_there_are_no_numbers() -> None:
    drawn: list[str] = []

    class Watched(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            drawn.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Watched():
        module = build_on_meta(lambda: nn.Linear(3, 3))
        assert not [name for name in drawn if name.endswith("uniform_")]
        table = torch.empty(4)
        build_on_meta(lambda: (nn.init.ones_(table), nn.Linear(1, 1))[1])
    assert module.weight.is_meta
    assert torch.equal(table, torch.ones(4))


@pytest.mark.parametrize("whose", ["", "inner"])
def test_what_is_part_of_a_cycle_is_let_go_as_well(
    whose: str, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    collect = gc.collect
    monkeypatch.setattr(loading.gc, "collect", lambda: asked.append(collect()))
    gc.disable()
    try:
        with release_components():
            module = load_component(part(), Small, weights, KeyMap())
            gone = weakref.ref(module)
            del module
        assert gone() is None
        assert not asked  # it looks at everything in the process
        with release_components():
            module = load_component(part(), Small, weights, KeyMap())
            held = module.get_submodule(whose)
            held.itself = [held]  # type: ignore[assignment]
            gone = weakref.ref(held)
            del module, held
        assert gone() is None
        assert len(asked) == 1
    finally:
        gc.enable()


def test_what_somebody_else_holds_is_nobody_elses_affair(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = load_component(part(), Small, weights, KeyMap())
    asked: list[int] = []
    monkeypatch.setattr(loading.gc, "collect", lambda: asked.append(1))
    with release_components():
        pass
    assert held is not None
    assert not asked
