"""Lend components of a cache to a run whose weights they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from everyframe.engine.distributed import RankContext
from everyframe.engine.provenance import recorded_loras
from everyframe.runtime.component_cache import ComponentCache, WarmComponents
from everyframe.runtime.interface import ModelSpec, WarmSpec


def with_cache(
    model: ModelSpec,
    cache: ComponentCache | None,
    here: RankContext,
    record: dict[str, Any],
    *,
    empties: bool = False,
) -> ModelSpec:
    """The model, which takes its components from the cache and gives them back after their stage.

    `empties` frees all that is in it first, for a plan that was made when the memory was free.

    Weights that somebody has in memory are theirs. Ranks on CPUs share one memory, of which each
    would count the others' components as taken, so they keep none.
    """
    if cache is not None and empties:
        cache.clear()
    sha256 = record["model"].get("sha256")
    is_shared = here.teams.world.size > 1 and here.plan.device.kind == "cpu"
    if cache is None or sha256 is None or is_shared or not isinstance(model, WarmSpec):
        return model
    components = repr(record["request"].get("components"))
    identity, loras = (model.identity(), sha256, components), recorded_loras(record)
    lending: Any = model
    warm: ModelSpec = replace(lending, warm=WarmComponents(cache, here.plan, identity, loras))
    return warm


def warm_of(model: object) -> WarmComponents:
    """What a run of this model lends; nothing for a model that can't."""
    warm = model.warm if isinstance(model, WarmSpec) else None
    return WarmComponents() if warm is None else warm
