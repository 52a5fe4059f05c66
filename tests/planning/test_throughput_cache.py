"""Trials of the CPU last for the boot; one that had to wait is made again, the fastest counts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import everyframe
from everyframe.checkpoints.cache_file import CacheFile
from everyframe.core.facts import DeviceFacts, OpShape, Throughput
from everyframe.hardware import throughput
from everyframe.hardware.cpu import processor_facts
from everyframe.planning import stage_forecasts, throughput_cache
from everyframe.planning.throughput_cache import rates_here

MM = OpShape("product", "float32", ((64, 64), (64, 64)))
CPU = processor_facts()


class Clock:
    """Seconds that this process waited for a core, more by `step` each time it is asked."""

    def __init__(self, step: float) -> None:
        self.step, self.now = step, 1.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    monkeypatch.setattr(throughput, "_waited_seconds", Clock(0.0))


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What trials of products give, the first one next; each is taken out."""
    left: list[float] = []

    def tried(product: OpShape, kernels: Any, device: str, num_threads: int) -> tuple[float]:
        return (left.pop(0),)

    monkeypatch.setattr(throughput, "_rate", tried)
    return left


def in_a_new_process(
    monkeypatch: pytest.MonkeyPatch, device: DeviceFacts = CPU, threads: int = 1
) -> Throughput:
    monkeypatch.setattr(throughput, "_TRIED", {})
    rates = rates_here([MM], device, threads)
    assert rates is not None
    return rates


def test_a_quiet_trial_is_made_once_a_boot(
    trials: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trials += [5e9, 4e9, 3e9, 2e9, 1e9]
    first = in_a_new_process(monkeypatch)
    assert in_a_new_process(monkeypatch) == first
    assert first.measured == ((MM, 5e9),)
    assert len(trials) == 4
    # Another number of threads, processor, variable, boot: each is tried.
    in_a_new_process(monkeypatch, threads=2)
    in_a_new_process(monkeypatch, replace(CPU, name="another"))
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    in_a_new_process(monkeypatch)
    (tmp_path / "boot").write_text("another\n")
    monkeypatch.setattr(throughput_cache, "_BOOT_ID", tmp_path / "boot")
    in_a_new_process(monkeypatch)
    assert trials == []


@pytest.mark.parametrize("name", ["LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_MMAP_MAX_"])
def test_another_way_to_hand_out_memory_is_tried(
    name: str, trials: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured with 'mapping': another allocator need not ask the system for each block."""
    trials += [5e9, 4e9]
    in_a_new_process(monkeypatch)
    monkeypatch.setenv(name, "")
    in_a_new_process(monkeypatch)
    assert trials == []


def test_without_a_boot_id_the_time_of_the_boot_stands_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(throughput_cache, "_BOOT_ID", tmp_path / "none")
    monkeypatch.setattr(throughput_cache.psutil, "boot_time", lambda: 1234.6)
    assert throughput_cache._boot() == "1235"


@pytest.mark.parametrize("waits", [3.0, None])
def test_the_fastest_of_three_that_waited_counts(
    waits: float | None, trials: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of such where the system does not tell how long it waited."""
    clock = (lambda: None) if waits is None else Clock(waits)
    monkeypatch.setattr(throughput, "_waited_seconds", clock)
    trials += [2e9, 4e9, 3e9, 9e9]
    found = [in_a_new_process(monkeypatch).measured[0][1] for _ in range(4)]
    assert found == [2e9, 4e9, 4e9, 4e9]
    assert trials == [9e9]


def test_a_quiet_one_ends_the_trying(trials: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(3.0)
    monkeypatch.setattr(throughput, "_waited_seconds", clock)
    trials += [2e9, 4e9, 3e9]
    in_a_new_process(monkeypatch)
    clock.step = 0.0
    in_a_new_process(monkeypatch)
    assert in_a_new_process(monkeypatch).measured[0][1] == 4e9
    assert trials == [3e9]


@pytest.mark.parametrize(
    "wrong",
    [
        3, [], {"memory": [3.0, 1.0]}, {"mapping": [3.0, math.inf]}, {"memory": [3.0, 1.0, -1.0]},
        {"mapping": "fast"}, {"memory": [3.0, 1.0, "1"]}, {"mapping": [3.0, 0]},
        {"mapping": [3.0, 1.0, 1.0]}, {"memory": [3.0, 1.0, True]},
    ],
)  # fmt: skip
def test_what_is_no_trial_is_tried_again(
    wrong: Any, trials: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    CacheFile("rates", throughput_cache._key(CPU, 1)).write(wrong)
    trials += [5e9]
    found = in_a_new_process(monkeypatch)
    assert found.measured == ((MM, 5e9),)
    assert 1e6 < found.memory < 1e13


def test_the_newest_trials_are_saved(trials: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput_cache, "_MAX_TRIALS", 4)
    sizes = [replace(MM, shapes=((n, 64), (64, 64))) for n in range(1, 7)]
    trials += [float(n) for n in range(1, 7)]
    for each in sizes:
        monkeypatch.setattr(throughput, "_TRIED", {})
        rates_here([each], CPU, 1)
    saved = CacheFile("rates", throughput_cache._key(CPU, 1)).read()
    assert len(saved) == 4
    assert throughput._name(sizes[-1]) in saved
    assert throughput._name(sizes[0]) not in saved


def test_a_card_is_tried_by_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    card = replace(CPU, kind="cuda", index=0)
    asked = []

    def tried(*args: Any) -> Throughput:
        asked.append(args)
        return Throughput((("float32", 1.0),), 1.0, 1.0, "made up")

    monkeypatch.setattr(throughput_cache, "measured_rates", tried)
    rates_here([MM], card, 1)
    rates_here([MM], card, 1)
    assert [each[1] for each in asked] == ["cuda:0", "cuda:0"]


def test_how_long_this_process_waited_grows() -> None:
    waited = [throughput._waited_seconds() for _ in range(3)]
    if waited[0] is None:
        pytest.skip("this system does not tell how long a thread waited for a core")
    assert waited == sorted(waited, key=float)


def test_a_card_without_room_for_a_trial_has_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs, or components that stay loaded, may have nearly all of its memory."""

    def fail(*_: object) -> tuple[float]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB")

    emptied: list[bool] = []
    monkeypatch.setattr(throughput, "_rate", fail)
    monkeypatch.setattr(throughput, "empty_cache", lambda: emptied.append(True))
    card = DeviceFacts("a card", "cuda", 1, 8 * 10**9, 10**8)
    assert rates_here([MM], card, 1) is None
    assert emptied, "torch would keep what it took, and the run is in another process"


def test_a_plan_without_rates_says_why_it_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"prompt": "a red circle", "num_frames": 3}
    assert everyframe.plan(**asked).seconds is not None
    monkeypatch.setattr(stage_forecasts, "rates_here", lambda *_: None)
    plan = everyframe.plan(**asked)
    assert plan.seconds is None
    assert [note for note in plan.notes if "not forecast" in note and "free memory" in note]
