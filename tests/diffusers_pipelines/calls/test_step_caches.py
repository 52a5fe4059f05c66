"""Step caches that a pipeline's owner enabled: named, kept, and empty at the start of each call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig, HookRegistry, apply_first_block_cache
from torch import Tensor, nn

import everyframe
from everyframe.core.errors import EveryframeError, EveryframeWarning
from everyframe.core.events import Event, Step
from everyframe.diffusers_pipelines.calls.step_caches import EmptyCaches, describe_cache
from everyframe.diffusers_pipelines.calls.step_tracking import StepTracker
from everyframe.runs.folder import all_runs
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

#: So high that all steps after a whole one are cached.
CONFIG = FirstBlockCacheConfig(threshold=0.5)
SIZE: dict[str, Any] = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 16}
ASKED: dict[str, Any] = {"prompt": "a fox", "num_inference_steps": 8, "guidance_scale": 5.0, **SIZE}
NOTE = "step cache in transformer and transformer_2, "


def apply_alone(module: Any, config: FirstBlockCacheConfig) -> None:
    """As `enable_cache` does, which sets a config besides."""
    apply_first_block_cache(module, config)
    HookRegistry.check_if_exists_or_initialize(module).invalidate_child_registries_cache()


def by_method(module: Any, config: FirstBlockCacheConfig) -> None:
    module.enable_cache(config)


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of runs for each test: others leave some, too."""
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))


@pytest.fixture
def make_pipe(tiny_models: Callable[[str], Path]) -> Callable[..., Any]:
    folder = tiny_models("wan")

    def make(enable: Callable[[Any, FirstBlockCacheConfig], None] | None = None) -> Any:
        pipe = tiny_pipelines.loaded(folder)
        pipe.set_progress_bar_config(disable=True)
        for module in (pipe.transformer, pipe.transformer_2) if enable is not None else ():
            enable(module, CONFIG)
        return pipe

    return make


def ours(pipe: Any, **more: Any) -> tuple[Any, list[str]]:
    """Frames, and the notes on step caches."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EveryframeWarning)
        video = everyframe.run(pipe, **ASKED, seed=7, output="float", **more)
    return video.frames, [str(each.message) for each in caught if "cache" in str(each.message)]


def theirs(pipe: Any) -> Any:
    generator = torch.Generator().manual_seed(7)
    return pipe(**ASKED, generator=generator, output_type="np").frames[0]


@pytest.mark.parametrize("enable", [by_method, pytest.param(apply_alone, marks=pytest.mark.slow)])
def test_it_is_named_and_the_video_is_that_of_the_pipeline_with_it(
    enable: Callable[..., None], make_pipe: Callable[..., Any]
) -> None:
    exact, silent = ours(make_pipe())
    pipe = make_pipe(enable)
    frames, (note,) = ours(pipe)
    assert not silent
    assert note.startswith(NOTE)
    assert "not that of exact steps" in note
    np.testing.assert_array_equal(frames, theirs(pipe))
    assert abs(frames - exact).max() > 0.1, "the cache is at work"


@pytest.mark.parametrize("enable", [pytest.param(by_method, marks=pytest.mark.slow), apply_alone])
def test_a_run_that_was_interrupted_leaves_nothing_in_it(
    enable: Callable[..., None], make_pipe: Callable[..., Any]
) -> None:
    """diffusers empties a cache after a whole call only. Resumed, all calls are computed."""

    class EnoughError(Exception):
        pass

    def stop(event: Event) -> None:
        if isinstance(event, Step) and event.step == 4:
            raise EnoughError

    pipe = make_pipe(enable)
    whole, _ = ours(pipe)
    with pytest.raises(EnoughError):
        ours(pipe, on_event=stop)
    (run,) = all_runs()
    with pytest.warns(EveryframeWarning, match=r"from the start$"):
        resumed = everyframe.resume(run.name, pipe=pipe, output="float")
    np.testing.assert_array_equal(resumed.frames, whole)
    np.testing.assert_array_equal(theirs(pipe), whole)


def test_a_run_is_not_resumed_with_another_threshold(make_pipe: Callable[..., Any]) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Step):
            raise KeyboardInterrupt

    pipe = make_pipe(by_method)
    with pytest.raises(KeyboardInterrupt):
        ours(pipe, on_event=stop)
    (run,) = all_runs()
    pipe.transformer.disable_cache()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.3))
    with pytest.raises(EveryframeError, match="transformer"):
        everyframe.resume(run.name, pipe=pipe, output="float")


def test_a_call_that_is_repeated_takes_nothing_of_the_one_that_failed(
    make_pipe: Callable[..., Any],
) -> None:
    cached, exact = make_pipe(by_method).transformer, make_pipe().transformer
    watch = StepTracker({"transformer": cached}, (), None, 2, lambda *_: None)
    x = torch.randn(1, 16, 2, 2, 2, generator=torch.Generator().manual_seed(1))
    text = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(2))

    def call(module: Any, x: Tensor) -> Tensor:
        with module.cache_context("cond"), torch.no_grad():
            answer: Tensor = module(x, torch.tensor([500.0]), text, return_dict=False)[0]
        return answer

    with EmptyCaches({"transformer": cached}, watch):
        assert torch.isnan(call(cached, x * torch.nan)).all()
        assert torch.isnan(call(cached, x)).any(), "diffusers takes what is there"
        with watch.paused():
            repeated = call(cached, x)
        assert torch.equal(repeated, call(exact, x))
        assert not torch.equal(call(cached, x * 1.1), call(exact, x * 1.1)), "it is on again"
    assert torch.equal(call(cached, x * 0.9), call(exact, x * 0.9)), "it is empty afterwards"


def test_cache_dit_is_known_by_its_marks() -> None:
    """What version 1.5.3 sets on a transformer, beside a `forward` of its own."""
    module: Any = nn.Linear(2, 2)
    assert describe_cache(module) == ""
    module._is_cached, module._context_manager = True, object()
    assert describe_cache(module) == "cache-dit"
    module._context_kwargs = {"cache_config": SimpleNamespace(strify=lambda: "DBCache_F1B0")}
    assert describe_cache(module) == "cache-dit DBCache_F1B0"
