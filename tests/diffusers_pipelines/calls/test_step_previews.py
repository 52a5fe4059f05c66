"""Previews of diffusers pipelines: by folder and in memory, with the video's bits unchanged."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LCMScheduler

import everyframe
from everyframe.core.events import Event, Note, Preview
from everyframe.core.plan import PreviewPlan, Settings
from everyframe.diffusers_pipelines.calls.step_previews import StepPreviews, clean_video
from everyframe.diffusers_pipelines.library_patches import steps_heard
from everyframe.runtime.previews.latent_space import LatentSpace
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

ASKED: dict[str, Any] = {"prompt": "a red fox runs", "num_inference_steps": 2, "seed": 3}


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan")
    tiny_pipelines.TINY["wan"](folder)
    return folder


def previews_of(events: list[Event]) -> list[Preview]:
    return [each for each in events if isinstance(each, Preview)]


def test_by_folder_and_in_memory(wan: Path) -> None:
    asked = {**ASKED, **tiny_pipelines.CALLS["wan"]}
    plain = everyframe.generate(**asked, model=str(wan), run_dir="off")
    by_folder: list[Event] = []
    shown = everyframe.generate(
        **asked, model=str(wan), preview=True, run_dir="off", on_event=by_folder.append
    )
    in_memory: list[Event] = []
    pipe = tiny_pipelines.loaded(wan)
    step = vars(type(pipe.scheduler))["step"]
    here = everyframe.run(pipe, **asked, preview=True, on_event=in_memory.append)
    assert vars(type(pipe.scheduler))["step"] is step
    assert np.array_equal(plain.frames, shown.frames)
    assert np.array_equal(plain.frames, here.frames)
    for events in (by_folder, in_memory):
        found = previews_of(events)
        assert [(each.step, each.num_steps) for each in found] == [(1, 2), (2, 2)]
    assert previews_of(by_folder) == previews_of(in_memory)


SETTINGS = Settings("", None, 24, 40, 9, 8.0, 2, 1.0, 0)


@pytest.mark.parametrize(
    ("autoencoder", "channels", "axes"),
    [
        ("AutoencoderKLWan", 4, "b c t h w"), ("AutoencoderKLCogVideoX", 4, "b t c h w"),
        ("AutoencoderKLTemporalDecoder", 3, "b t c h w"), ("Kandinsky", 4, "b t h w c"),
        ("AutoencoderKL", 4, "t c h w"), ("AutoencoderKLLTXVideo", 4, "b thw c"),
    ],
)  # fmt: skip
def test_layouts_of_pipelines(autoencoder: str, channels: int, axes: str) -> None:
    sizes = {"b": 1, "c": channels, "t": 3, "h": 3, "w": 5, "thw": 45}
    video = torch.arange(channels * 45).reshape(channels, 3, 3, 5)
    by_axis = {"b c t h w": video[None], "b t c h w": video.movedim(1, 0)[None],
               "b t h w c": video.movedim(0, -1)[None], "t c h w": video.movedim(1, 0),
               "b thw c": video.flatten(1).T[None]}  # fmt: skip
    latents = by_axis[axes]
    assert list(latents.shape) == [sizes[axis] for axis in axes.split()]
    space = LatentSpace(autoencoder, channels, layout="c t h w")
    assert torch.equal(clean_video(latents, space, SETTINGS), video)


def test_other_channels_are_no_video() -> None:
    with pytest.raises(ValueError, match="no axis of 16 channels"):
        clean_video(torch.zeros(1, 4, 3, 3, 5), LatentSpace("AutoencoderKLWan", 16), SETTINGS)


def steps_of(scheduler: Any, num_steps: int = 2) -> None:
    scheduler.set_timesteps(num_steps)
    x = torch.zeros(1, 4, 1, 3, 5)
    for t in scheduler.timesteps:
        x = scheduler.step(torch.ones_like(x), t, x, return_dict=False)[0]


def test_only_the_scheduler_of_this_call_is_heard() -> None:
    own, heard = FlowMatchEulerDiscreteScheduler(), []
    before = vars(FlowMatchEulerDiscreteScheduler)["step"]
    with steps_heard(own, lambda scheduler, given: heard.append(given["timestep"])):
        steps_of(own)
        steps_of(copy.deepcopy(own))  # LTX-2 steps its sound by a copy
        steps_of(FlowMatchEulerDiscreteScheduler())
        thread = threading.Thread(target=steps_of, args=(FlowMatchEulerDiscreteScheduler(),))
        thread.start()
        thread.join()
    assert len(heard) == 2
    assert vars(FlowMatchEulerDiscreteScheduler)["step"] is before
    with (
        steps_heard(own, lambda scheduler, given: heard.append(None)),
        steps_heard(LCMScheduler(), lambda scheduler, given: heard.append(None)),
    ):
        assert vars(FlowMatchEulerDiscreteScheduler)["step"] is not before
    assert vars(FlowMatchEulerDiscreteScheduler)["step"] is before
    assert len(heard) == 2


def test_what_is_not_understood_is_reported_once() -> None:
    plan = replace(everyframe.plan("a red circle"), preview=PreviewPlan(1, "published"))
    previews = StepPreviews(plan, LatentSpace("AutoencoderKL", 4, 0.18215, "c t h w"))
    scheduler = FlowMatchEulerDiscreteScheduler()
    assert previews.preview(0, 1, 2) == ()  # nothing was heard
    with previews.listening(scheduler):
        scheduler.set_timesteps(2)
        x = torch.zeros(1, 7, 1, 3, 5)
        scheduler.step(x, scheduler.timesteps[0], x)
        (note,) = previews.preview(0, 1, 2)
        assert isinstance(note, Note)
        assert note.text.startswith("no previews: ValueError: latents of shape (1, 7, 1, 3, 5)")
        assert previews.preview(0, 2, 2) == ()
