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
from torch._dynamo.testing import CompileCounter
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import everyframe
import tiny_pipelines
from everyframe.core.errors import EveryframeError, InputError
from everyframe.core.events import Event, FramesDecoded, Note, Planned, Step
from everyframe.core.plan import Switches
from everyframe.diffusers_pipelines.loaded_pipeline import given_pipeline
from everyframe.engine.resume import resume_run
from everyframe.families.registry import family_options
from everyframe.hardware.cpu import cpu_threads
from everyframe.planning.resolve import LoadedModel
from everyframe.runs.folder import find_run
from tiny_pipelines import loaded

ASKED: dict[str, Any] = {"prompt": "a red fox", "num_inference_steps": 2, "seed": 3}
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("models") / name
            tiny_pipelines.TINY[name](made[name])
        return made[name]

    return folder


@pytest.fixture(scope="module")
def wan(folders: Callable[[str], Path]) -> Any:
    return loaded(folders("wan"))


@pytest.fixture(scope="module")
def mochi(folders: Callable[[str], Path]) -> Any:
    return loaded(folders("mochi"))


def asked_of(name: str) -> dict[str, Any]:
    return {**ASKED, **tiny_pipelines.CALLS[name]}


def theirs(pipe: Any, name: str, seed: int = 3) -> Array:
    """Frames of diffusers, called as its documentation says."""
    asked = {**asked_of(name), "generator": torch.Generator().manual_seed(seed)}
    width, height = map(int, asked.pop("size").split("x"))
    del asked["seed"]
    given = {"height": height, "width": width, **asked.pop("option", {}), **asked}
    frames: Array = pipe(**given, output_type="np").frames[0]
    return frames


def ours(pipe: Any, name: str, **more: Any) -> Array:
    video = everyframe.run(pipe, output="float", **asked_of(name), **more)
    assert isinstance(video, everyframe.Video)
    return video.frames


def streamed(pipe: Any, name: str) -> Array:
    events = everyframe.stream(everyframe.Request(**asked_of(name)), pipe=pipe)
    return np.concatenate([each.frames for each in events if isinstance(each, FramesDecoded)])


MAKERS = pytest.mark.parametrize("make", [ours, streamed])


@contextmanager
def set_to(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


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


@MAKERS
@pytest.mark.parametrize("way", WAYS)
def test_frames_are_those_of_a_call_beside_it(wan: Any, way: str, make: Any) -> None:
    with WAYS[way]():
        wanted = theirs(wan, "wan")
        assert np.array_equal(make(wan, "wan"), wanted)
    if way in ("bfloat16", "float16", "a mode"):
        assert not np.array_equal(theirs(wan, "wan"), wanted), "what is set makes a difference"


@MAKERS
def test_a_text_encoder_that_is_wider_than_the_rest_runs_within_autocast(
    folders: Callable[[str], Path], make: Any
) -> None:
    """As Mochi's page has it; without autocast two dtypes meet."""
    pipe = loaded(folders("mochi")).to(torch.bfloat16)
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


@MAKERS
@pytest.mark.parametrize("way", ["as it is", "bfloat16", "two threads", "narrow products"])
def test_a_compiled_pipeline_is_compiled_once(
    folders: Callable[[str], Path], way: str, make: Any
) -> None:
    torch._dynamo.reset()
    pipe, counter = loaded(folders("wan")), CompileCounter()
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


def test_what_is_otherwise_than_in_the_record_is_told(wan: Any) -> None:
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


def test_a_run_that_is_gone_on_with_is_as_its_owner_has_set_torch_now(
    wan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path))

    def broken_off() -> None:
        def stop(event: Event) -> None:
            if isinstance(event, Step):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ours(wan, "wan", on_event=stop)

    with torch.autocast("cpu", torch.bfloat16):
        broken_off()
        video = everyframe.resume(pipe=wan, output="float")
        assert isinstance(video, everyframe.Video)
        assert np.array_equal(video.frames, theirs(wan, "wan"))
        broken_off()
    model = given_pipeline(wan, family_options("pipeline", _request()))
    given = LoadedModel("pipeline", model, model.digests)
    events = list(resume_run(find_run(None), given_model=given))
    notes = [each.text for each in events if isinstance(each, Note)]
    assert any("torch's casts was [['cpu', 'bfloat16']], is []" in text for text in notes)


def _request() -> everyframe.Request:
    return everyframe.Request(**asked_of("wan"))


