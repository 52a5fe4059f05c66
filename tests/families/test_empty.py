"""A model's parts without numbers: one that was only counted is filled, others are built anew."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from everyframe.families.empty import Empty


@dataclass(frozen=True)
class Layer(Empty):
    """One part, and how often it was built."""

    built: list[str] = field(default_factory=list)

    @property
    def parts(self) -> tuple[str, ...]:
        return ("layer",)

    def build(self, component: str) -> nn.Module:
        self.built.append(component)
        return nn.Linear(3, 1, bias=False)

    def outputs(self, component: str) -> tuple[str, ...]:
        return ("",)


def test_what_was_counted_is_what_is_filled() -> None:
    layer = Layer()
    assert layer.num_elements == {"layer": {"weight": 3}}
    counted = layer.empty("layer")
    assert layer.taken("layer") is counted
    assert layer.built == ["layer"]


def test_nobody_has_what_another_took() -> None:
    layer = Layer()
    first, second = layer.taken("layer"), layer.taken("layer")
    assert len({id(each) for each in (first, second, layer.empty("layer"))}) == 3
    assert layer.empty("layer") is layer.empty("layer")


def test_what_a_dry_run_had_is_never_filled() -> None:
    """It was cast, and may have lost layers."""
    layer = Layer()
    assert layer.num_elements
    rehearsed = layer.rehearsal("denoise", "layer", lambda module, device: None, 1).module()
    rehearsed.half()
    taken = layer.taken("layer")
    assert taken is not rehearsed
    assert taken.weight.dtype == torch.float32
    assert taken.weight.is_meta
