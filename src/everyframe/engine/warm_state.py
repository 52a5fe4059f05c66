"""Lend components of a cache to a run whose weights they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from everyframe.checkpoints.digest import file_state
from everyframe.engine.distributed import RankContext
from everyframe.engine.records.provenance import recorded_loras
from everyframe.runtime.components.component_cache import (
    CachedComponents,
    ComponentCache,
    WarmComponents,
)
from everyframe.runtime.interface import ModelSpec, WarmSpec
from everyframe.runtime.loading import check_contents


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

    Weights in memory belong to the caller. Ranks on CPUs share one memory, of which each
    would count the others' components as taken, so they keep none.
    """
    if cache is not None and empties:
        cache.clear()
    sha256 = record["model"].get("sha256")
    is_shared = here.parallel.world.size > 1 and here.plan.device.kind == "cpu"
    if cache is None or sha256 is None or is_shared or not isinstance(model, WarmSpec):
        return model
    components = repr(record["request"].get("components"))
    identity, loras = (model.identity(), sha256, components), recorded_loras(record)
    lending: Any = model
    warm: ModelSpec = replace(lending, warm=CachedComponents(cache, here.plan, identity, loras))
    return warm


def check_contents_once(model: ModelSpec, cache: ComponentCache | None) -> None:
    """`check_contents`, unless these very files were checked for this model before.

    Raises:
        CheckpointError: a tensor of any component is missing, extra or misshapen.
    """
    if cache is None or not isinstance(model, WarmSpec):
        check_contents(model)
        return
    files = tuple((file, file_state(Path(file))) for file in model.weight_files())
    key = model.identity(), files
    if not cache.is_checked(key):
        check_contents(model)
        cache.note_checked(key)


def warm_of(model: object) -> WarmComponents:
    """The components of a run of this model, from a cache if it has one."""
    warm = model.warm if isinstance(model, WarmSpec) else None
    return warm or WarmComponents()
