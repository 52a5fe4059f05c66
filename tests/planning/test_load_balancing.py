"""Unequal devices: shares follow made-up speeds and memories; what is sent takes time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from everyframe.core.errors import CannotRunError, InputError
from everyframe.core.facts import DeviceFacts, Throughput
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.hardware import machine_facts
from everyframe.planning import load_balancing, parallelism, resolve
from everyframe.planning.list_fast_paths import survey
from everyframe.planning.load_balancing import common_facts, weights_by_speed
from everyframe.planning.resolve import check_feasible, prepare

PROMPT = "a red circle moves to the right"
PICTURE = np.zeros((64, 64, 3), np.uint8)


def card(index: int, name: str = "fast", speed: float = 3e12, free: int = 24 << 30) -> DeviceFacts:
    rates = Throughput((("float32", speed),), memory=5e11, load=1e9, source="made up")
    return DeviceFacts(
        name, "cuda", index, free, free, (8, 0), has_fast_bf16=True, has_fast_fp16=True, rates=rates
    )


def plan(*devices: DeviceFacts, **options: Any) -> Plan:
    request = Request(**{"prompt": PROMPT, "num_devices": len(devices), "seed": 1, **options})
    return prepare(request, devices=devices, with_seconds=True).plan


def weights(found: Plan) -> list[float]:
    assert found.parallel is not None
    return list(found.parallel.speeds)


def test_devices_that_are_alike_do_alike() -> None:
    devices = [card(0), card(1, free=20 << 30)]
    assert weights_by_speed([card(0), card(1, speed=1e12)], "float32", 1) == (1.0, 1.0)
    assert common_facts([devices[0], replace(devices[1], memory=24 << 30)]).free_memory == 20 << 30


def test_shares_follow_speed() -> None:
    slow = card(1, "slow", 1e12)
    assert weights_by_speed([card(0), slow], "float32", 1) == (1.0, 0.3125)
    # A trial's noise changes nothing.
    noisy = card(1, "slow", 1.02e12)
    assert weights_by_speed([card(0), noisy], "float32", 1) == (1.0, 0.3125)
    assert weights_by_speed([card(0), card(1, "very slow", 1e9)], "float32", 1) == (1.0, 0.0625)


def test_who_has_no_rates_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def rates(products: Any, name: str, num_threads: int) -> Throughput:
        tried.append((name, products[0].dtype, num_threads))
        return Throughput((("float32", 6e12 if name == "cuda:0" else 3e12),), 1e11, 1e9, "made up")

    monkeypatch.setattr(load_balancing, "measured_rates", rates)
    devices = [replace(card(0), rates=None), replace(card(1, "slow"), rates=None)]
    assert weights_by_speed(devices, "float32", 2) == (1.0, 0.5)
    assert tried == [("cuda:0", "float32", 2), ("cuda:1", "float32", 2)]
    tried.clear()
    assert weights_by_speed([devices[0], devices[0]], "float32", 2) == (1.0, 1.0)
    assert tried == [], "devices that are alike are not tried"


def test_a_card_without_room_for_a_trial_counts_as_the_slowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rates(products: Any, name: str, num_threads: int) -> Throughput:
        if name == "cuda:1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB")
        return Throughput((("float32", 6e12),), 1e11, 1e9, "made up")

    monkeypatch.setattr(load_balancing, "measured_rates", rates)
    devices = [replace(card(0), rates=None), replace(card(1, "full"), rates=None)]
    assert weights_by_speed(devices, "float32", 2) == (1.0, 0.0625)


def test_all_compute_in_what_each_of_them_has() -> None:
    old = replace(
        card(1, "old"), capability=(7, 0), has_fast_bf16=False, dtypes=("float32", "float16")
    )
    common = common_facts([card(0), old])
    assert (common.name, common.capability) == ("fast", (7, 0))
    assert not common.has_fast_bf16
    assert common.has_fast_fp16
    assert common.dtypes == ("float32", "float16")


def test_a_plan_of_unequal_devices() -> None:
    found = plan(card(0), card(1, "slow", 1e12))
    assert weights(found) == [1.0, 0.3125]
    (note,) = (note for note in found.notes if note.startswith("shares of the work"))
    assert note == "shares of the work: cuda:0 (fast) 76%, cuda:1 (slow) 24%"
    assert {part.precision.compute for part in found.components} == {"float32"}
    assert not any(part.fast_paths for part in found.components), "nothing is certified on both"
    assert weights(plan(card(0), card(1, "slow", 1e12), shares="1,1")) == [1.0, 1.0]


def test_unequal_devices_have_no_certificates_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine_facts("cpu")
    facts = replace(here, devices=(here.cpu, card(0), card(1, "slow", 1e12)))
    monkeypatch.setattr(resolve, "machine_facts", lambda *_: facts)
    request = Request(prompt=PROMPT, device="cuda:0", num_devices=2, seed=1)
    assert not any(row.in_use for row in survey(request).rows)
    with pytest.raises(InputError, match=r"unlike each other; give --device cuda:0 \(fast\)"):
        survey(request, certify=True)


def test_short_memory_moves_work_to_the_others() -> None:
    """The second card is as fast as the first, and has too little memory for its half."""
    size: dict[str, Any] = {"size": "256x256", "num_frames": 51}
    roomy = plan(card(0), card(1, "other"), **size)
    part = roomy.component("denoiser")
    assert weights(roomy) == [1.0, 1.0]
    free = int((part.on_device_bytes + part.working_bytes * 0.7) / 0.92)
    tight = plan(card(0), card(1, "other", free=free), **size)
    first, second = weights(tight)
    assert 0.3 < second / first < 0.7
    assert tight.infeasible is None
    # The plan is of the rank that is tightest.
    assert 0.5 * free < tight.component("denoiser").peak_bytes <= 0.92 * free
    (note,) = (note for note in tight.notes if note.startswith("shares of the work"))
    assert note.endswith("cuda:1 would do more by speed, and has no memory for it")
    # What was asked for is left as it is, and is reported where it can't be done.
    asked = plan(card(0), card(1, "other", free=free), shares="1,1", **size)
    assert weights(asked) == [1.0, 1.0]


def test_weights_that_nothing_makes_smaller_are_an_obstacle() -> None:
    part = plan(card(0), card(1, "other")).component("denoiser")
    tiny = card(1, "other", free=part.on_device_bytes // 100)
    assert weights(plan(card(0), tiny)) == [1.0, 1.0], "no share makes weights less"
    with pytest.raises(CannotRunError, match="not enough memory"):
        check_feasible(plan(card(0), tiny))


@pytest.mark.parametrize("full", [0, 1])
def test_a_card_without_any_free_memory_is_an_obstacle(full: int) -> None:
    cards = [card(0), card(1, "other")]
    cards[full] = replace(cards[full], free_memory=0)
    with pytest.raises(CannotRunError, match=r"not enough memory: .* has 0 kB free"):
        check_feasible(plan(*cards))


def test_what_is_sent_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    three = (card(0), card(1), card(2))
    fast = plan(*three)
    monkeypatch.setitem(parallelism._BYTES, "cuda", 1e6)
    slow = plan(*three, parallel="sequence=3")
    assert fast.parallel is not None
    assert slow.parallel == fast.parallel
    sent = max(rank.sent_bytes for rank in fast.parallel.ranks)
    assert fast.seconds is not None
    assert slow.seconds is not None
    steps = fast.settings.num_inference_steps
    assert slow.seconds - fast.seconds == pytest.approx(steps * sent * (1e-6 - 1e-10))


def test_a_link_that_is_known_is_forecast_with() -> None:
    three = [card(0), card(1), card(2)]
    nominal = plan(*three, parallel="sequence=3")
    linked = [replace(each, rates=replace(each.rates, link=1e13)) for each in three]
    found = plan(*linked, parallel="sequence=3")
    assert found.parallel == nominal.parallel, "a link changes the forecast, not the choice"
    assert nominal.parallel is not None
    sent = max(rank.sent_bytes for rank in nominal.parallel.ranks)
    steps = nominal.settings.num_inference_steps
    assert nominal.seconds is not None
    assert found.seconds is not None
    less = steps * sent * (1 / parallelism._BYTES["cuda"] - 1e-13)
    assert nominal.seconds - found.seconds == pytest.approx(less)


@pytest.mark.slow
def test_in_a_ring_keys_are_sent_while_attention_computes() -> None:
    options = {"model": "opensora-2.0", "size": "256x256", "num_frames": 17, "parallel": "ring=3"}

    def seconds(link: float) -> float:
        three = map(card, range(3))
        cards = (replace(each, rates=replace(each.rates, link=link)) for each in three)
        found = plan(*cards, **options)
        return next(stage.seconds or 0.0 for stage in found.stages if stage.name == "denoise")

    assert seconds(1e12) == seconds(1e11)
    assert seconds(1e6) > 2 * seconds(1e12)


@cache
def decode_operations(cards: int) -> float:
    """Of 16 frames in pieces of two."""
    options = {"model": "svd", "image": PICTURE, "num_frames": 16, "decode_chunk_size": 2}
    found = plan(*map(card, range(cards)), prompt=None, **options)
    return next(stage.operations for stage in found.stages if stage.name == "decode")


@pytest.mark.parametrize(
    ("cards", "busiest"),
    [
        pytest.param(cards, busiest, marks=[pytest.mark.slow] * (cards != 3))
        for cards, busiest in ((2, 4), (3, 3), (5, 2), (9, 1))
    ],
)
def test_ranks_decode_pieces_of_a_video(cards: int, busiest: int) -> None:
    alone = decode_operations(1)
    assert decode_operations(cards) == pytest.approx(alone * busiest / 8)


# ---------------------------------------------------------------- weights that ranks keep


def kept(found: Plan) -> list[int]:
    assert found.parallel is not None
    return [rank.weight_bytes for rank in found.parallel.ranks]


def test_weights_are_kept_by_all_where_they_do_not_fit_on_one() -> None:
    """Taken by itself, and only then: three cards of which none holds the denoiser."""
    roomy = plan(card(0), card(1), card(2))
    whole = roomy.component("denoiser")
    assert (whole.num_weight_shards, kept(roomy)) == (1, [0, 0, 0])
    free = int((whole.weight_bytes * 0.7 + whole.working_bytes) / 0.92)
    tight = plan(*(card(index, free=free) for index in range(3)))
    part = tight.component("denoiser")
    assert tight.infeasible is None
    assert part.num_weight_shards == 3
    assert not part.block_offload, "the host is not needed"
    assert whole.weight_bytes / 3 < part.on_device_bytes < 0.7 * whole.weight_bytes
    assert part.weight_bytes == whole.weight_bytes
    (note,) = (note for note in tight.notes if "sharded weights" in note)
    assert note.startswith("STDiT denoiser: sharded weights: each of 3 devices")
    # Each sends what it keeps to both others, once for each branch, which come one by one by then.
    assert tight.settings.saving("branches_at_once", 2) == 1
    assert sum(kept(tight)) == pytest.approx(2 * 2 * whole.weight_bytes, rel=0.1)
    assert max(kept(tight)) < 1.2 * min(kept(tight))
    # Where that is not enough either, they wait on the host.
    tiny = int((part.on_device_bytes * 0.8 + whole.working_bytes) / 0.92)
    waits = plan(*(card(index, free=tiny) for index in range(3))).component("denoiser")
    assert (waits.num_weight_shards, waits.block_offload) == (1, True)


def test_what_each_keeps_follows_free_memory() -> None:
    """A card of which a quarter is free keeps a quarter of what the other does, and that fits."""
    roomy = plan(card(0), card(1), shard_weights=True).component("denoiser")
    whole, working = roomy.weight_bytes, roomy.working_bytes
    small = int((0.45 * whole + working) / 0.92)
    found = plan(card(0, free=4 * small), card(1, free=small), shard_weights=True)
    assert found.parallel is not None
    assert [rank.memory_share for rank in found.parallel.ranks] == [1.0, 0.25]
    assert kept(found)[0] > 2.5 * kept(found)[1] > 0
    assert found.infeasible is None
    part = found.component("denoiser")  # of the small card, which is the tightest
    assert part.num_weight_shards == 2
    assert part.on_device_bytes < 0.45 * whole
    # A half of them, as of equal cards, does not fit there.
    assert roomy.on_device_bytes > 0.45 * whole


def test_several_videos_share_devices_where_one_does_not_hold_the_weights() -> None:
    """Ranks on one CPU, whose memory holds the weights once and not twice."""
    cpu = replace(card(0, "a CPU"), kind="cpu", index=None)
    apart = plan(cpu, cpu, num_videos=2)
    whole = apart.component("denoiser")
    assert str(apart.parallel) == "data=2, cfg=1, sequence=1"
    free = int((1.7 * whole.weight_bytes + 2 * whole.working_bytes) / 0.92)
    tight = replace(cpu, memory=free, free_memory=free)
    together = plan(tight, tight, num_videos=2)
    assert together.infeasible is None
    assert str(together.parallel) == "data=1, cfg=1, sequence=2"
    assert together.component("denoiser").num_weight_shards == 2
    # What was asked for by name is left as it is, and is reported where it can't be done.
    assert plan(tight, tight, num_videos=2, parallel="data=2").infeasible is not None


def test_what_is_asked_for_by_name_is_done() -> None:
    two = (card(0), card(1))
    asked = plan(*two, shard_weights=True)
    assert asked.component("denoiser").num_weight_shards == 2
    assert all(part.num_weight_shards == 1 for part in asked.components if part.stage != "denoise")
    # Videos of their own would leave one device for each.
    together = plan(*two, num_videos=2, shard_weights=True)
    assert str(together.parallel) == "data=1, cfg=1, sequence=2"
    with pytest.raises(InputError, match="data=2 leaves one of 2 devices for a video"):
        plan(*two, num_videos=2, shard_weights=True, parallel="data=2")
    with pytest.raises(InputError, match="shard_weights has no effect on one device"):
        plan(card(0), shard_weights=True)
