"""What stays in memory: of components and encoded prompts the least recently used goes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from everyframe.core.events import Event, Repaired, Step
from everyframe.core.plan import ComponentPlan, Precision
from everyframe.runtime.components import component_cache
from everyframe.runtime.components.component_cache import CachedComponents, ComponentCache, _Entry
from everyframe.runtime.components.component_state import ComponentState
from helpers.guard_modules import plan

#: Bytes of each component here, and of what each prompt is encoded to.
SIZE = 4096


def put(cache: ComponentCache, name: str, device: str = "cpu") -> None:
    module = nn.Linear(SIZE // 4, 1, bias=False)
    cache.put((name, ()), _Entry(name, device, module, ComponentState(module), (), frozenset()))


def use(cache: ComponentCache, name: str) -> None:
    """Lend it to a run, which gives it back."""
    entry = cache.take((name, ()))
    assert entry is not None
    cache.put((name, ()), entry)


def names(cache: ComponentCache) -> list[str]:
    return [name for name, *_ in cache.models()]


@pytest.mark.parametrize(
    ("room", "stays"), [(3, ["b", "c", "a"]), (2, ["c", "a"]), (1, ["a"]), (0, [])]
)
def test_components_that_were_not_used_for_longest_go_first(
    room: int, stays: Sequence[str]
) -> None:
    cache = ComponentCache()
    for name in "abc":
        put(cache, name)
    use(cache, "a")
    put(cache, "of another device", "cuda:0")
    assert cache.make_room("cpu", room * SIZE) == (room < 3)
    assert names(cache) == [*stays, "of another device"]
    assert cache.num_bytes() == {"cuda:0": SIZE, **({"cpu": room * SIZE} if room else {})}


def test_prompts_that_were_not_asked_for_longest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(component_cache, "_MOST_ENCODED", 2 * SIZE)
    cache = ComponentCache()
    results = {name: [torch.full((SIZE // 4,), float(n))] for n, name in enumerate("abc")}
    for name in "ab":
        cache.keep_encoded(name, results[name])
    assert cache.find_encoded("a") is results["a"]
    cache.keep_encoded("c", results["c"])
    assert cache.find_encoded("b") is None
    assert cache.find_encoded("a") is results["a"]
    assert cache.find_encoded("c") is results["c"]
    assert cache.num_bytes() == {"cpu": 2 * SIZE}
    cache.clear()
    assert cache.find_encoded("a") is None


def repaired(component: str, cause: str = "range") -> Repaired:
    return Repaired("text", 1, component, "", "", cause, "float16", "", "float32", "")


@pytest.mark.parametrize(
    ("event", "stays"),
    [
        (Step("text", 1, 1, 0, 0.0), True),
        (repaired("denoiser"), True),
        (repaired("text_encoder"), False),
        (repaired("", "memory"), False),
    ],
)
def test_what_a_changed_component_encoded_does_not_stay(event: Event, stays: bool) -> None:
    """Its stage says so as it computes, before it has results."""
    part = ComponentPlan(
        "text_encoder", "", "text", "", 1, "cpu", Precision("float16", "float16"), 4, 0
    )
    run = CachedComponents(ComponentCache(), replace(plan(), components=(part,)), "model", ())
    stage = object()
    with run.during_stage():
        key, _ = run.find_encoded("text_encoder", stage, "a fox")
        run.component("text_encoder", lambda: nn.Linear(1, 1), lambda *_: False)
        run.note(event)
        run.keep_encoded(key, "text_encoder", [torch.ones(1)])
    assert (run.find_encoded("text_encoder", stage, "a fox")[1] is not None) == stays
