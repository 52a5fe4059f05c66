"""Whole runs of ten pipelines against the same pipelines of diffusers alone, in float32.

Bit for bit: the same modules are called with the same numbers in the same order, so there is no
rounding to allow for. The four that people use most run always, the others with ``--slow``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import everyframe
import tiny_pipelines
from everyframe.core.events import Event, Frames, Loaded, Sound, Step
from everyframe.families.pipeline.interface import NAMES, of_pipeline
from everyframe.media.pixels import fit_image

PROMPT = "a red fox runs"
STEPS, SEED = 2, 3
FAST = ("wan", "ltx2", "hunyuan15", "cogvideox")
WITH_SOUND = ("ltx2", "ltx25", "minimax_h3")
PICTURE = (np.random.default_rng(0).random((20, 24, 3)) * 255).astype(np.uint8)

NAMED = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name in tiny_pipelines.TINY
]


class Tiny:
    """One tiny checkpoint: its folder, what it is asked for, and diffusers' own pipeline of it."""

    def __init__(self, name: str, folder: Path) -> None:
        tiny_pipelines.TINY[name](folder)
        self.name, self.folder = name, folder
        self.asked: dict[str, Any] = {
            "prompt": PROMPT, "num_inference_steps": STEPS, "seed": SEED,
            **tiny_pipelines.CALLS[name],
        }  # fmt: skip
        if "picture" in name:
            self.asked["image"] = PICTURE
        self.pipe = _loaded(folder)

    def theirs(self) -> tuple[np.ndarray[Any, Any], Any]:
        """Frames and sound that diffusers makes, called as its documentation says."""
        asked = dict(self.asked)
        width, height = map(int, asked.pop("size").split("x"))
        call = {"height": height, "width": width, **asked.pop("option", {})}
        call["generator"] = torch.Generator().manual_seed(asked.pop("seed"))
        if "image" in asked:
            call["image"] = Image.fromarray(fit_image(asked.pop("image"), height, width))
        taken = of_pipeline(self.pipe).parameters
        for name, value in asked.items():
            call[next(own for own in NAMES[name] if own in taken)] = value
        if hasattr(self.pipe, "blocks"):
            made = self.pipe(**call, output_type="np", output=["videos", "audio"])
            return made["videos"][0], made["audio"]
        result = self.pipe(**call, output_type="np")
        return result.frames[0], getattr(result, "audio", None)


def _loaded(folder: Path) -> Any:
    if (folder / "modular_model_index.json").is_file():
        pipe = diffusers.ModularPipeline.from_pretrained(folder)
        pipe.load_components()
        return pipe
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


_made: dict[str, Tiny] = {}


@pytest.fixture
def tiny_one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    name = request.param
    if name not in _made:
        _made[name] = Tiny(name, tmp_path_factory.mktemp("models") / name)
    return _made[name]


def collected(events: Iterator[Event]) -> tuple[list[Event], np.ndarray[Any, Any]]:
    seen = list(events)
    frames = [event.frames for event in seen if isinstance(event, Frames)]
    return seen, np.concatenate(frames)


@pytest.mark.parametrize("tiny_one", NAMED, indirect=True)
def test_frames_and_sound_are_those_of_diffusers(
    tiny_one: Tiny, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted, wanted_sound = tiny_one.theirs()
    capfd.readouterr()
    request = everyframe.Request(model=str(tiny_one.folder), dtype="fp32", **tiny_one.asked)
    seen, frames = collected(everyframe.stream(request))
    assert frames.dtype == np.float32
    assert np.array_equal(frames, wanted)
    assert frames.std() > 0.05, "a flat picture would compare equal to anything flat"
    sound = [event.samples for event in seen if isinstance(event, Sound)]
    assert len(sound) == (tiny_one.name in WITH_SOUND)
    if sound:
        assert np.array_equal(sound[0], wanted_sound[0].float().numpy())
        assert np.abs(sound[0]).max() > 0
    steps = [(event.step, event.num_steps) for event in seen if isinstance(event, Step)]
    # MiniMax-H3 counts the points between which it steps.
    count = STEPS - 1 if tiny_one.name == "minimax_h3" else STEPS
    assert steps == [(step, count) for step in range(1, count + 1)]
    loaded = [event.component for event in seen if isinstance(event, Loaded)]
    modules = [name for name, part in tiny_one.pipe.components.items() if is_module(part)]
    assert sorted(loaded) == sorted(modules)
    assert capfd.readouterr() == ("", ""), "a library prints nothing"


def is_module(part: Any) -> bool:
    return isinstance(part, nn.Module)


def state_of(pipe: Any) -> dict[str, Any]:
    """All that a run could leave behind, in a form that compares."""
    found: dict[str, Any] = {"pipe": repr(sorted(vars(pipe))), "config": str(pipe.config)}
    for name, part in pipe.components.items():
        if not is_module(part):
            found[name] = (type(part).__name__, repr(vars(part)) if hasattr(part, "config") else "")
            continue
        for path, module in part.named_modules():
            hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
            assert not any(
                "everyframe" in type(h).__module__ for each in hooks for h in each.values()
            )
            found[f"{name}.{path}"] = (module.training, [len(each) for each in hooks])
        for path, tensor in part.state_dict(keep_vars=True).items():
            found[f"{name}.{path}.tensor"] = (
                tensor.dtype, str(tensor.device), tensor.requires_grad, tensor.is_inference(),
                float(tensor.detach().double().sum()),
            )  # fmt: skip
    return found


@pytest.mark.parametrize("tiny_one", NAMED, indirect=True)
def test_a_loaded_pipeline_runs_as_it_is_and_is_left_as_it_was(tiny_one: Tiny) -> None:
    wanted, _ = tiny_one.theirs()
    pipe = tiny_one.pipe
    module = next(part for part in pipe.components.values() if is_module(part))
    own_hook = module.register_forward_pre_hook(lambda *_: None)
    before, events = state_of(pipe), []
    video = everyframe.run(pipe, output="float", on_event=events.append, **tiny_one.asked)
    assert isinstance(video, everyframe.Video)
    assert np.array_equal(video.frames, wanted)
    assert state_of(pipe) == before
    own_hook.remove()
    assert any(isinstance(event, Step) for event in events)
    assert video.record["model"] == {
        "name": type(pipe).__name__, "is_local": False, "sha256": None,
    }  # fmt: skip


@pytest.mark.parametrize("tiny_one", NAMED, indirect=True)
def test_bfloat16_is_close_and_no_dtypes_clash(tiny_one: Tiny) -> None:
    request = everyframe.Request(model=str(tiny_one.folder), dtype="bf16", **tiny_one.asked)
    plan = everyframe.plan(request)
    assert {part.precision.parameters for part in plan.components} == {"bfloat16"}
    _, frames = collected(everyframe.stream(request))
    wide, _ = tiny_one.theirs()
    # Eight bits of a number through a random network and its decoder; 0.06 on average at most was
    # measured. Frames of another seed are 0.2 and more away.
    assert 0 < np.abs(frames - wide).mean() < 0.1
