"""A model's parts without numbers: one that was only counted is filled, others are built anew."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from everyframe.core.errors import CorruptRunError
from everyframe.precision.policy import ComponentNeeds
from everyframe.runtime.model_spec import ModuleBuilder

pytestmark = pytest.mark.usefixtures("own_cache")


@dataclass(frozen=True)
class Layer(ModuleBuilder[None]):
    """One part, and how often it was built."""

    config: None = None
    built: list[str] = field(default_factory=list, repr=False)

    @property
    def component_names(self) -> tuple[str, ...]:
        return ("layer",)

    def build(self, component: str) -> nn.Module:
        self.built.append(component)
        return nn.Linear(3, 1, bias=False)

    def outputs(self, component: str) -> tuple[str, ...]:
        return ("",)

    def needs(self) -> tuple[tuple[ComponentNeeds, str, str], ...]:
        return ((self.need("layer"), "a layer", "denoise"),)


def test_what_was_counted_is_what_is_filled() -> None:
    layer = Layer()
    assert layer.num_elements == {"layer": {"weight": 3}}
    counted = layer.empty("layer")
    assert layer.take("layer") is counted
    assert layer.built == ["layer"]


def test_nobody_has_what_another_took() -> None:
    layer = Layer()
    first, second = layer.take("layer"), layer.take("layer")
    assert len({id(each) for each in (first, second, layer.empty("layer"))}) == 3
    assert layer.empty("layer") is layer.empty("layer")


def test_what_a_dry_run_had_is_never_filled() -> None:
    """It was cast, and may have lost layers."""
    layer = Layer()
    assert layer.num_elements
    dry_run_module = layer.dry_run_call("denoise", "layer", lambda module, device: None, 1).module()
    dry_run_module.half()
    taken = layer.take("layer")
    assert taken is not dry_run_module
    assert taken.weight.dtype == torch.float32
    assert taken.weight.is_meta


def test_what_another_process_counted_is_not_built_again() -> None:
    assert Layer().num_elements == {"layer": {"weight": 3}}
    again = Layer()
    assert again.num_elements == {"layer": {"weight": 3}}
    assert again.built == []
    assert again.empty("layer") is not None


@pytest.mark.parametrize(
    "wrong", [3, {"layer": 3}, {"layer": {"weight": -1}}, {"layer": {"weight": 1.5}}, {"x": {}}, {}]
)
def test_what_is_no_count_is_counted_again(wrong: object) -> None:
    Layer()._count.write(wrong)
    layer = Layer()
    assert layer.num_elements == {"layer": {"weight": 3}}
    assert layer.built == ["layer"]


@pytest.mark.parametrize("wrong", [{"weight": 4}, {"bias": 3}, {}, {"weight": 3, "bias": 1}])
def test_a_planted_count_is_seen_as_soon_as_the_part_is_built(wrong: dict[str, int]) -> None:
    Layer()._count.write({"layer": wrong})
    layer = Layer()
    assert layer.num_elements == {"layer": wrong}
    with pytest.raises(CorruptRunError, match="other sizes than those of this model's layer"):
        layer.take("layer")
    # It is gone with that.
    assert Layer().num_elements == {"layer": {"weight": 3}}
