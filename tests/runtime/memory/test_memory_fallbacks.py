"""The one order in which less memory is had: exact, then weights on the host, then lossy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import ComponentPlan, Plan, Precision, Settings
from everyframe.runtime.interface import MemorySaving
from everyframe.runtime.memory.memory_fallbacks import RemainingFallbacks, memory_fallbacks
from everyframe.runtime.stages import tiling
from helpers import config_only_models
from helpers.guard_modules import plan


def savings(component: str, settings: Settings) -> Iterator[MemorySaving]:
    """Two exact ones and a lossy one that has them in it; the lossy one is offered first."""
    halved = settings.with_saving(f"{component}_at_once", 2)
    alone = settings.with_saving(f"{component}_at_once", 1)
    yield MemorySaving(alone.with_saving("tile", 8), "tiles", is_lossy=True)
    yield MemorySaving(halved, "halves")
    yield MemorySaving(alone, "one by one")


def test_what_shows_comes_last_for_all_components() -> None:
    settings = config_only_models.settings()
    done = list(memory_fallbacks(["unet", "net"], settings, savings, may_wait=True))
    assert [(way.component, way.message[:5]) for way in done] == [
        ("unet", "halve"), ("unet", "one b"), ("net", "halve"), ("net", "one b"),
        ("unet", "block"), ("net", "block"), ("unet", "tiles"),
    ]  # fmt: skip
    assert [way.block_offload for way in done] == [False] * 4 + [True] * 2 + [False]
    assert [way.is_lossy for way in done] == [False] * 6 + [True]
    # Each has what was done before, of other components too; the net's tiles are there already.
    assert dict(done[-1].settings.savings) == {"unet_at_once": 1, "net_at_once": 1, "tile": 8}


def test_weights_wait_only_where_they_may_and_nothing_is_done_twice() -> None:
    settings = config_only_models.settings().with_saving("unet_at_once", 1)
    done = list(memory_fallbacks(["unet"], settings, savings, may_wait=False))
    assert not any(way.block_offload for way in done)
    # The family offers what is done already as well, by whoever planned it.
    once = replace(settings, savings=(("unet_at_once", 1), ("tile", 8)))
    assert done[-1].settings == once
    assert list(memory_fallbacks(["unet"], settings, None, may_wait=False)) == []


def test_a_family_offers_nothing_less_than_what_is_done() -> None:
    svd = config_only_models.svd()
    tiled = config_only_models.settings(512, 512, 4, options={"decode_chunk_size": 1})
    tiled = tiled.with_saving("decode_tile", 32)
    found = [each for each in svd.savings("vae", tiled) if each.stage == "decode"]
    assert [each.settings.saving("decode_tile", 0) for each in found] == [16]
    opensora = config_only_models.opensora("1.2")
    fewer = config_only_models.settings(32, 32, 17).with_saving("vae_frames", 2)
    found = list(opensora.savings("vae", fewer))
    assert [each.settings.saving("vae_frames", 0) for each in found] == [1]


def of_two_stages(component: str, settings: Settings) -> Iterator[MemorySaving]:
    """One for both, and a lossy one for each of two."""
    fewer = settings.with_saving("frames", 1)
    yield MemorySaving(fewer, "fewer")
    for stage in ("first", "second"):
        yield MemorySaving(settings.with_saving(stage, 8), f"tiles of {stage}", True, stage)


def test_a_stage_has_what_helps_it_and_what_helps_all() -> None:
    settings = config_only_models.settings()

    def list_fallbacks(stage: str | None) -> list[tuple[str, dict[str, int]]]:
        done = memory_fallbacks(["vae"], settings, of_two_stages, may_wait=False, stage=stage)
        return [(way.message, dict(way.settings.savings)) for way in done]

    assert list_fallbacks("second") == [
        ("fewer", {"frames": 1}), ("tiles of second", {"frames": 1, "second": 8}),
    ]  # fmt: skip
    assert [says for says, _ in list_fallbacks(None)] == [
        "fewer",
        "tiles of first",
        "tiles of second",
    ]
    assert list_fallbacks(None)[-1][1] == {"frames": 1, "first": 8, "second": 8}


@pytest.mark.parametrize("name", ["svd", "inpaint-9", "opensora-1.2"])
def test_every_family_that_encodes_has_tiles_for_it(name: str) -> None:
    model = config_only_models.all_models()[name]
    settings = config_only_models.settings(512, 512, 17, given_frames=("image",))
    for stage, own in (("given frames", tiling.ENCODE), ("decode", tiling.DECODE)):
        done = list(memory_fallbacks(["vae"], settings, model.savings, may_wait=False, stage=stage))
        is_lossy = [way.is_lossy for way in done]
        assert is_lossy == sorted(is_lossy), "exact ones come first"
        tiled = [way for way in done if way.settings.saving(own, 0)]
        assert [way.settings.saving(own, 0) for way in tiled] == [32, 16]
        assert all(way.is_lossy and way.stage == stage for way in tiled)
        (other,) = {tiling.ENCODE, tiling.DECODE} - {own}
        assert not any(way.settings.saving(other, 0) for way in done)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["svd", "inpaint-9", "opensora-1.2", "stepvideo"])
def test_one_after_the_other_is_taken_what_a_plan_lists(name: str, kind: str) -> None:
    """A stage and a restart take them from the plan that they are at; each has the same rest."""
    model = config_only_models.all_models()[name]
    settings = config_only_models.settings(512, 512, 17, given_frames=("image",), guidance=7.0)
    whole = Precision("float32", "float32")
    for component in model.components(settings):
        names, stage = [component.name], component.stage
        parts = (ComponentPlan(component.name, "", stage, "", 0, kind, whole, 0, 0),)
        device = DeviceFacts("a device", kind, None, 10**12, 10**12)
        planned = replace(plan(device), settings=settings, components=parts)
        listed = memory_fallbacks(
            names, settings, model.savings, may_wait=kind != "cpu", stage=stage, holders=2
        )

        def rest(planned: Plan, stage: str = stage, names: list[str] = names) -> RemainingFallbacks:
            return RemainingFallbacks(planned, model.savings, stage, movable=names, holders=2)

        stays, anew = rest(planned), planned
        for each in listed:
            assert stays.next(names) == each
            if each.block_offload:
                assert stays.plan.component(component.name).block_offload
            restarted = rest(anew)
            assert restarted.next(names) == each
            anew = restarted.plan
        assert stays.next(names) is None
        assert rest(anew).next(names) is None
