"""What a pipeline's owner compiled stays one graph, and a run does not compile it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from everyframe.core.events import Event, Repaired, Step
from helpers.diagonals import diagonal
from helpers.guard_pipelines import planted
from helpers.pipeline_calls import ours, theirs
from helpers.tiny_checkpoints.pipelines import loaded

if TYPE_CHECKING:  # every process of the tests collects this file
    from torch._dynamo.testing import CompileCounter


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


def in_place(pipe: Any, graph: dict[str, Any]) -> None:
    pipe.transformer.compile(**graph)


def forward(pipe: Any, graph: dict[str, Any]) -> None:
    pipe.transformer.forward = torch.compile(pipe.transformer.forward, **graph)


def encoder(pipe: Any, graph: dict[str, Any]) -> None:
    pipe.text_encoder.compile(**graph)


def decode(pipe: Any, graph: dict[str, Any]) -> None:
    pipe.vae.decode = torch.compile(pipe.vae.decode, **graph)


def facts(pipe: Any) -> list[Any]:
    """Class, names of attributes, hooks and calls of the modules that a run hooks."""
    parts = [pipe.transformer, pipe.text_encoder, pipe.vae]
    return [
        (type(module), {*own}, {name: id(own[name]) for name in own if "_hooks" in name},
         own.get("_compiled_call_impl"), own.get("forward"), own.get("decode"),
         len(module._forward_hooks), len(module._forward_pre_hooks))
        for part in parts for module in (part, *part.children()) for own in [vars(module)]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("makers", "compile_it"),
    diagonal([(ours, ours, theirs), (theirs, ours, theirs)], [in_place, forward, encoder, decode]),
)
def test_a_graph_is_compiled_once(
    tiny_models: Callable[[str], Path], counter: Any, compile_it: Any, makers: Any
) -> None:
    """Whoever calls the pipeline first; a hook in a whole graph would be an error of torch's."""
    pipe = loaded(tiny_models("ltx"))
    wanted = theirs(pipe, "ltx")
    compile_it(pipe, {"backend": counter, "fullgraph": compile_it is not decode})
    before, compiled = facts(pipe), []
    for make in makers:
        assert np.array_equal(make(pipe, "ltx"), wanted)
        compiled.append(counter.frame_count)
    assert len(set(compiled)) == 1
    assert compiled[0] > 0
    assert facts(pipe) == before


def test_steps_of_a_graph_are_seen_and_repaired(
    tiny_models: Callable[[str], Path], counter: Any
) -> None:
    pipe = loaded(tiny_models("ltx")).to(torch.float16)
    pipe.transformer.compile(backend=counter, fullgraph=True)
    theirs(pipe, "ltx")
    before, events = facts(pipe), list[Event]()
    with planted(pipe, "transformer.transformer_blocks.0.ff.net.2"):
        assert np.isfinite(ours(pipe, "ltx", on_event=events.append)).all()
    assert [event.step for event in events if isinstance(event, Step)] == [1, 2]
    assert any(isinstance(event, Repaired) for event in events)
    assert facts(pipe) == before
