"""Runs in several threads of one process: the bits of a run alone, and torch as it was before.

A run in a process of its own would be the same; here they share torch's switches.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from transformers import initialization

import everyframe
from everyframe.checkpoints.locate import locate
from everyframe.core.events import Event, FramesDecoded, Step
from everyframe.diffusers_pipelines.library_patches import quiet_libraries
from everyframe.families.opensora.family import OPEN_SORA
from everyframe.families.opensora.options import OpenSoraOptions
from everyframe.hardware import switches
from everyframe.hardware.cpu import cpu_threads
from everyframe.runtime.components.meta_init import build_on_meta, count_elements
from helpers.diagonals import diagonal
from helpers.new_thread import threads_of_a_new_thread
from helpers.tiny_checkpoints import pipelines as tiny_pipelines
from helpers.tiny_checkpoints.pipelines import loaded

OWN: dict[str, Any] = {
    "prompt": "a red circle", "size": "16x16", "num_frames": 3, "num_inference_steps": 2,
}  # fmt: skip
PIPE: dict[str, Any] = {"prompt": "a fox", "num_inference_steps": 2, **tiny_pipelines.CALLS["wan"]}
Array = np.ndarray[Any, Any]


def state() -> dict[str, Any]:
    """Every switch of torch that a run could leave behind."""
    backends: Any = torch.backends
    matmul = backends.cuda.matmul
    operations = (
        backends.cudnn.conv, backends.cudnn.rnn, matmul, backends.mkldnn.conv,
        backends.mkldnn.matmul,
    )  # fmt: skip
    return {
        "kernels": _cur_sdpa_kernel_backends(with_priority=True),
        "float32": [each.fp32_precision for each in operations],
        "old": (torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32),
        "sums": [
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_accumulation,
        ],
        "threads": (torch.get_num_threads(), threads_of_a_new_thread()),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "casts": torch._C._is_any_autocast_enabled(),
    }


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = state()
    yield
    gc.collect()
    assert state() == before
    assert not switches._PROCESS._holders
    assert not [each for each in threading.enumerate() if each.name == "everyframe-pipeline"]


@pytest.fixture(scope="module")
def folders(tiny_models: Callable[[str], Path]) -> dict[str, Path]:
    return {"own": tiny_models("opensora-1.2"), "wan": tiny_models("wan")}


def generated(folder: Path, seed: int, asked: dict[str, Any]) -> Array:
    video = everyframe.generate(model=str(folder), seed=seed, output="float", **asked)
    assert isinstance(video, everyframe.Video)
    return video.frames


def run_with(pipe: Any, seed: int) -> Array:
    video = everyframe.run(pipe, seed=seed, output="float", **PIPE)
    assert isinstance(video, everyframe.Video)
    return video.frames


@pytest.fixture(scope="module")
def works(folders: dict[str, Path]) -> dict[str, Callable[[], Array]]:
    """What runs in a thread each: models that we load, and pipelines in memory."""
    pipes = [loaded(folders["wan"]) for _ in range(2)]
    return {
        "ours": lambda: generated(folders["own"], 1, OWN),
        "ours, by fast attention": lambda: generated(
            folders["own"], 2, {**OWN, "attention": "flash"}
        ),
        "a folder": lambda: generated(folders["wan"], 3, PIPE),
        "in memory": lambda: run_with(pipes[0], 4),
        "in memory, cast": lambda: cast(lambda: run_with(pipes[1], 5)),
    }


def cast(work: Callable[[], Array]) -> Array:
    with torch.autocast("cpu", torch.bfloat16):
        return work()


#: Runs of each thread beside those of the others.
TIMES = 2


def test_each_of_many_runs_has_its_bits(works: dict[str, Callable[[], Array]]) -> None:
    alone = {name: work() for name, work in works.items()}
    assert len({each.tobytes() for each in alone.values()}) == len(works)
    made: dict[str, list[Array]] = {name: [] for name in works}
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def go(name: str) -> None:
        try:
            start.wait()
            for _ in range(TIMES):
                made[name].append(works[name]())
        except BaseException as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=go, args=(name,)) for name in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for name, all_made in made.items():
        assert len(all_made) == TIMES
        assert all(np.array_equal(each, alone[name]) for each in all_made), name


def test_a_model_that_is_built_while_another_loads_has_its_tied_weights(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers unties the weights of all of its classes while it loads one."""
    spec = OPEN_SORA.recognise(locate(str(folders["own"])), OpenSoraOptions())
    assert spec is not None
    build = partial(spec.builder.build, "text_encoder")
    wanted = count_elements(build_on_meta(build))
    is_loading, is_built = threading.Event(), threading.Event()

    @contextmanager
    def slow(untied: Callable[[], Any] = initialization.no_tie_weights) -> Iterator[None]:
        with untied():
            is_loading.set()
            is_built.wait(1)  # it is not built before the end of the load, so this runs out
            yield

    monkeypatch.setattr(initialization, "no_tie_weights", slow)
    thread = threading.Thread(target=generated, args=(folders["wan"], 3, PIPE))
    thread.start()
    try:
        assert is_loading.wait(60)
        built = build_on_meta(build)
    finally:
        is_built.set()
        thread.join()
    assert count_elements(built) == wanted


def stream_of(folders: dict[str, Path], which: str, pipe: Any) -> Iterator[Event]:
    if which == "in memory":
        return everyframe.stream(everyframe.Request(seed=4, **PIPE), pipe=pipe)
    asked, folder = (OWN, "own") if which == "ours" else (PIPE, "wan")
    return everyframe.stream(everyframe.Request(seed=4, model=str(folders[folder]), **asked))


