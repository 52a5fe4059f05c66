"""A pipeline in memory is called as its owner would call it: torch is as it is set around the call.

Compared with the same pipeline of diffusers, called beside it under the same settings, bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import everyframe
from everyframe.core.events import Event, Note, Planned, Step
from everyframe.core.plan import Switches
from everyframe.diffusers_pipelines.loaded_pipeline import given_pipeline
from everyframe.engine.resumption.resume import resume_run
from everyframe.families.registry import family_options
from everyframe.hardware.cpu import cpu_threads
from everyframe.planning.resolve import LoadedModel
from everyframe.runs.folder import find_run
from helpers.diagonals import diagonal
from helpers.pipeline_calls import MAKERS, asked_of, ours, streamed, theirs
from helpers.tiny_checkpoints.pipelines import loaded


@pytest.fixture(scope="module")
def wan(tiny_models: Callable[[str], Path]) -> Any:
    return loaded(tiny_models("wan"))


@pytest.fixture(scope="module")
def mochi(tiny_models: Callable[[str], Path]) -> Any:
    return loaded(tiny_models("mochi"))


@contextmanager
def products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Halved(TorchFunctionMode):
    """Somebody's mode, which changes what is computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is torch.nn.functional.silu else result


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bfloat16": partial(torch.autocast, "cpu", torch.bfloat16),
    "no cache": partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False),
    "float16": partial(torch.autocast, "cpu", torch.float16),
    "one thread": partial(cpu_threads, 1),
    "two threads": partial(cpu_threads, 2),
    "narrow products": partial(products, "medium"),
    "inference": torch.inference_mode,
    "a mode": Halved,
}


@pytest.mark.parametrize(("way", "make"), diagonal(WAYS, [ours, streamed]))
def test_frames_are_those_of_a_call_beside_it(wan: Any, way: str, make: Any) -> None:
    with WAYS[way]():
        wanted = theirs(wan, "wan")
        assert np.array_equal(make(wan, "wan"), wanted)
    if way in ("bfloat16", "float16", "a mode"):
        assert not np.array_equal(theirs(wan, "wan"), wanted), "what is set makes a difference"


@MAKERS
def test_a_text_encoder_that_is_wider_than_the_rest_runs_within_autocast(
    tiny_models: Callable[[str], Path], make: Any
) -> None:
    """As Mochi's page has it; without autocast two dtypes meet."""
    pipe = loaded(tiny_models("mochi")).to(torch.bfloat16)
    pipe.text_encoder.to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert np.array_equal(make(pipe, "mochi"), theirs(pipe, "mochi"))


@MAKERS
def test_modules_see_what_is_set(wan: Any, make: Any) -> None:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    seen: list[tuple[Any, ...]] = []

    def look(*_: Any) -> None:
        seen.append(
            (
                torch.get_num_threads(),
                torch.get_float32_matmul_precision(),
                cudnn.allow_tf32,
                matmul.allow_fp16_reduced_precision_reduction,
                matmul.allow_bf16_reduced_precision_reduction,
                torch.is_autocast_enabled("cpu"),
                torch.is_inference_mode_enabled(),
                torch.get_default_device(),
            )
        )

    hook = wan.transformer.register_forward_pre_hook(look)
    with ExitStack() as stack:
        stack.callback(hook.remove)
        for way in ("two threads", "bfloat16", "inference"):
            stack.enter_context(WAYS[way]())
        stack.enter_context(products("high"))
        stack.enter_context(torch.device("cpu", 0))
        theirs(wan, "wan")
        wanted = set(seen)
        make(wan, "wan")
    assert set(seen) == wanted
    assert seen[0][:6] == (2, "high", True, True, True, True)


@MAKERS
def test_what_counts_operations_around_the_call_counts_them(wan: Any, make: Any) -> None:
    with FlopCounterMode(display=False) as direct:
        theirs(wan, "wan")
    with FlopCounterMode(display=False) as around:
        make(wan, "wan")
    assert around.get_total_flops() == direct.get_total_flops() > 0


def test_the_call_is_made_in_the_callers_thread(wan: Any) -> None:
    """There a profiler sees it, and whatever else is kept for each thread."""
    threads = set()
    hook = wan.transformer.register_forward_pre_hook(lambda *_: threads.add(threading.get_ident()))
    with torch.profiler.profile() as profile:
        ours(wan, "wan")
    hook.remove()
    assert threads == {threading.get_ident()}
    assert any("mm" in event.key for event in profile.key_averages())


