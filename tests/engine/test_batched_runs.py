"""Runs of a batch: each has the bits that it has alone, whoever else is in the batch, and when.

What a batch may not do is planted: a module in which one video's values reach another, a repair
that would change the module of all, a run of another plan.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everyframe.core.errors import InputError, LeftBatchError
from everyframe.core.events import Events, FramesDecoded, Note, Planned, Step
from everyframe.core.request import Request
from everyframe.engine.batched_runs import BatchedRuns, RunEnded
from everyframe.engine.run import stream
from everyframe.families.opensora.layers import SelfAttention
from everyframe.fast_paths import batch_certificates, certificates
from everyframe.planning import batches
from everyframe.planning.resolve import resolve
from everyframe.runs.run_state import SaveOptions
from everyframe.runtime.batched_calls import BatchedModule
from everyframe.runtime.components.component_cache import ComponentCache
from helpers.compiled_blocks import compile_for
from helpers.out_of_memory import TOO_LITTLE
from helpers.planted_compiler import PlantedCompiler
from helpers.slow_rows import slow_unless
from helpers.tiny_checkpoints import families as tiny_families
from helpers.tiny_checkpoints import opensora as tiny_opensora

Models = Callable[[str], Path]
SHAPES: Mapping[str, Any] = {"num_frames": 4, "height": 32, "width": 32, "num_inference_steps": 6}
#: Of different lengths, so that texts are too.
PROMPTS = ("a red circle", "a blue square moves left on a black background", "a cyan star")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the calls that were made as one; each pays, however long it took, and is new."""
    shutil.rmtree(certificates.folder(), ignore_errors=True)
    sizes: list[int] = []
    compute = BatchedModule.compute

    def counting(self: BatchedModule, calls: Sequence[Any]) -> list[Any]:
        sizes.append(len(calls))
        return compute(self, calls)

    monkeypatch.setattr(BatchedModule, "compute", counting)
    monkeypatch.setattr(batch_certificates, "LEAST_GAIN", 0.0)
    return sizes


def events_of(requests: Sequence[Request], cache: ComponentCache) -> dict[int, list[Any]]:
    """Events of each run of one batch."""
    batch, found = BatchedRuns(), dict[int, list[Any]]()
    for number, request in enumerate(requests):
        batch.add(number, begin(request, cache))
    for name, event in batch.events():
        found.setdefault(name, []).append(event)
    return found


def begin(request: Request, cache: ComponentCache) -> Callable[[], Events]:
    return lambda: stream(request, keep=SaveOptions(None), cache=cache)


