"""Small blocks that are compiled in tests, and changes that a compiled block must not miss."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

from everyframe.core.request import Request
from everyframe.fast_paths import certificates
from everyframe.fast_paths.certification.extract_blocks import blocks_of
from everyframe.fast_paths.compilation import block_trial, package_store
from everyframe.fast_paths.compilation.module_compilation import compiled_blocks
from everyframe.planning.resolve import prepare
from helpers.plans import certificates_of


@dataclass(frozen=True)
class Text:
    """Tensors in a value, as our models hand on keys and values."""

    keys: Tensor


class Scaled(nn.Module):
    """A layer with a scale for each adapter, as a LoRA has."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)
        self.scaling = {"default": 0.5}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(self.down(x)) * self.scaling["default"]
        return out


@dataclass
class Processor:
    """What diffusers' attention modules hold: a plain object that computes."""

    gain: float = 1.5
    history: list[str] = field(default_factory=list)

    def __call__(self, x: Tensor) -> Tensor:
        return x.sin() * self.gain


class Block(nn.Module):
    """Two layers, a text, a number of its own and one that it is given."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.linear, self.text = nn.Linear(size, size), nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)
        self.register_buffer("table", torch.linspace(0, 1, size))
        self.scale = 2.0
        self.processor = Processor()

    def forward(
        self, x: Tensor, text: Text, gain: float = 1.0, *, mask: Tensor | None = None
    ) -> Tensor:
        y = self.norm(self.linear(x)) * self.scale + self.table
        y = y + self.text(text.keys).mean(1, keepdim=True)
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        out: Tensor = x + self.processor(y) * gain
        return out


class Model(nn.Module):
    """Two equal blocks in a list."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(size), Block(size)])

    def forward(
        self, x: Tensor, text: Text, gain: float = 1.0, mask: Tensor | None = None
    ) -> Tensor:
        for block in self.blocks:
            x = block(x, text, gain, mask=mask)
        return x


def made(seed: int = 0) -> Model:
    """A model with numbers."""
    torch.manual_seed(seed)
    return Model().eval().requires_grad_(False)


def inputs(batch: int = 2, length: int = 6, size: int = 16) -> tuple[Tensor, Text]:
    """Tokens (batch, length, size) and a text of five."""
    generator = torch.Generator().manual_seed(batch * 100 + length)
    x = torch.randn(batch, length, size, generator=generator)
    return x, Text(torch.randn(batch, 5, size, generator=generator))


def compile_for(
    request: Request, monkeypatch: pytest.MonkeyPatch, component: str = "denoiser"
) -> None:
    """Compile the component's blocks for runs like this one; their gain does not matter."""
    monkeypatch.setattr(
        block_trial, "judge",
        lambda error, limit, gain: ("certified" if error <= limit else "refused", "planted"),
    )  # fmt: skip
    prepared = prepare(request)
    (certificate,) = (
        each for each in certificates_of(prepared, "certified", "compile")
        if each.component == component
    )  # fmt: skip
    runs = [run for run in prepared.fitted.runs if run.stage_call.component == component]
    part, files = prepared.plan.component(component), []
    assert prepared.chooser.certificates is not None
    subject = prepared.chooser.certificates.subject(component, part.precision, runs)
    with torch.inference_mode():
        for each in blocks_of(subject):
            alone = each.alone(("compile",))
            alone(*each.given.args, **each.given.kwargs)
            for block in compiled_blocks(alone).values():
                for package in block.report.packages.values():
                    files += package_store.files_of(package)
    assert files, "nothing was compiled"
    certificates.keep([replace(certificate, packages=tuple(files))])
