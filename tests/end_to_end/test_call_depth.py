"""How many of our calls stand between the command line and a model, in one process."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import everyframe
from everyframe.cli.main import main
from everyframe.ops import attention

OURS = str(Path(everyframe.__file__).parent)
#: From `main` to the module that asks for attention; more has to be worth it.
MAX_FRAMES, MAX_GENERATORS = 18, 5


def stack() -> list[tuple[str, bool]]:
    """Our functions that are running, from the outermost one, and whether each is a generator."""
    found, frame = [], inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(OURS) and code.co_filename != attention.__file__:
            name = f"{Path(code.co_filename).relative_to(OURS)}: {code.co_name}"
            found.append((name, bool(code.co_flags & inspect.CO_GENERATOR)))
        frame = frame.f_back
    return found[::-1]


def test_few_calls_stand_between_main_and_the_first_attention(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[list[tuple[str, bool]]] = []
    real = attention.attention

    def watched(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not seen and not q.is_meta:
            seen.append(stack())
        return real(q, *args, **kwargs)

    monkeypatch.setattr(attention, "attention", watched)
    monkeypatch.setattr(sys, "argv", ["everyframe"])
    prompt = "a red circle moves to the right on a blue background"
    assert main(["generate", prompt, "--seed", "7", "--steps", "1", "-o", f"{tmp_path}/a.mp4"]) == 0
    names = [name for name, _ in seen[0]]
    assert (names[0], names[-1]) == ("cli/main.py: main", "families/opensora/layers.py: forward")
    assert len(names) <= MAX_FRAMES, "\n".join(names)
    assert sum(is_generator for _, is_generator in seen[0]) <= MAX_GENERATORS, seen[0]