def frames_in(events: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Frames of a run that ended well, or that was never in a batch."""
    ends = [each.error for each in events if isinstance(each, RunEnded)]
    assert ends in ([None], []), ends
    return np.concatenate([each.frames for each in events if isinstance(each, FramesDecoded)])


def alone(request: Request) -> np.ndarray[Any, Any]:
    return frames_in(list(begin(request, ComponentCache())()))


@cache
def lone(number: int) -> np.ndarray[Any, Any]:
    """Frames of `of_shapes` alone, for tests that change nothing about runs."""
    return alone(of_shapes(number))


def of_shapes(number: int, **more: Any) -> Request:
    return Request(prompt=PROMPTS[number], seed=number, **{**SHAPES, **more})


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_runs_of_the_embedded_model_meet(dtype: str, joined: list[int]) -> None:
    requests = [of_shapes(number, dtype=dtype) for number in range(3)]
    cache = ComponentCache()
    found = events_of(requests, cache)
    for number, request in enumerate(requests):
        assert np.array_equal(frames_in(found[number]), alone(request))
    assert joined == [3] * SHAPES["num_inference_steps"]
    assert sorted(name for name, *_ in cache.models()) == ["shapes"] * 3, "given back once"


@pytest.mark.parametrize("name", slow_unless(("opensora-1.2",), tiny_families.OURS))
def test_every_family(name: str, tiny_models: Models, joined: list[int]) -> None:
    asked = {**tiny_families.asked(name), "model": str(tiny_models(name))}
    requests = [Request(**{**asked, "seed": seed}) for seed in range(3)]
    if "prompt" in asked:
        requests[1] = Request(**{**asked, "seed": 1, "prompt": "a red"})
    found = events_of(requests, ComponentCache())
    for number, request in enumerate(requests):
        assert np.array_equal(frames_in(found[number]), alone(request))
    assert joined, "no call was made as one"


def test_a_run_joins_and_leaves_at_any_step(joined: list[int]) -> None:
    cache, batch, found = ComponentCache(), BatchedRuns(), dict[int, list[Any]]()
    batch.add(0, begin(of_shapes(0), cache))
    for name, event in batch.events():
        found.setdefault(name, []).append(event)
        step = event.step if isinstance(event, Step) and event.stage == "denoise" else None
        if (name, step) == (0, 2):
            batch.add(1, begin(of_shapes(1), cache))
            batch.add(2, begin(of_shapes(2), cache))
        if (name, step) == (2, 3):
            batch.stop(2)
    for number in range(2):
        assert np.array_equal(frames_in(found[number]), lone(number))
    assert isinstance(found[2][-1], RunEnded)
    assert not any(isinstance(each, FramesDecoded) for each in found[2])
    assert {2, 3} <= {*joined}


def test_an_error_is_of_its_run_alone(joined: list[int]) -> None:
    found = events_of([of_shapes(0), of_shapes(1, height=33), of_shapes(2)], ComponentCache())
    assert isinstance(found[1][-1].error, InputError)
    for number in (0, 2):
        assert np.array_equal(frames_in(found[number]), lone(number))


def test_a_run_of_another_plan_leaves(joined: list[int]) -> None:
    found = events_of([of_shapes(0), of_shapes(1, dtype="bf16")], ComponentCache())
    assert isinstance(found[1][-1].error, LeftBatchError)
    assert np.array_equal(frames_in(found[0]), lone(0))
    assert not joined


def test_errors_of_torch_are_caught_in_a_run() -> None:
    """As torch makes an error it walks the stack, which must be whole, whoever reads the events."""

    def catching() -> Iterator[Any]:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="size"):
                torch.zeros(2) @ torch.zeros(3)
            yield Note("caught")

    def read(events: Iterator[Any], depth: int) -> Any:
        """The next event, asked for in that many calls of C code."""
        if not depth:
            return next(events)
        [event] = map(partial(read, events), [depth - 1])
        return event

    nested = reduce(lambda inner, _: [inner], range(200), [0])
    for depth in range(60):
        batch = BatchedRuns()
        batch.add(depth, catching)
        events = batch.events()
        found = [read(events, depth)]
        for event in events:
            json.dumps(nested)  # writes over the stack that was
            found.append(event)
        assert found == [*[(depth, Note("caught"))] * 3, (depth, RunEnded())]


def test_what_reaches_other_videos_is_refused(
    joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = SelfAttention.forward

    def mixing(self: SelfAttention, x: torch.Tensor, *more: Any) -> torch.Tensor:
        return forward(self, x, *more) + 1e-3 * x.mean()

    monkeypatch.setattr(SelfAttention, "forward", mixing)
    requests = [of_shapes(number) for number in range(2)]
    found = events_of(requests, ComponentCache())
    for number, request in enumerate(requests):
        assert np.array_equal(frames_in(found[number]), alone(request))
    assert joined == [2], "one look is enough"
    plan = next(each.plan for each in begin(requests[0], ComponentCache())())
    assert plan.batch.num_videos > 2, "others are tried"
    assert batch_certificates.certificates_of(plan)[2].verdict == "refused"


def test_a_batch_that_is_not_faster_is_not_used_again(
    joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_certificates, "LEAST_GAIN", 1e9)
    for module in (batch_certificates, batches):
        monkeypatch.setattr(module, "MOST_VIDEOS", 2)
    cache = ComponentCache()
    found = events_of([of_shapes(0), of_shapes(1)], cache)
    assert joined == [2] * batch_certificates._CALLS
    assert np.array_equal(frames_in(found[0]), lone(0))
    found = events_of([of_shapes(1), of_shapes(2)], cache)
    assert joined == [2] * batch_certificates._CALLS
    planned = found[0][0]
    assert isinstance(planned, Planned)
    assert planned.plan.batch is not None
    assert planned.plan.batch.num_videos == 1
    assert "times as many" in planned.plan.batch.why


def test_without_memory_for_both_calls_are_made_one_by_one(
    joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: BatchedModule, calls: Sequence[Any]) -> list[Any]:
        joined.append(len(calls))
        raise RuntimeError(TOO_LITTLE)

    monkeypatch.setattr(BatchedModule, "compute", fail)
    found = events_of([of_shapes(0), of_shapes(1)], ComponentCache())
    for number in range(2):
        assert np.array_equal(frames_in(found[number]), lone(number))
    assert joined == [2]


@pytest.mark.slow
def test_a_run_that_needs_a_repair_leaves_the_others(
    tmp_path: Path, tiny_models: Models, joined: list[int]
) -> None:
    folder = tiny_opensora.overflowing(tiny_models("opensora-1.2"), tmp_path / "model")
    half = {"dtype": "float16", "force": True, "device": "cpu", "num_frames": 1}
    asked = {**tiny_families.asked("opensora-1.2", **half), "forget_repairs": True}
    requests = [Request(**{**asked, "model": str(folder), "seed": seed}) for seed in range(2)]
    found = events_of(requests, ComponentCache())
    errors = [events[-1].error for events in found.values()]
    left = [each for each in errors if each is not None]
    assert left
    assert all(isinstance(each, LeftBatchError) and "alone" in str(each) for each in left)
    for number, error in enumerate(errors):
        if error is None:  # the last one is alone, and has its repair
            assert np.array_equal(frames_in(found[number]), alone(requests[number]))


def test_a_batch_is_planned_by_memory(joined: list[int]) -> None:
    plan = resolve(of_shapes(0))
    assert plan.batch is not None
    assert plan.batch.num_videos == batch_certificates.MOST_VIDEOS
    weights = sum(part.weight_bytes for part in plan.components)
    working = max(part.working_bytes for part in plan.components)
    room = weights + working + 1.5 * plan.component("denoiser").working_bytes
    plan = resolve(of_shapes(0, max_memory=f"{room / 0.92 / 1e3:.0f}kB"))
    assert plan.batch is not None
    assert plan.batch.num_videos == 2
    plan = resolve(of_shapes(0, max_memory=f"{(weights + working) / 0.92 / 1e3:.0f}kB"))
    assert plan.batch is not None
    assert (plan.batch.num_videos, plan.batch.why) == (1, "memory has room for one video at a time")


@pytest.mark.slow
@pytest.mark.parametrize("is_guarded", [True, False])
def test_compiled_blocks_compute_one_video_at_a_time(
    is_guarded: bool, tmp_path: Path, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their results are a little off, which tells them from those of blocks as written."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    compiler = PlantedCompiler(monkeypatch)
    compiler.by = 1 + 5e-6
    compiler.is_dynamic = True  # texts are as long as their words, a trial's as its limit
    compile_for(of_shapes(0), monkeypatch)
    if not is_guarded:
        for module in (batch_certificates, batches):
            monkeypatch.setattr(module, "has_compiled_blocks", lambda plan: False)
    requests = [of_shapes(number) for number in range(2)]
    found = events_of(requests, ComponentCache())
    assert bool(joined) != is_guarded
    plan = found[1][0].plan
    assert "compile" in plan.component("denoiser").fast_paths
    if is_guarded:
        assert (plan.batch.num_videos, "compiled" in plan.batch.why) == (1, True)
        for number, request in enumerate(requests):
            assert np.array_equal(frames_in(found[number]), alone(request))
        written = alone(of_shapes(0, disable=["compile"]))
        assert not np.array_equal(frames_in(found[0]), written)