@pytest.mark.parametrize(
    ("way", "make"),
    [
        ("as it is", ours),
        ("bfloat16", streamed),
        pytest.param("two threads", ours, marks=pytest.mark.slow),
        pytest.param("narrow products", streamed, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_pipeline_is_compiled_once(
    tiny_models: Callable[[str], Path], way: str, make: Any
) -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    pipe, counter = loaded(tiny_models("wan")), CompileCounter()
    for name in ("transformer", "transformer_2"):
        setattr(pipe, name, torch.compile(getattr(pipe, name), backend=counter))
    with WAYS[way]() if way in WAYS else ExitStack():
        wanted = theirs(pipe, "wan")
        compiled = counter.frame_count
        assert np.array_equal(make(pipe, "wan"), wanted)
        theirs(pipe, "wan")
    torch._dynamo.reset()
    assert counter.frame_count == compiled > 0


def test_the_plan_says_what_is_set(wan: Any) -> None:
    def switches(events: Iterator[Event]) -> Switches:
        planned = next(events)
        assert isinstance(planned, Planned)
        assert planned.plan.switches is not None
        assert planned.plan.num_threads == planned.plan.switches.num_threads
        events.close()  # type: ignore[attr-defined]
        return planned.plan.switches

    def plan() -> Switches:
        return switches(everyframe.stream(everyframe.Request(**asked_of("wan")), pipe=wan))

    with cpu_threads(2), torch.autocast("cpu", torch.bfloat16), products("high"):
        seen = plan()
    assert seen.num_threads == 2
    assert seen.casts == (("cpu", "bfloat16"),)
    assert dict(seen.float32)["products of CUDA"] == "tf32"
    assert "allow_bf16_reduced_precision_reduction" in seen.narrow_sums
    assert plan().casts == ()
    events = everyframe.stream(everyframe.Request(**asked_of("wan")), pipe=wan)
    with torch.autocast("cpu", torch.bfloat16):
        assert switches(events).casts == (), "as it is where the stream is asked for"


def test_what_is_otherwise_than_in_the_record_is_reported(wan: Any) -> None:
    with cpu_threads(2):
        video = everyframe.run(wan, **asked_of("wan"))
    assert isinstance(video, everyframe.Video)
    assert video.record["plan"]["switches"]["num_threads"] == 2
    seen: list[Event] = []
    with cpu_threads(1):
        again = everyframe.run(wan, from_record=video.record, on_event=seen.append)
    assert isinstance(again, everyframe.Video)
    assert again.record["plan"]["num_threads"] == 1
    notes = [each.text for each in seen if isinstance(each, Note)]
    assert any("torch.set_num_threads(2) before the call" in text for text in notes)


def test_a_run_that_is_resumed_is_as_its_owner_has_set_torch_now(
    wan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path))

    def interrupted() -> None:
        def stop(event: Event) -> None:
            if isinstance(event, Step):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ours(wan, "wan", on_event=stop)

    with torch.autocast("cpu", torch.bfloat16):
        interrupted()
        video = everyframe.resume(pipe=wan, output="float")
        assert isinstance(video, everyframe.Video)
        assert np.array_equal(video.frames, theirs(wan, "wan"))
        interrupted()
    model = given_pipeline(wan, family_options("pipeline", _request()))
    given = LoadedModel("pipeline", model, model.digests)
    events = list(resume_run(find_run(None), given_model=given))
    notes = [each.text for each in events if isinstance(each, Note)]
    assert any("torch's casts was [['cpu', 'bfloat16']], is []" in text for text in notes)


def _request() -> everyframe.Request:
    return everyframe.Request(**asked_of("wan"))


def test_what_goes_beyond_float16_within_autocast_is_repaired(
    tiny_models: Callable[[str], Path],
) -> None:
    """The module that is raised to float32 is not cast back by autocast."""
    pipe = loaded(tiny_models("wan"))
    with torch.no_grad():
        pipe.transformer.blocks[0].ffn.net[0].proj.weight.mul_(1e6)
        pipe.transformer.blocks[0].ffn.net[2].weight.mul_(1e-6)
    wide = theirs(pipe, "wan")
    with torch.autocast("cpu", torch.float16):
        assert not np.isfinite(theirs(pipe, "wan")).all()
        frames = ours(pipe, "wan")
    assert np.abs(frames - wide).mean() < 0.05
    assert np.array_equal(theirs(pipe, "wan"), wide), "and left as it was"
    assert not torch.is_autocast_enabled("cpu")


def test_the_switches_of_a_plan_are_plain_data() -> None:
    switches = Switches(2, (("cpu", "bfloat16"),))
    assert asdict(switches)["casts"] == (("cpu", "bfloat16"),)


@pytest.mark.parametrize("given", [{"num_devices": 2}, {"devices": "cpu,cpu"}])
def test_several_devices_are_for_a_pipeline_that_was_saved(wan: Any, given: Any) -> None:
    """It spoke of a device that nobody gave, and of a variable that nobody set."""
    with pytest.raises(everyframe.InputError, match=r"save it .*generate\(.*num_devices=2\)"):
        everyframe.run(wan, **asked_of("wan"), **given)
