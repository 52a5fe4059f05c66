"""Every video pipeline that diffusers has: those that run, against diffusers alone, in float32.

The whole sweep runs with ``--slow``. The same modules are called with the same numbers; what may be
left is the order of sums, as diffusers computes with another number of threads: 1e-6 was measured,
1e-4 of a frame's range is allowed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import everyframe
from everyframe.core.events import AudioDecoded, Event, FramesDecoded, Planned, Step
from everyframe.diffusers_pipelines.inputs.signature import (
    NAMES,
    VIDEO_RESULT,
    of_class,
    of_pipeline,
)
from everyframe.ops.attention import PLAIN, by_kernel
from helpers.tiny_checkpoints import diffusers as tiny_diffusers
from helpers.tiny_checkpoints.diffusers import CASES, table
from helpers.tiny_checkpoints.diffusers.cases import PROMPT, SEED, STEPS, Case, as_python, written
from helpers.tiny_checkpoints.pipelines import loaded

PROFILES = ("cuda-sm75", "mps")
#: Where a plan refuses them: there is no float64, in which they have schedule or positions.
REFUSED_ON = dict.fromkeys(
    ("AnyFlowPipeline", "AnyFlowFARPipeline", "HeliosPyramidDistilledModularPipeline",
     "WanAnimate2ModularPipeline", "WanAnimate2DistilledModularPipeline"),
    ("mps",),
)  # fmt: skip
#: Whose dry run ends: on a CPU, where small tensors are computed, its rays are in float32 alone.
PLANNED_ROUGHLY = ("SanaWMPipeline",)


def asked_of(case: Case) -> dict[str, Any]:
    """Options of ours for one run."""
    all_of_them = {"prompt": PROMPT, "num_inference_steps": STEPS, "seed": SEED, **case.asked}
    return {name: value for name, value in all_of_them.items() if value is not None}


def sides(asked: dict[str, Any]) -> tuple[int, int]:
    """(height, width)."""
    width, height = map(int, asked.get("size", "16x16").split("x"))
    return height, width


def theirs(pipe: Any, asked: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Frames that diffusers makes, called as its documentation says."""
    height, width = sides(asked)
    taken = of_pipeline(pipe).parameters
    given = as_python(asked, height, width)
    call: dict[str, Any] = {}
    for name, value in given.pop("option", {}).items():
        record = taken[name].record
        call[name] = [record(**each) for each in value] if record else value
    if "seed" in taken:
        call["seed"] = given["seed"]
    call["generator"] = torch.Generator().manual_seed(given.pop("seed"))
    if given.pop("size", None) and "height" in taken:
        call |= {"height": height, "width": width}
    if given.pop("vae_tiling", False):
        pipe.vae.enable_tiling()
    for name, value in given.items():
        call[next(own for own in NAMES[name] if own in taken)] = value
    if "output_type" in taken:
        call["output_type"] = "np"
    with by_kernel(PLAIN):
        if hasattr(pipe, "blocks"):
            given_back = pipe(**call, output=[VIDEO_RESULT])[VIDEO_RESULT]
        else:
            result = pipe(**call)
            given_back = result.frames if hasattr(result, "frames") else result.video
    frames = np.asarray(given_back)
    return frames[0] if frames.ndim == 5 else frames


def collected(request: everyframe.Request) -> tuple[list[Event], np.ndarray[Any, Any]]:
    """All events, and the frames among them."""
    seen = list(everyframe.stream(request))
    return seen, np.concatenate(
        [event.frames for event in seen if isinstance(event, FramesDecoded)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_runs_as_it_does_in_diffusers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with case.within():
        folder = tmp_path / "model"
        pipe = case.build()
        how_saved = {"overwrite_modular_index": True} if hasattr(pipe, "blocks") else {}
        pipe.save_pretrained(str(folder), **how_saved)
        asked = asked_of(case)
        given = written(asked, tmp_path, *sides(asked))
        _plans(name, everyframe.Request(model=str(folder), **given))
        how: dict[str, Any] = {"dtype": "fp32", "attention": PLAIN}
        request = everyframe.Request(model=str(folder), **how, **given)
        seen, frames = collected(request)
        assert np.array_equal(frames, collected(request)[1]), "the same bits again"
        wanted = theirs(loaded(folder), asked)
    assert frames.shape == wanted.shape
    assert np.abs(frames - wanted).max() <= 1e-4 * max(1, float(np.abs(wanted).max()))
    assert frames.std() > 0.05, "a flat picture would compare equal to anything flat"
    steps = [event for event in seen if isinstance(event, Step)]
    assert case.made is None or len(steps) == case.made
    assert any(isinstance(event, AudioDecoded) for event in seen) == case.sound
    assert case.made is None or not steps or steps[-1].step == steps[-1].num_steps
    settings = next(event.plan.settings for event in seen if isinstance(event, Planned))
    assert frames.shape[:3] == (settings.num_frames, settings.height, settings.width)


def _plans(name: str, request: everyframe.Request) -> None:
    """Its own call is run dry to its end for machines that are not here."""
    for profile in PROFILES:
        plan = everyframe.plan(request, profile=profile)
        assert bool(plan.dtype_errors) == (profile in REFUSED_ON.get(name, ())), plan.dtype_errors
        is_rough = any("no dry run can follow" in note for note in plan.notes)
        assert is_rough == (name in PLANNED_ROUGHLY)
        if not is_rough:
            assert plan.seconds is not None
            assert plan.seconds > 0


def test_the_page_says_what_is_there() -> None:
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), (
        "write it again: cd tests && python -m helpers.tiny_checkpoints.diffusers.table"
    )


@pytest.mark.slow
def test_the_page_has_every_video_pipeline_that_diffusers_has() -> None:
    found = set()
    for name in dir(diffusers):
        cls = getattr(diffusers, name)
        if not isinstance(cls, type) or not name.endswith("Pipeline"):
            continue
        if name.endswith("ModularPipeline"):
            if name != "ModularPipeline":
                outputs = {each.name for each in cls().blocks.outputs}
                found |= {name} if VIDEO_RESULT in outputs else set()
        elif callable(cls) and of_class(cls).makes_video:
            found.add(name)
    listed = {*CASES, *table.MODULAR, *table.NOT_HERE}
    assert listed == found


@pytest.mark.slow
def test_what_diffusers_itself_cannot_run_is_reported_by_the_plan(tmp_path: Path) -> None:
    from everyframe.core.errors import CannotRunError

    pipe = tiny_diffusers.others.easyanimate()
    folder = tmp_path / "model"
    diffusers.EasyAnimateControlPipeline(**pipe.components).save_pretrained(folder)
    request = everyframe.Request(
        model=str(folder), prompt=PROMPT, size="16x16", num_frames=5, num_inference_steps=1
    )
    with pytest.raises(CannotRunError, match=r"EasyAnimateControlPipeline can't .* diffusers 0\."):
        everyframe.plan(request)