def test_events_are_told_once_and_in_the_order_of_a_stream(wan: Any) -> None:
    told: list[Event] = []
    ours(wan, "wan", on_event=told.append)
    read = list(everyframe.stream(everyframe.Request(**asked_of("wan")), pipe=wan))

    def names(events: list[Event]) -> list[str]:
        return [f"{type(each).__name__} {getattr(each, 'step', '')}" for each in events]

    assert names(told) == names(read)


def test_an_event_is_told_while_the_call_is_under_way(wan: Any) -> None:
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    hooks = [each.register_forward_hook(count) for each in (wan.transformer, wan.transformer_2)]
    seen: list[int] = []
    ours(wan, "wan", on_event=lambda e: seen.append(calls[0]) if isinstance(e, Step) else None)
    for hook in hooks:
        hook.remove()
    assert seen[0] < calls[0]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_what_a_listener_raises_comes_out_as_it_is(wan: Any, error: BaseException) -> None:
    """A `ValueError` is no refusal of the pipeline's, which raises such of its own."""
    wanted, before = theirs(wan, "wan"), dict(vars(wan.scheduler))

    def raises(event: Event) -> None:
        if isinstance(event, Step):
            raise error

    with pytest.raises(type(error)) as caught:
        ours(wan, "wan", on_event=raises)
    assert caught.value is error
    assert vars(wan.scheduler).keys() == before.keys()
    assert not any(each._forward_pre_hooks for each in wan.transformer.modules())
    assert np.array_equal(ours(wan, "wan"), wanted)


def read_until_step(events: Iterator[Event]) -> None:
    next(each for each in events if isinstance(each, Step))


def test_calling_the_pipeline_in_the_middle_of_its_stream_is_refused(wan: Any) -> None:
    """It hung for ever; and the run can't go on either, since its scheduler is another now."""
    events = everyframe.stream(everyframe.Request(**asked_of("wan")), pipe=wan)
    read_until_step(events)
    with pytest.raises(InputError, match="was called while a run of it was under way"):
        theirs(wan, "wan")
    with pytest.raises(EveryframeError, match="the run is interrupted: the pipeline was called"):
        list(events)
    assert np.array_equal(ours(wan, "wan"), theirs(wan, "wan"))


def test_calling_the_pipeline_when_told_of_a_step_is_refused(wan: Any) -> None:
    def calls(event: Event) -> None:
        if isinstance(event, Step):
            theirs(wan, "wan")

    with pytest.raises(InputError, match="was called while a run of it was under way"):
        ours(wan, "wan", on_event=calls)


@MAKERS
def test_a_part_may_be_called_in_the_middle(wan: Any, make: Any) -> None:
    """A preview: the decoder of a pipeline whose steps are not done."""
    wanted = theirs(wan, "wan")
    latents = torch.randn(1, 16, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    events = everyframe.stream(everyframe.Request(**asked_of("wan")), pipe=wan)

    def preview() -> None:
        with torch.no_grad():
            wan.vae.decode(latents)

    if make is ours:
        frames = ours(wan, "wan", on_event=lambda e: preview() if isinstance(e, Step) else None)
        assert np.array_equal(frames, wanted)
        return
    got = []
    for event in events:
        if isinstance(event, Step):
            preview()
        elif isinstance(event, FramesDecoded):
            got.append(event.frames)
    assert np.array_equal(np.concatenate(got), wanted)


def test_a_second_run_of_one_pipeline_is_refused(wan: Any) -> None:
    events = everyframe.stream(everyframe.Request(**asked_of("wan")), pipe=wan)
    read_until_step(events)
    with pytest.raises(InputError, match="is in the middle of another run"):
        ours(wan, "wan")
    frames = [each.frames for each in events if isinstance(each, FramesDecoded)]
    assert np.array_equal(np.concatenate(frames), theirs(wan, "wan"))
    assert np.array_equal(ours(wan, "wan"), theirs(wan, "wan")), "afterwards it may"


def test_two_pipelines_that_share_a_part_do_not_run_at_once(wan: Any) -> None:
    other = type(wan)(**{**wan.components, "scheduler": wan.scheduler})
    events = everyframe.stream(everyframe.Request(**asked_of("wan")), pipe=wan)
    read_until_step(events)
    with pytest.raises(InputError, match="or a part of it, is in the middle of another run"):
        ours(other, "wan")
    events.close()  # type: ignore[attr-defined]


def test_what_goes_beyond_float16_within_autocast_is_repaired(
    folders: Callable[[str], Path],
) -> None:
    """The module that is raised to float32 is not cast back by autocast."""
    pipe = loaded(folders("wan"))
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
