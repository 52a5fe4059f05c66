"""A plan's forecast has what its fast paths and its lossy method need, and nothing else of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import everyframe
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Settings
from everyframe.core.quality import parse_method
from everyframe.fast_paths.path_sizes import scratch_bytes
from everyframe.planning.fast_paths.choose_fast_paths import FastPathChooser, FastPathOptions
from everyframe.planning.memory.component_memory import ComponentPlanner, PlannedComponent
from everyframe.planning.memory.memory_fit import MemoryFit
from everyframe.planning.resolve import prepare
from helpers import config_only_models

CPU = DeviceFacts("a processor", "cpu", None, 10**10, 10**10)
#: As in the released model, two layers a block: the last deep one is as wide as the last of all.
WIDTH = 32
MODEL = config_only_models.svd(
    unet={**config_only_models.released_svd()["unet"], **config_only_models.UNET,
          "block_out_channels": [WIDTH, 64], "layers_per_block": 2},
)  # fmt: skip
SIZE, FRAMES = 128, 4
SETTINGS = config_only_models.settings(SIZE, SIZE, FRAMES)


def planned(
    name: str, *paths: str, settings: Settings = SETTINGS, threads: int = 1, dtype: str = "float32"
) -> PlannedComponent:
    """That component with these paths alone."""
    pins = FastPathOptions(dtype=dtype, exact={name: paths}, force=True)
    chooser = FastPathChooser(CPU, pins, num_threads=threads)
    part = ComponentPlanner(MODEL, CPU, dtype, True, 10**10, chooser=chooser).plan_named(
        name, settings
    )
    assert part.plan.fast_paths == paths
    return part


def by(method: str, **changed: Any) -> Settings:
    return replace(SETTINGS, method=parse_method(method).sampling, **changed)


@pytest.mark.parametrize("threads", [1, 4])
def test_scratch_of_kernels_is_in_the_stages_that_use_them(threads: int) -> None:
    plain, fast = planned("vae", threads=threads), planned("vae", "winograd", threads=threads)
    for stage, before, after in zip(plain.stages, plain.runs, fast.runs, strict=True):
        products = [shape for shape, _ in before.found.work.products]
        scratch = scratch_bytes(products, ["winograd"], threads)
        assert scratch > 500_000 * threads
        assert after.found.working_bytes == before.found.working_bytes + scratch
        assert fast.in_stage(stage)[0] == plain.in_stage(stage)[0] + scratch
    stages = (fast.in_stage(stage)[0] for stage in fast.stages)
    assert fast.plan.peak_bytes == max(stages) > plain.plan.peak_bytes
    other = planned("vae", "temporal-conv", threads=threads)
    assert other.plan.working_bytes == plain.plan.working_bytes


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_deepcache_has_its_features(dtype: str, size: int) -> None:
    plain = planned("unet", dtype=dtype)
    own = FRAMES * WIDTH * (SIZE // 8) ** 2 * size
    # In one call both branches of guidance, and the features of the step before beside them.
    cached = planned("unet", dtype=dtype, settings=by("deepcache@2"))
    assert cached.plan.working_bytes == plain.plan.working_bytes + 2 * 2 * own
    unguided = {"guidance_scale": 1.0}
    plain = planned("unet", dtype=dtype, settings=replace(SETTINGS, **unguided))
    cached = planned("unet", dtype=dtype, settings=by("deepcache@2", **unguided))
    assert cached.plan.working_bytes == plain.plan.working_bytes + 2 * own


def test_other_methods_and_components_are_as_before() -> None:
    exact, solver = planned("unet"), planned("unet", settings=by("abm2@2"))
    assert solver.plan.working_bytes == exact.plan.working_bytes
    decoded = planned("vae", settings=by("deepcache@2"))
    assert decoded.plan.working_bytes == planned("vae").plan.working_bytes


def test_what_fits_is_decided_with_them() -> None:
    plain, cached = planned("unet"), planned("unet", settings=by("deepcache@2"))
    memory = int((plain.plan.peak_bytes + cached.plan.peak_bytes) / 2 / 0.92)
    device = replace(CPU, memory=memory, free_memory=memory)
    fit = MemoryFit(ComponentPlanner(MODEL, device, "float32", True, memory))
    for stage in (None, "denoise"):
        assert fit._fits(plain, stage)
        assert not fit._fits(cached, stage)


def test_a_plans_threads_are_those_of_its_forecast() -> None:
    found = prepare(everyframe.Request(prompt="a red circle"), num_threads=3)
    assert found.plan.num_threads == found.chooser.num_threads == 3
