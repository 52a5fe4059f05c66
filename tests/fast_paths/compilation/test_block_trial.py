"""Blocks whose calls leave something for the next one run as written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everyframe
from everyframe.fast_paths.compilation.module_compilation import compiled_blocks
from helpers.planted_compiler import PlantedCompiler


class OfTheLastFrame(nn.Module):
    """A convolution over time in pieces, as in Wan's autoencoder: the caller holds the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: list[Tensor], place: list[int]) -> Tensor:
        out: Tensor = self.linear(x + cache[place[0]])
        cache[place[0]] = x
        place[0] += 1
        return out


class WithALastFrame(OfTheLastFrame):
    """As in EasyAnimate's autoencoder: it holds the rest itself."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def forward(self, x: Tensor, cache: list[Tensor], place: list[int]) -> Tensor:
        out: Tensor = self.linear(x if self.last is None else x + self.last)
        self.last = x
        return out


@pytest.mark.parametrize("kind", [OfTheLastFrame, WithALastFrame])
def test_what_a_call_leaves_for_the_next_one_is_left(
    kind: type[OfTheLastFrame], compiler: PlantedCompiler
) -> None:
    torch.manual_seed(0)
    pieces = torch.randn(3, 2, 4)

    def results(model: nn.Module) -> list[Tensor]:
        found = []
        cache = [torch.zeros(2, 4), torch.zeros(2, 4)]
        with torch.no_grad():
            for piece in pieces:
                place, x = [0], piece
                for block in model.blocks:  # type: ignore[union-attr]
                    x = block(x, cache, place)
                found.append(x)
        return found

    def made() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Module()
        model.blocks = nn.ModuleList([kind(), kind()])
        return model.requires_grad_(False)

    wanted = results(made())
    model = everyframe.compile(made())
    for found, right in zip(results(model), wanted, strict=True):
        assert torch.equal(found, right)
    assert compiler.count == 0
    (note, *_) = compiled_blocks(model)["blocks.0"].report.notes
    assert "its calls change" in note
