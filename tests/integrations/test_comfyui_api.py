"""The stand-in has the signatures of a real ComfyUI: ``EVERYFRAME_COMFYUI=FOLDER`` names one."""

from __future__ import annotations

import ast
import inspect
import os
from pathlib import Path
from typing import Any

import pytest

from helpers import comfyui_stand_in as stand_in

FOLDER = os.environ.get("EVERYFRAME_COMFYUI")
needs_comfyui = pytest.mark.skipif(
    not FOLDER, reason="EVERYFRAME_COMFYUI names no folder of a real ComfyUI"
)


def _parameters(source: str, name: str) -> dict[str, bool]:
    """Parameters of a function or dataclass in Python source -> whether each must be given."""
    node: Any = ast.parse(source)
    for part in name.split("."):
        node = next(each for each in ast.iter_child_nodes(node)
                    if getattr(each, "name", None) == part)  # fmt: skip
    if isinstance(node, ast.ClassDef):
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        return {ast.unparse(each.target): each.value is None for each in fields}
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    num_needed = len(positional) - len(given.defaults)
    found = {each.arg: at < num_needed for at, each in enumerate(positional)}
    named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    found |= {each.arg: default is None for each, default in named}
    found.pop("self", None)
    return found


def _differences(ours: Any, real: dict[str, bool]) -> list[str]:
    """Why a call that the stand-in takes could fail on the real one."""
    own = {
        name: each.default is each.empty
        for name, each in inspect.signature(ours).parameters.items()
        if name != "self" and each.kind is not each.VAR_POSITIONAL
    }
    found = [f"there is no {name}" for name in own if name not in real]
    found += [f"{name} must be given" for name, needed in real.items() if needed > own.get(name, 0)]
    first = [name for name, needed in own.items() if needed]
    if [*real][: len(first)] != first:
        found.append(f"begins with {[*real][: len(first)]}, not {first}")
    return found


@needs_comfyui
@pytest.mark.parametrize("ours", stand_in.SOURCES, ids=lambda ours: stand_in.SOURCES[ours][1])
def test_signature_is_that_of_the_real_one(ours: Any) -> None:
    file, name = stand_in.SOURCES[ours]
    source = (Path(str(FOLDER)) / file).read_text()
    assert _differences(ours, _parameters(source, name)) == []


def test_another_signature_is_found() -> None:
    def ours(total: Any, node_id: Any = None) -> None: ...

    assert _differences(ours, _parameters("def f(total, node_id=None, *, more=1): ...", "f")) == []
    for other in ("total", "node, total, node_id=None", "total, node_id, more", "total, *, more"):
        assert _differences(ours, _parameters(f"def f({other}): ...", "f")), other
