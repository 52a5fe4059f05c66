"""A model's parts without numbers: built once for all who ask for these sizes, in each thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import nn

from everyframe.families import empty
from everyframe.families.empty import Empty


@dataclass(frozen=True)
class Layer(Empty):
    """One part, as wide as asked for."""

    width: int
    parts: ClassVar[tuple[str, ...]] = ("layer",)
    built: ClassVar[list[int]] = []

    def build(self, component: str) -> nn.Module:
        self.built.append(self.width)
        return nn.Linear(self.width, 1, bias=False)


class Other(Layer):
    """The same fields, and something else of them."""

    def build(self, component: str) -> nn.Module:
        self.built.append(self.width)
        return nn.Linear(1, 2 * self.width, bias=False)


@pytest.fixture(autouse=True)
def _nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(empty, "_KEPT", empty._Kept())
    Layer.built.clear()


def test_what_is_equal_is_built_once() -> None:
    assert Layer(3).empty("layer") is Layer(3).empty("layer")
    assert Layer(3).num_elements == {"layer": {"weight": 3}}
    assert Layer(4).num_elements == {"layer": {"weight": 4}}
    assert Other(3).num_elements == {"layer": {"weight": 6}}
    assert Layer.built == [3, 4, 3]


def test_each_thread_has_its_own() -> None:
    """A dry run casts them and swaps their layers for a time."""
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(lambda: Layer(3).empty("layer")).result()
    assert Layer(3).empty("layer") is not theirs


def test_those_that_were_asked_for_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(empty, "_MOST_KEPT", 2)
    first = Layer(1).empty("layer")
    Layer(2).empty("layer")
    assert Layer(1).empty("layer") is first
    Layer(3).empty("layer")
    assert Layer(1).empty("layer") is first
    Layer(2).empty("layer")
    assert Layer.built == [1, 2, 3, 2]
