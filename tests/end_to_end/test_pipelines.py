"""Whole runs of ten pipelines against the same pipelines of diffusers alone, in float32.

Bit for bit: the same modules are called with the same numbers in the same order, and attention is
computed by the same kernel, the plain one, which is asked for; so there is no rounding to allow
for. The four that people use most run always, the others with ``--slow``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import everyframe
from everyframe.cli.main import main
from everyframe.core.events import AudioDecoded, ComponentLoaded, Event, FramesDecoded, Step
from everyframe.diffusers_pipelines.inputs.defaults import denoisers
from everyframe.diffusers_pipelines.inputs.signature import NAMES, of_pipeline
from everyframe.ops.attention import PLAIN, by_kernel
from helpers.slow_rows import slow_unless
from helpers.tiny_checkpoints import pipelines as tiny_pipelines
from helpers.tiny_checkpoints.pipelines import loaded

PROMPT = "a red fox runs"
STEPS, SEED = 2, 3
FAST = ("wan", "ltx2", "hunyuan15", "cogvideox")
WITH_SOUND = ("ltx2", "ltx25", "minimax_h3")
PICTURE = (np.random.default_rng(0).random((20, 24, 3)) * 255).astype(np.uint8)

NAMED = slow_unless(FAST, tiny_pipelines.TINY)


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
        self.pipe = loaded(folder)

    @property
    def num_steps(self) -> int:
        """The steps that are made: MiniMax-H3 counts the points between which it steps."""
        return STEPS - 1 if self.name == "minimax_h3" else STEPS

    def theirs(self, kernel: str | None = PLAIN) -> tuple[np.ndarray[Any, Any], Any]:
        """Frames and sound that diffusers makes, called as its documentation says.

        Attention by that kernel, or by the one that torch takes by itself.
        """
        asked = dict(self.asked)
        width, height = map(int, asked.pop("size").split("x"))
        call = {"height": height, "width": width, **asked.pop("option", {})}
        call["generator"] = torch.Generator().manual_seed(asked.pop("seed"))
        if "image" in asked:
            call["image"] = Image.fromarray(asked.pop("image"))
        taken = of_pipeline(self.pipe).parameters
        for name, value in asked.items():
            call[next(own for own in NAMES[name] if own in taken)] = value
        with by_kernel(kernel) if kernel else nullcontext():
            if hasattr(self.pipe, "blocks"):
                made = self.pipe(**call, output_type="np", output=["videos", "audio"])
                return made["videos"][0], made["audio"]
            result = self.pipe(**call, output_type="np")
            return result.frames[0], getattr(result, "audio", None)


_made: dict[str, Tiny] = {}


@pytest.fixture
def tiny_one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    name = request.param
    if name not in _made:
        _made[name] = Tiny(name, tmp_path_factory.mktemp("models") / name)
    return _made[name]


def collected(events: Iterator[Event]) -> tuple[list[Event], np.ndarray[Any, Any]]:
    seen = list(events)
    frames = [event.frames for event in seen if isinstance(event, FramesDecoded)]
    return seen, np.concatenate(frames)


@pytest.mark.parametrize("tiny_one", NAMED, indirect=True)
def test_frames_and_sound_are_those_of_diffusers(
    tiny_one: Tiny, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted, wanted_sound = tiny_one.theirs()
    capfd.readouterr()
    # By the kernel of theirs, and not by whichever is certified on the machine of the test.
    how: dict[str, Any] = {"dtype": "fp32", "attention": PLAIN}
    request = everyframe.Request(model=str(tiny_one.folder), **how, **tiny_one.asked)
    seen, frames = collected(everyframe.stream(request))
    assert frames.dtype == np.float32
    assert np.array_equal(frames, wanted)
    assert frames.std() > 0.05, "a flat picture would compare equal to anything flat"
    sound = [event.samples for event in seen if isinstance(event, AudioDecoded)]
    assert len(sound) == (tiny_one.name in WITH_SOUND)
    if sound:
        assert np.array_equal(sound[0], wanted_sound[0].float().numpy())
        assert np.abs(sound[0]).max() > 0
    steps = [(event.step, event.num_steps) for event in seen if isinstance(event, Step)]
    count = tiny_one.num_steps
    assert steps == [(step, count) for step in range(1, count + 1)]
    loaded = [event.component for event in seen if isinstance(event, ComponentLoaded)]
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


#: Calls of each denoiser in two steps: one a step where both prompts go through it together, two
#: where one after the other; LTX-2 has a third and a fourth branch for its two further guidances.
CALLS = {
    "wan": {"transformer": 2, "transformer_2": 2},
    "wan_of_a_picture": {"transformer": 2, "transformer_2": 2},
    "cogvideox": {"transformer": 2},
    "hunyuan15": {"transformer": 4},
    "hunyuan": {"transformer": 2},
    "ltx2": {"transformer": 6},
    "mochi": {"transformer": 2},
    "latte": {"transformer": 2},
    "animatediff": {"unet": 2},
}


@pytest.mark.parametrize("tiny_one", NAMED, indirect=True)
def test_steps_are_not_calls(tiny_one: Tiny) -> None:
    calls: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            calls[name] = calls.get(name, 0) + 1

        return hook

    named = tiny_one.pipe.components.items()
    parts = {n: p for n, p in named if is_module(p) and denoisers((n,))}
    hooks = [part.register_forward_hook(count(name)) for name, part in parts.items()]
    events: list[Event] = []
    everyframe.run(tiny_one.pipe, on_event=events.append, **tiny_one.asked)
    for hook in hooks:
        hook.remove()
    steps = [event.step for event in events if isinstance(event, Step)]
    if tiny_one.name in CALLS:
        assert calls == CALLS[tiny_one.name]
    assert len(steps) == tiny_one.num_steps
    assert sum(calls.values()) >= len(steps)


def test_sound_is_in_the_file_and_is_reported_where_there_is_no_room(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    if "ltx2" not in _made:
        _made["ltx2"] = Tiny("ltx2", tmp_path_factory.mktemp("models") / "ltx2")
    words = ["generate", PROMPT, "--model", str(_made["ltx2"].folder), "--size", "32x32"]
    words += ["--num-frames", "5", "--steps", "1", "--option", "max_sequence_length=16"]
    words += ["--option", "spatio-temporal-guidance-blocks=[0]"]
    assert main([*words, "-o", str(tmp_path / "clip.mp4")]) == 0
    with av.open(str(tmp_path / "clip.mp4")) as container:
        assert [stream.type for stream in container.streams] == ["video", "audio"]
        assert container.streams.audio[0].rate == 16000
    assert main([*words, "-o", str(tmp_path / "clip.gif")]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "there is sound, and" in printed
    assert "can't hold it; an .mp4 can" in printed


@pytest.mark.parametrize("tiny_one", NAMED, indirect=True)
def test_a_loaded_pipeline_runs_as_it_is_and_is_left_as_it_was(tiny_one: Tiny) -> None:
    wanted, _ = tiny_one.theirs(kernel=None)
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


@pytest.mark.slow
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


#: Half precision with its decoder in float32; the largest tensors; no half precision at all.
PROFILES = ("cuda-sm75", "mps", "cpu-fp32")


@pytest.mark.parametrize("tiny_one", NAMED, indirect=True)
def test_its_own_call_is_run_dry_for_machines_that_are_not_here(tiny_one: Tiny) -> None:
    request = everyframe.Request(model=str(tiny_one.folder), **tiny_one.asked)
    for profile in PROFILES if tiny_one.name not in FAST else PROFILES[:1]:
        plan = everyframe.plan(request, profile=profile)
        assert plan.infeasible is None
        assert not plan.dtype_errors
        assert not [note for note in plan.notes if "no dry run can follow" in note]
        assert [stage.component for stage in plan.stages] == [p.name for p in plan.components]
        worked = {stage.component for stage in plan.stages if stage.operations}
        assert set(denoisers(part.name for part in plan.components)) <= worked
        assert {name for name in worked if "vae" in name or "decoder" in name}
        assert plan.seconds is not None
        assert plan.seconds > 0


def test_several_videos_of_one_call_come_back_apart_also_from_another_process(
    tmp_path: Path,
) -> None:
    """Encoded prompts of two texts make two videos of one seed."""
    tiny_pipelines.wan(tmp_path)
    own = tiny_pipelines.CALLS["wan"]
    prompts, negative = loaded(tmp_path).encode_prompt(
        ["a fox", "a cat"], negative_prompt=["", ""], device="cpu"
    )
    embeds = {"prompt_embeds": prompts, "negative_prompt_embeds": negative}
    asked = {**own, "model": str(tmp_path), "num_inference_steps": STEPS, "seed": SEED,
             "option": {**own["option"], **embeds}, "run_dir": "off"}  # fmt: skip
    here, there = (everyframe.generate(**asked, isolate=apart) for apart in (False, True))
    assert isinstance(here, list)
    assert isinstance(there, list)
    assert not np.array_equal(here[0].frames, here[1].frames)
    for one, other in zip(here, there, strict=True):
        assert np.array_equal(one.frames, other.frames)
    assert [each.record["index"] for each in there] == [0, 1]
