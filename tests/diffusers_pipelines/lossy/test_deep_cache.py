"""DeepCache in a diffusers pipeline: AnimateDiff by its own call, with a shallow UNet in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest

import everyframe
from everyframe.core.errors import InputError
from everyframe.core.events import ErrorEstimated, Event, Step
from everyframe.core.quality import SamplingMethod
from everyframe.fast_paths.modules.deep_features import DeepFeatures
from helpers.resumed_pipelines import check_resumed_equals_unbroken
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

STEPS = 8
ASKED: dict[str, Any] = {
    "prompt": "a red circle", "seed": 1, "num_inference_steps": STEPS, "guidance_scale": 5.0,
    "output": "float", **tiny_pipelines.CALLS["animatediff"],
}  # fmt: skip
METHOD = SamplingMethod("deepcache", 3)


@pytest.fixture(scope="module")
def pipe(tiny_models: Callable[[str], Path]) -> Any:
    pipe = diffusers.DiffusionPipeline.from_pretrained(tiny_models("animatediff"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def computed(pipe: Any) -> Iterator[list[str]]:
    """Names of the blocks that are computed."""
    names: list[str] = []
    parts = {"deep": pipe.unet.mid_block, "shallow": pipe.unet.up_blocks[-1].resnets[-1]}
    handles = [
        part.register_forward_hook(lambda *_, name=name: names.append(name))
        for name, part in parts.items()
    ]
    yield names
    for handle in handles:
        handle.remove()


def frames(pipe: Any, **more: Any) -> Any:
    return everyframe.run(pipe, **{**ASKED, **more}).frames


def by_hand(pipe: Any) -> Any:
    """The pipeline's own loop over a UNet that is given which steps are whole."""
    steps, whole = -1, METHOD.computed_steps(STEPS)
    with DeepFeatures(pipe.unet) as features:

        def begin(*_: Any) -> None:
            nonlocal steps
            steps += 1
            features.begin()
            features.is_shallow = steps not in whole

        scale = pipe.scheduler.scale_model_input

        def scaled(*given: Any) -> Any:
            begin()
            return scale(*given)

        pipe.scheduler.scale_model_input = scaled
        try:
            return frames(pipe)
        finally:
            del pipe.scheduler.scale_model_input


def test_it_is_the_shallow_unet_in_the_pipelines_own_loop(pipe: Any, computed: list[str]) -> None:
    events: list[Event] = []
    found = frames(pipe, quality=str(METHOD), on_event=events.append)
    assert computed.count("deep") == METHOD.num_computed
    assert computed.count("shallow") == STEPS
    assert [e.step for e in events if isinstance(e, Step)] == list(range(1, STEPS + 1))
    (estimate,) = [e for e in events if isinstance(e, ErrorEstimated)]
    assert estimate.error > 0
    np.testing.assert_array_equal(found, by_hand(pipe))
    exact = frames(pipe)
    assert np.abs(found - exact).max() > 1e-4
    np.testing.assert_array_equal(frames(pipe, quality=f"deepcache@{STEPS}"), exact)
    two = everyframe.run(pipe, **{**ASKED, "num_videos": 2, "quality": str(METHOD)})
    np.testing.assert_array_equal(two[0].frames, found)
    np.testing.assert_array_equal(two[1].frames, frames(pipe, seed=2, quality=str(METHOD)))


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in (1, 7)]


@pytest.mark.parametrize("limit", [None, pytest.param(1e-9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("after", [4, *SLOW])
def test_resumed_equals_unbroken(
    pipe: Any, after: int, limit: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))
    method = SamplingMethod("deepcache", 3, limit=limit)
    check_resumed_equals_unbroken(pipe, ASKED, method, after)


def test_a_transformer_is_refused_by_name(tmp_path: Path) -> None:
    tiny_pipelines.ltx(tmp_path / "ltx")
    with pytest.raises(
        InputError, match="can't do deepcache here; it can do abm2, taylor1, taylor2"
    ):
        everyframe.plan(
            "a fox", model=str(tmp_path / "ltx"), quality="deepcache@3", num_inference_steps=8,
            **tiny_pipelines.CALLS["ltx"],
        )  # fmt: skip
