"""Diffusers' own arguments of a call, given to a pipeline in memory: what it does with them alone.

Frames are compared bit for bit with ``pipe(**arguments)``, under torch's own attention.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.unets.unet_2d_blocks import UNetMidBlock2D
from torch import nn

import everyframe
from end_to_end.test_pipelines import state_of
from everyframe.cli.main import main
from everyframe.core.errors import InputError
from everyframe.core.events import Note, RunSaved, Step, VideoDone
from helpers.diagonals import diagonal
from helpers.out_of_memory import TOO_LITTLE, before_calls
from helpers.tiny_checkpoints.diffusers import CASES
from helpers.tiny_checkpoints.diffusers.cases import as_python
from helpers.tiny_checkpoints.pipeline_components import ltx_parts
from helpers.tiny_checkpoints.pipelines import CALLS, SHORT, TINY, loaded

#: What diffusers is called with.
ASKED: dict[str, Any] = {
    "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 3, "guidance_scale": 3.0,
}  # fmt: skip
PROMPT = {"prompt": "a fox", "negative_prompt": "bad"}


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))


@pytest.fixture(scope="module")
def folder(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("wan")


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    return loaded(folder)


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def theirs(pipe: Any, **given: Any) -> Any:
    """The frames (B, T, H, W, C) that diffusers makes."""
    return pipe(**{**ASKED, "generator": seeded(), "output_type": "np", **given}).frames


def run(pipe: Any, **given: Any) -> Any:
    """What a run gives, which leaves the pipeline as it was."""
    if "generator" not in given:
        given = {"seed": 7, **given}
    before = state_of(pipe)
    made = everyframe.run(pipe, **{"output_type": "np", **ASKED, **given})
    assert state_of(pipe) == before
    return made


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"prompt": ["a fox"], "negative_prompt": ["bad"]}, marks=pytest.mark.slow),
        pytest.param(
            {"prompt": ["a fox", "a red cat"], "negative_prompt": ["bad", "bad"]},
            marks=pytest.mark.slow,
        ),
        pytest.param({"prompt": ["a fox", "a red cat"]}, marks=pytest.mark.slow),
        pytest.param({**PROMPT, "num_videos_per_prompt": 2}, marks=pytest.mark.slow),
        {"prompt": ["a", "b"], "negative_prompt": ["bad", ""], "num_videos_per_prompt": 2},
        {"prompt": ["a", ""], "generator": [3, 4]},
    ],
)
def test_several_videos_of_one_call(pipe: Any, given: dict[str, Any]) -> None:
    def call() -> dict[str, Any]:
        seeds = given.get("generator")
        return {**given, "generator": list(map(seeded, seeds))} if seeds else given

    wanted, videos = theirs(pipe, **call()), run(pipe, **call())
    assert isinstance(videos, list)
    assert len(videos) == len(wanted)
    for index, (video, frames) in enumerate(zip(videos, wanted, strict=True)):
        assert np.array_equal(video.frames, frames)
        assert video.record["index"] == index
    assert len(wanted) == 1 or not np.array_equal(wanted[0], wanted[1])
    again = everyframe.run(pipe, from_record=json.loads(json.dumps(videos[-1].record)))
    assert [np.array_equal(a.frames, b.frames) for a, b in zip(again, videos, strict=True)]


def test_words_that_are_files_stay_words(
    pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fox").mkdir()
    monkeypatch.chdir(tmp_path)
    videos = run(pipe, prompt=["fox"])
    assert videos[0].record["request"]["option"]["prompt"] == ["fox"]


def test_an_empty_prompt(pipe: Any, folder: Path) -> None:
    wanted = theirs(pipe, prompt="")
    assert np.array_equal(run(pipe, prompt="").frames, wanted[0])
    assert not np.array_equal(theirs(pipe, prompt="a")[0], wanted[0])
    size = {"size": "32x32", "num_frames": 5, "num_inference_steps": 3, "guidance_scale": 3.0}
    video = everyframe.generate(
        "", model=str(folder), seed=7, dtype="fp32", attention="math", output="float", **size
    )
    assert isinstance(video, everyframe.Video)
    assert np.abs(video.frames - wanted[0]).max() < 1e-5
    embeds = torch.zeros((1, 8, 32))
    assert run(pipe, prompt_embeds=embeds, negative_prompt_embeds=embeds).num_frames == 5
    with pytest.raises(InputError, match=r"an empty prompt and an encoded one .*; give one"):
        run(pipe, prompt="", prompt_embeds=embeds)


@pytest.mark.parametrize(
    ("form", "more"), diagonal(["pt", "pil", "latent"], [{"num_videos_per_prompt": 2}, {}])
)
def test_other_forms_are_the_pipelines_own_output(
    pipe: Any, form: str, more: dict[str, Any]
) -> None:
    wanted = theirs(pipe, **PROMPT, output_type=form, **more)
    found = run(pipe, **PROMPT, output_type=form, return_dict=True, **more)
    assert type(found).__name__ == "WanPipelineOutput"
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found.frames, wanted)
    else:
        assert [[p.tobytes() for p in video] for video in found.frames] == [
            [p.tobytes() for p in video] for video in wanted
        ]


def test_latents_that_are_not_finite_go_to_nobody(pipe: Any) -> None:
    def spoils(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": tensors["latents"] * float("nan")} if step == 2 else {}

    with pytest.raises(everyframe.EveryframeError, match="latents that hold values that are not"):
        run(pipe, **PROMPT, output_type="latent", callback_on_step_end=spoils)


def test_latents_have_a_record(pipe: Any) -> None:
    events: list[Any] = []
    found = run(pipe, **PROMPT, output_type="latent", num_videos=2, on_event=events.append)
    assert [each.frames.shape for each in found] == [(1, 16, 2, 4, 4)] * 2
    assert not torch.equal(found[0].frames, found[1].frames)
    done = [event for event in events if isinstance(event, VideoDone)]
    assert [(event.seed, event.num_frames) for event in done] == [(7, 0), (8, 0)]
    again = everyframe.run(pipe, from_record=done[1].record)
    assert torch.equal(again.frames, found[1].frames)


def test_np_is_float_unless_asked_otherwise(pipe: Any) -> None:
    assert run(pipe, **PROMPT).frames.dtype == np.float32
    assert run(pipe, **PROMPT, output="uint8").frames.dtype == np.uint8
    assert everyframe.run(pipe, **PROMPT, **ASKED, seed=7).frames.dtype == np.uint8


def test_a_generator_is_handed_on_as_it_is(
    pipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used, same = seeded(), seeded()
    torch.randn(5, generator=used), torch.randn(5, generator=same)
    wanted = theirs(pipe, **PROMPT, generator=used)
    events: list[Any] = []
    video = run(pipe, **PROMPT, generator=same, on_event=events.append)
    assert np.array_equal(video.frames, wanted[0])
    assert torch.equal(used.get_state(), same.get_state()), "it has drawn as much"
    notes = [event.text for event in events if isinstance(event, Note)]
    assert any("no seed stands for it" in note for note in notes)
    assert any("can't be saved" in note for note in notes)
    assert video.record["request"]["seed"] is None
    assert main(["inspect", str(video.save(tmp_path / "fox.mp4"))]) == 0
    assert "a seed that is not known" in capsys.readouterr().out
    with pytest.raises(InputError, match="made with a generator given in Python; give it again"):
        everyframe.run(pipe, from_record=video.record)
    again = seeded()
    torch.randn(5, generator=again)
    made = everyframe.run(pipe, from_record=video.record, generator=again)
    assert np.array_equal(made.frames, wanted[0])


def test_a_generator_that_is_fresh_is_known_by_its_seed(pipe: Any) -> None:
    wanted, generator = theirs(pipe, **PROMPT), seeded()
    events: list[Any] = []
    video = run(pipe, **PROMPT, generator=generator, on_event=events.append)
    assert np.array_equal(video.frames, wanted[0])
    assert not torch.equal(generator.get_state(), seeded().get_state()), "it was not drawn from"
    assert any(isinstance(event, RunSaved) for event in events)
    request = video.record["request"]
    assert (request["seed"], request["option"]) == (7, {"output_type": "np"})
    again = everyframe.run(pipe, from_record=json.loads(json.dumps(video.record)))
    assert np.array_equal(again.frames, wanted[0])
    listed = run(pipe, **PROMPT, generator=[seeded(8)])
    assert listed.record["request"]["option"]["generator"] == [{"seed": 8, "device": "cpu"}]
    again = everyframe.run(pipe, from_record=json.loads(json.dumps(listed.record)))
    assert np.array_equal(again.frames, listed.frames)
    other = everyframe.run(pipe, from_record=listed.record, seed=7)
    assert np.array_equal(other.frames, wanted[0])


def test_a_run_with_generators_and_prompts_is_resumed(pipe: Any) -> None:
    given = {"prompt": ["a fox", "a cat"], "generator": [seeded(3), seeded(4)]}
    wanted = run(pipe, **given)
    option = {**given, "generator": [seeded(3), seeded(4)], "output_type": "np"}
    name = ""
    request = everyframe.Request(**ASKED, option=option)
    with closing(everyframe.stream(request, pipe=pipe)) as events:  # type: ignore[type-var]
        for event in events:
            if isinstance(event, RunSaved):
                name = event.run
            if isinstance(event, Step):
                break
    videos = everyframe.resume(name, pipe=pipe, output="float")
    assert isinstance(videos, list)
    assert [np.array_equal(a.frames, b.frames) for a, b in zip(videos, wanted, strict=True)] == [
        True, True
    ]  # fmt: skip


def test_a_callback_that_changes_tensors_takes_effect(pipe: Any) -> None:
    steps: list[int] = []

    def halves(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        return {"latents": tensors["latents"] * 0.5}

    given = {**PROMPT, "callback_on_step_end": halves}
    wanted = theirs(pipe, **given)
    events: list[Any] = []
    found = run(pipe, **given, on_event=events.append)
    assert np.array_equal(found.frames, wanted[0])
    assert not np.array_equal(theirs(pipe, **PROMPT), wanted), "it changed nothing"
    assert steps == [0, 1, 2] * 2
    assert [event.step for event in events if isinstance(event, Step)] == [1, 2, 3]
    (note,) = [e.text for e in events if isinstance(e, Note) and "can't be saved" in e.text]
    assert "function" in note
    assert "another folder" not in note, "it can't be saved there either"
    with pytest.raises(InputError, match="made with a callback_on_step_end given in Python"):
        everyframe.run(pipe, from_record=found.record)


def test_a_callback_ends_a_run_early(pipe: Any) -> None:
    def after(number: int) -> Any:
        def stop(pipe: Any, step: int, timestep: Any, tensors: Any) -> dict[str, Any]:
            pipe._interrupt = step + 1 == number
            return {}

        return {**PROMPT, "callback_on_step_end": stop}

    events: list[Any] = []
    found = run(pipe, **after(1), on_event=events.append)
    assert np.array_equal(found.frames, theirs(pipe, **after(1))[0])
    assert len([event for event in events if isinstance(event, Step)]) == 1

    def stop(event: Any) -> None:
        if isinstance(event, Step):
            pipe._interrupt = True

    # A step's event comes when the next one begins, which is computed to its end.
    from_outside = run(pipe, **PROMPT, on_event=stop)
    assert np.array_equal(from_outside.frames, theirs(pipe, **after(2))[0])
    assert not np.array_equal(from_outside.frames, found.frames)


def test_one_side_alone_goes_with_the_pipelines_own() -> None:
    pipe = diffusers.LTXPipeline(**ltx_parts())
    pipe.set_progress_bar_config(disable=True)
    asked = {"prompt": "a", "height": 32, "num_frames": 1, "num_inference_steps": 1, **SHORT}
    wanted = pipe(**asked, generator=seeded(), output_type="np").frames[0]
    assert wanted.shape == (1, 32, 704, 3)
    found = everyframe.run(pipe, **asked, seed=7, output="float")
    assert np.array_equal(found.frames, wanted)


def test_prompts_by_frame() -> None:
    case = CASES["AnimateDiffPipeline"]
    with case.within():
        pipe = case.build()
        pipe.set_progress_bar_config(disable=True)
        pipe.enable_free_noise(context_length=4, context_stride=2)
        call = {
            **as_python(case.asked, 32, 32), "prompt": {0: "a cat", 5: "a dog"}, "num_frames": 6,
            "num_inference_steps": 2,
        }  # fmt: skip
        call = {**call.pop("option", {}), **{k: v for k, v in call.items() if k != "size"}}
        call |= {"height": 32, "width": 32, "output_type": "np"}
        wanted = pipe(**call, generator=seeded()).frames[0]
        found = everyframe.run(pipe, **call, seed=7)
        assert np.array_equal(found.frames, wanted)
        record = json.loads(json.dumps(found.record))
        again = everyframe.run(pipe, from_record=record)
        assert np.array_equal(again.frames, wanted)


def test_a_call_that_is_repeated_for_memory_draws_the_same(tmp_path: Path) -> None:
    """The generator is as it was, though the call that failed had drawn from it."""
    TINY["animatediff"](tmp_path / "model")
    pipe = loaded(tmp_path / "model")
    asked = {**CALLS["animatediff"], "prompt": "a fox", "num_inference_steps": 2}
    asked.pop("option", None)

    def used() -> torch.Generator:
        generator = seeded()
        torch.randn(5, generator=generator)
        return generator

    steps: list[int] = []

    def counts(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        return {"latents": tensors["latents"] * 0.5}

    def frames(**more: Any) -> Any:
        option = {"generator": used(), "callback_on_step_end": counts, **more}
        return everyframe.run(pipe, output="float", option=option, **asked).frames

    wanted, ran_out = frames(decode_chunk_size=1), []

    def check(module: nn.Module, given: Any) -> None:
        if isinstance(module, UNetMidBlock2D) and len(given[0]) > 1:
            ran_out.append(module)
            raise RuntimeError(TOO_LITTLE)

    with before_calls(check):
        assert np.array_equal(frames(), wanted)
    assert ran_out, "memory did not run out"
    assert steps == [0, 1] * 4


def test_two_stages_hand_latents_on() -> None:
    """LTX-Video's recipe: latents, which another pipeline goes on from."""
    pipe = diffusers.LTXPipeline(**ltx_parts())
    pipe.set_progress_bar_config(disable=True)
    asked = {**ASKED, **SHORT, "num_frames": 9, "prompt": "a fox"}

    def both(call: Any, **seed: Any) -> Any:
        first = call(**asked, **seed, output_type="latent").frames
        return call(**asked, **seed, latents=first, output_type="pt").frames

    wanted = both(pipe, generator=seeded())
    found = both(lambda **given: everyframe.run(pipe, **given), seed=7)
    assert found.shape == wanted.shape


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"return_dict": False}, r"return_dict must be True; .* its frames are video\.frames"),
        ({"output_type": "mp4"}, "output_type must be one of np, pt, pil, latent, got 'mp4'"),
        ({"num_videos_per_prompt": 0}, "num_videos_per_prompt must be a whole number from 1"),
        ({"num_images_per_prompt": 2}, "no parameter 'num_images_per_prompt'; num_videos=2 makes"),
        ({"generator": 7}, r"generator must be a torch\.Generator or a list of them, got 7"),
        ({"generator": []}, r"generator must be a torch\.Generator or a list of them, got \[\]"),
        ({"generator": seeded(), "seed": 3}, "seed=3 and generator both say what is drawn"),
        ({"generator": seeded(), "num_videos": 2}, "with a generator give num_videos_per_prompt"),
        ({"callback_on_step_end": 3}, "callback_on_step_end must be something to call at each"),
        ({"prompt": []}, "prompt must be text, a list of texts, or texts by the number"),
        ({"prompt": ["a", 3]}, "prompt must be text, a list of texts, or texts by the number"),
        ({"prompt": {"one": "a"}}, "prompt must be text, a list of texts, or texts by the number"),
        ({"option": {"prompt": ["a"]}}, "prompt was given as text and by option prompt; give one"),
        ({"prompt": None, "option": {"prompt": "a"}}, "give prompt by its own option"),
        ({"output": "float", "option": {"output": 1}}, "option output is set by everyframe itself"),
        ({"timesteps": [1]}, "WanPipeline has no parameter 'timesteps'"),
    ],
)
def test_what_is_refused_names_what_stands_for_it(
    pipe: Any, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        everyframe.run(pipe, **{**ASKED, "prompt": "a fox", **given})
    if "timesteps" in given:
        with pytest.raises(TypeError, match="unexpected keyword argument 'timesteps'"):
            pipe(**ASKED, prompt="a fox", **given)


def test_none_is_as_if_nothing_were_given(pipe: Any) -> None:
    nothing = dict.fromkeys(
        ("generator", "callback_on_step_end", "num_videos_per_prompt", "negative_prompt")
    )
    found = run(pipe, prompt="a fox", seed=7, **nothing)
    assert np.array_equal(found.frames, theirs(pipe, prompt="a fox")[0])