KINDS = ("ours", "a folder", "in memory")
WHICH = pytest.mark.parametrize("which", KINDS)


def test_streams_that_are_read_by_turns_in_one_thread(folders: dict[str, Path]) -> None:
    pipe = loaded(folders["wan"])
    alone = {which: frames_of(list(stream_of(folders, which, pipe))) for which in KINDS}
    streams = {which: stream_of(folders, which, pipe) for which in KINDS}
    seen: dict[str, list[Event]] = {which: [] for which in KINDS}
    before = state()
    while streams:
        for which, events in tuple(streams.items()):
            event = next(events, None)
            assert state() == before, "whoever reads has torch as it was"
            if event is None:
                del streams[which]
            else:
                seen[which].append(event)
    for which in KINDS:
        assert np.array_equal(frames_of(seen[which]), alone[which])


def frames_of(events: list[Event]) -> Array:
    return np.concatenate([each.frames for each in events if isinstance(each, FramesDecoded)])


@pytest.mark.parametrize(
    ("how", "which"), diagonal(["closed", "forgotten", "forgotten in a circle", "raised"], KINDS)
)
def test_a_stream_that_is_left_half_way(folders: dict[str, Path], which: str, how: str) -> None:
    pipe = loaded(folders["wan"])
    events = stream_of(folders, which, pipe)
    for event in events:
        if isinstance(event, Step):
            break
    if how == "closed":
        events.close()  # type: ignore[attr-defined]
    elif how == "raised":
        with pytest.raises(KeyError):
            events.throw(KeyError)  # type: ignore[attr-defined]
    elif how == "forgotten in a circle":
        circle: list[Any] = [events]
        circle.append(circle)
        del circle
    del events, event


@WHICH
def test_a_stream_that_is_collected_in_the_middle_of_another_run(
    folders: dict[str, Path], which: str
) -> None:
    """Collecting happens wherever memory is asked for, also where a turn is given or taken."""
    pipe, other = loaded(folders["wan"]), loaded(folders["wan"])
    alone = run_with(other, 6)
    events = stream_of(folders, which, pipe)
    next(each for each in events if isinstance(each, Step))
    left = [events]
    del events
    hook = other.transformer.register_forward_pre_hook(lambda *_: left.clear())
    assert np.array_equal(run_with(other, 6), alone)
    hook.remove()
    assert not left


@pytest.mark.slow
@WHICH
def test_an_interrupt_at_any_time(folders: dict[str, Path], which: str) -> None:
    pipe, before = loaded(folders["wan"]), state()
    delays = random.Random(0)
    seconds = 0.4
    for _ in range(8):
        timer = threading.Timer(
            delays.uniform(0, seconds), lambda: os.kill(os.getpid(), signal.SIGINT)
        )
        try:
            timer.start()
            if which == "in memory":
                run_with(pipe, 4)
            else:
                list(stream_of(folders, which, pipe))
            timer.join()
            threading.Event().wait(5)
        except KeyboardInterrupt:
            timer.cancel()
        assert state() == before


def test_a_model_of_ours_is_as_precise_within_somebodys_autocast(folders: dict[str, Path]) -> None:
    """Precision by construction: what is set around the call changes no bit of it."""
    for folder, asked in (("own", OWN), ("wan", PIPE)):
        wanted = generated(folders[folder], 1, asked)
        with ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(cpu_threads(torch.get_num_threads() + 1))
            assert np.array_equal(generated(folders[folder], 1, asked), wanted)
            assert torch.is_autocast_enabled("cpu")


def test_what_another_thread_casts_is_its_own(works: dict[str, Callable[[], Array]]) -> None:
    """One that is not ours, beside runs: its autocast, generators and number of threads."""
    end, errors = threading.Event(), []
    layer = torch.nn.Linear(8, 8)
    x = torch.ones(4, 8)

    def compute() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            made = layer(x)
            assert torch.is_autocast_enabled("cpu")
            return [made, torch.randn(64, generator=generator, dtype=torch.bfloat16)]

    wanted, number = compute(), torch.get_num_threads()

    def go() -> None:
        torch.set_num_threads(number)
        while not end.is_set():
            again = compute()
            if not all(map(torch.equal, again, wanted)) or torch.get_num_threads() != number:
                errors.append(again)
                return

    thread = threading.Thread(target=go)
    thread.start()
    for work in works.values():
        work()
    end.set()
    thread.join()
    assert not errors


def test_libraries_give_afterwards_what_they_gave_before(folders: dict[str, Path]) -> None:
    """Also while a stream stands still, and when two that load overlap."""
    from diffusers.utils import logging as library

    before = library.get_verbosity(), library.is_progress_bar_enabled()
    streams = [stream_of(folders, "a folder", None) for _ in range(2)]
    while streams:
        for events in tuple(streams):
            if next(events, None) is None:
                streams.remove(events)
            assert (library.get_verbosity(), library.is_progress_bar_enabled()) == before
    with quiet_libraries():
        thread = quiet_libraries(even_errors=True)
        thread.__enter__()
        assert library.get_verbosity() == library.CRITICAL
    assert library.get_verbosity() == library.CRITICAL
    thread.__exit__(None, None, None)
    assert (library.get_verbosity(), library.is_progress_bar_enabled()) == before
