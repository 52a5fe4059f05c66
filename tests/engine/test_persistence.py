"""What may happen to a run and to what is kept of it: each planted, and the same bits again."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from PIL import Image
from torch.nn.modules.module import register_module_forward_hook

import everyframe
from end_to_end.test_out_of_memory import no_room
from everyframe.core import paths
from everyframe.core.errors import CannotRunError, InputError, MediaError, RunLockedError
from everyframe.core.events import Event, Note, Step, VideoDone
from everyframe.core.plan import Repair
from everyframe.engine.persistence import saved_run
from everyframe.engine.resumption import resume
from everyframe.families.opensora import stdit3
from everyframe.hardware.facts import machine_facts
from everyframe.runs.folder import RunFolder, all_runs, find_run, list_runs, new_run
from everyframe.runs.replay_log import FileReplayLog
from everyframe.runs.resume_hint import resume_hint, without_hint
from everyframe.runs.run_state import RunStateWriter, SaveOptions
from helpers.events import steps
from helpers.interrupted_runs import OPEN_SORA, PICTURE, begun, cut, same, stop_before, videos
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

PIPELINE: dict[str, Any] = {
    "prompt": "a red circle", "seed": 1, "num_inference_steps": 4, "guidance_scale": 5.0,
    **tiny_pipelines.CALLS["wan"],
}  # fmt: skip


def test_a_foreign_pipeline_goes_on_by_replay(tmp_path: Path) -> None:
    """Wan's two experts, with guidance, and a scheduler that looks back."""
    tiny_pipelines.wan(tmp_path / "wan")
    options, root = {"model": str(tmp_path / "wan"), **PIPELINE}, tmp_path / "runs"
    calls: list[str] = []

    def count(module: Any, given: Any, answer: Any) -> None:
        is_dry = next(module.parameters(), torch.empty(0)).is_meta  # the plan's own run
        if type(module).__name__ == "WanTransformer3DModel" and not is_dry:
            calls.append("call")

    hook = register_module_forward_hook(count)
    try:
        unbroken = list(begun(root, **options))
        num_calls = len(calls)
        third = [place for place, e in enumerate(unbroken) if isinstance(e, Step)][2]
        folder = stop_before(begun(root, **options), third + 1)
        num_kept = len(list(folder.answers.glob("*/*.safetensors")))
        calls.clear()
        again = list(resume.resume_run(folder))
    finally:
        hook.remove()
    same(unbroken, again)
    assert 0 < num_kept < num_calls
    assert len(calls) == num_calls - num_kept, "what was answered is not computed again"
    assert [e.step for e in again if isinstance(e, Step)] == [1, 2, 3, 4]
    assert not list(all_runs(root))


def test_an_answer_that_is_damaged_is_computed_again(tmp_path: Path) -> None:
    messages: list[str] = []
    answers = FileReplayLog(tmp_path / "3", messages.append)
    repair = Repair("unet", "conv", "float32", "float16")
    laid_out = torch.zeros(1, 2).t().expand(2, 3)
    given = (
        torch.arange(4.0),
        (torch.ones(2, dtype=torch.bfloat16), None),
        Transformer2DModelOutput(sample=laid_out),
    )
    for number, answer in enumerate(given):
        assert answers.next(f"call {number}") is None
        answers.keep(answer, (repair,) if number else ())
    again = FileReplayLog(tmp_path / "3", messages.append)
    assert again.repairs() == (repair,)
    assert torch.equal(again.next("call 0"), given[0])
    assert torch.equal(again.next("call 1")[0], given[1][0])
    output = again.next("call 2")
    assert isinstance(output, Transformer2DModelOutput)
    assert output.sample.stride() == laid_out.stride()
    paths = sorted((tmp_path / "3").iterdir())
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    again = FileReplayLog(tmp_path / "3", messages.append)
    assert again.next("call 0") is not None
    assert again.next("call 1") is None
    assert [path.name for path in (tmp_path / "3").iterdir()] == [paths[0].name]
    (damaged,) = messages
    assert "answer 2 of before can't be used" in damaged
    assert "it and the 1 after it are computed again" in damaged
    again.keep(object(), ())
    assert "a model answered with a object, which can't be saved" in messages[1]


def test_an_answer_of_a_class_that_has_moved_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of diffusers may have it in another module."""
    messages: list[str] = []
    answers = FileReplayLog(tmp_path / "3", messages.append)
    assert answers.next("call") is None
    moved = f"{Transformer2DModelOutput.__module__}_of_before"
    monkeypatch.setattr(Transformer2DModelOutput, "__module__", moved)
    answers.keep(Transformer2DModelOutput(sample=torch.zeros(2)), ())
    again = FileReplayLog(tmp_path / "3", messages.append)
    assert again.next("call") is None
    (missing,) = messages
    assert "_of_before" in missing


def test_an_answer_is_served_to_the_same_call_alone(tmp_path: Path) -> None:
    messages: list[str] = []
    answers = FileReplayLog(tmp_path / "3", messages.append)
    for number in range(3):
        assert answers.next(f"call {number}") is None
        answers.keep((torch.full((2,), float(number)),), ())
    again = FileReplayLog(tmp_path / "3", messages.append)
    assert again.next("call 0")[0].tolist() == [0, 0]
    assert messages == []
    assert again.next("another") is None
    assert "its call was given something else" in messages[0]
    again.keep((torch.full((2,), 7.0),), ())
    later = FileReplayLog(tmp_path / "3", messages.append)
    assert later.next("call 0")[0].tolist() == [0, 0]
    assert later.next("another")[0].tolist() == [7, 7]
    assert later.next("call 2") is None, "what came after another call is gone"


def test_answers_that_come_late_belong_to_their_calls(tmp_path: Path) -> None:
    """Ranks that share out calls by branches have the answers to several at once."""
    answers = FileReplayLog(tmp_path / "3", pytest.fail)
    assert answers.next("one") is None
    assert answers.next("two") is None
    answers.keep((torch.ones(1),), ())
    answers.keep((torch.zeros(1),), ())
    again = FileReplayLog(tmp_path / "3", pytest.fail)
    assert again.next("one")[0].item() == 1
    assert again.next("two")[0].item() == 0


def test_a_disk_that_is_full_is_reported_once_and_the_state_stays_good(
    model: str, whole: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is full from the second step on; the run goes on, and its state is that of the first."""
    real, done = os.fsync, 0

    def full(descriptor: int) -> None:
        if done >= 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(paths.os, "fsync", full)
    events: list[Event] = []
    stream = begun(tmp_path, model=model, **OPEN_SORA)
    for event in stream:
        events.append(event)
        done += isinstance(event, Step) and event.stage == "denoise"
        if isinstance(event, Step) and event.stage == "decode":
            break
    (folder,) = all_runs(tmp_path)
    copy = tmp_path / "copy" / "copied"
    shutil.copytree(folder.path, copy)
    events += list(stream)
    monkeypatch.undo()
    same(whole, events)
    messages = [e.text for e in events if isinstance(e, Note) and "No space left" in e.text]
    assert len(messages) == 1
    assert "the run continues" in messages[0]
    again = list(resume.resume_run(RunFolder(copy)))
    same(whole, again)
    assert steps(again) == [2, 3]


def test_where_nothing_can_be_kept_the_run_goes_on(
    model: str, whole: list[Event], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    events = list(begun(tmp_path / "file" / "runs", model=model, **OPEN_SORA))
    same(whole, events)
    (note,) = [e.text for e in events if isinstance(e, Note) and "can't be saved" in e.text]
    assert "EVERYFRAME_RUNS" in note


def test_a_place_that_is_full_leaves_a_good_state(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a worker's trail, too, though it is wrong input to the command line."""

    def full(*_: Any, **__: Any) -> Any:
        raise MediaError("can't write 'trail-0'")

    monkeypatch.setattr(stdit3.STDiT3, "forward", full)
    with pytest.raises(MediaError, match="can't write 'trail-0'; resume it"):
        list(begun(tmp_path, model=model, **OPEN_SORA))
    assert len(list(all_runs(tmp_path))) == 1


@pytest.mark.parametrize(
    ("is_in_memory", "how"),
    [(True, "everyframe.resume('20261127', pipe=pipe)"), (False, "everyframe resume 20261127")],
)
def test_an_error_says_how_its_run_is_resumed(
    tmp_path: Path, is_in_memory: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line can't resume a pipeline that is in the memory of a script."""
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path))
    folder = RunFolder(tmp_path / "20261127")
    folder.path.mkdir()
    folder.write_run({})
    writer = RunStateWriter(folder, SaveOptions(tmp_path))
    with (
        pytest.raises(CannotRunError) as caught,
        saved_run(writer, [], is_in_memory=is_in_memory),
    ):
        raise CannotRunError("out of memory")
    assert str(caught.value) == f"out of memory; resume it: {how}"


def test_a_run_in_a_folder_of_its_own_is_named_with_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`everyframe resume NAME` looks for it in the default folder alone."""
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))
    folder = RunFolder(tmp_path / "my runs" / "20261201")
    folder.path.mkdir(parents=True)
    assert not resume_hint(folder), "nothing is saved"
    folder.write_run({})
    command = resume_hint(folder).removeprefix("resume it: ")
    assert command == f"everyframe resume 20261201 --run-dir '{tmp_path}/my runs'"
    assert without_hint(f"it failed; {resume_hint(folder)}") == "it failed"
    in_python = resume_hint(folder, is_in_memory=True)
    assert in_python == f"resume it: everyframe.resume('{folder.path}', pipe=pipe)"


def test_what_was_cut_of_a_prompt_stays_in_the_record(model: str, tmp_path: Path) -> None:
    folder = cut(model, tmp_path, prompt="a red circle " * 20, truncate_prompt=True)
    done = list(resume.resume_run(folder))[-1]
    assert isinstance(done, VideoDone)
    (warning,) = done.record["notes"]
    assert "its end is cut: 'circle" in warning


def test_what_was_done_for_memory_is_done_again(model: str, tmp_path: Path) -> None:
    """From the second step on the branches of guidance are computed one after the other."""
    with no_room("STDiT3", above=1, after=1):
        unbroken = list(begun(tmp_path, model=model, **OPEN_SORA))
    with no_room("STDiT3", above=1, after=1):
        folder = cut(model, tmp_path)
    with no_room("STDiT3", above=9) as calls:
        again = list(resume.resume_run(folder))
    assert calls == [1, 1], "as before, though there is room again"
    np.testing.assert_array_equal(videos(again)[3], videos(unbroken)[3])


@pytest.mark.parametrize("what", ["tensors", "state.json"])
def test_a_state_that_is_damaged_costs_time_and_nothing_else(
    what: str, model: str, whole: list[Event], tmp_path: Path
) -> None:
    folder = cut(model, tmp_path)
    path = folder.path / what
    path = next(path.iterdir()) if path.is_dir() else path
    path.write_bytes(path.read_bytes()[:-9])
    again = list(resume.resume_run(folder))
    same(whole, again)
    assert any(isinstance(e, Note) and "starting" in e.text and path.name in e.text for e in again)
    assert steps(again) == [1, 2, 3]


def test_what_was_changed_since_is_refused(model: str, tmp_path: Path) -> None:
    picture, root = tmp_path / "first.png", tmp_path / "runs"
    Image.fromarray(PICTURE).save(picture)
    folder = cut(model, root, image=str(picture), edit_strength=0.5)
    Image.fromarray(PICTURE[::-1]).save(picture)
    with pytest.raises(InputError, match=r"image is not what .* was begun with"):
        list(resume.resume_run(folder))
    Image.fromarray(PICTURE).save(picture)
    written = folder.run()
    name = json.dumps(machine_facts("cpu").cpu.name)
    folder.write_run(json.loads(json.dumps(written).replace(name, '"Another CPU"')))
    with pytest.raises(CannotRunError, match="Another CPU"):
        list(resume.resume_run(folder))
    lock = folder.lock()
    with pytest.raises(RunLockedError, match="another process"):
        list(resume.resume_run(folder))
    with pytest.raises(InputError, match="nothing to resume"):
        find_run(None, root)
    lock.release()
    assert find_run(None, root) == find_run(folder.name, root) == folder
    with pytest.raises(InputError, match="there is no run"):
        find_run("another", root)


def test_a_text_of_any_length_is_no_file_that_lies_elsewhere(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative prompts are longer than the name of any file, empty, or named like one."""
    monkeypatch.chdir(tmp_path)
    run = resume.load_run(cut(model, tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (run.place / "fox.png").touch()
    for text in ("ugly, blurred, " * 40, "", "fox.png"):
        words = run.request.model_copy(update={"negative_prompt": text})
        resume._check_place(replace(run, request=words))
    other = run.request.model_copy(update={"image": "fox.png"})
    with pytest.raises(InputError, match=r"where its image 'fox.png' lies; go there first"):
        resume._check_place(replace(run, request=other))


def test_runs_of_one_second_are_in_the_order_in_which_they_were_begun(tmp_path: Path) -> None:
    """Their names are not: the tenth comes before the second, and a name that is free is given."""
    made = [new_run(tmp_path) for _ in range(11)]
    for place, run in enumerate(made):
        run.write_run({"began": 100.0 + place})
    made[0].remove()
    late = RunFolder(made[0].path)
    late.path.mkdir()
    late.write_run({"began": 200.0})
    assert list(all_runs(tmp_path)) == [*made[1:], late]
    assert find_run(None, tmp_path) == late
    listed = [each.began for each in list_runs(tmp_path)]
    assert listed == sorted(listed)


def test_python_goes_on_with_a_run(
    model: str, whole: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path))
    cut(model, tmp_path)
    (listed,) = everyframe.list_runs()
    assert (listed.prompt, listed.is_busy) == ("a red circle", False)
    assert listed.progress == "stage 2, 2 steps of it"
    video = everyframe.resume(listed.run, output="float")
    assert isinstance(video, everyframe.Video)
    np.testing.assert_array_equal(video.frames, videos(whole)[3])
    assert everyframe.list_runs() == []
    with pytest.raises(InputError, match="nothing to resume"):
        everyframe.resume()


@pytest.mark.parametrize("place", [{"stage": 9}, {"stage": -1}, {"clip": 1}, {"clip": True}])
def test_a_state_of_a_stage_that_a_run_lacks_is_not_taken_for_its_end(
    place: dict[str, Any], model: str, tmp_path: Path
) -> None:
    """As of a version with other stages: the run made no frames then, and was removed."""
    run = cut(model, tmp_path)
    state = run.state()
    assert state is not None
    run.write_state({**state, **place})
    again = list(resume.resume_run(run))
    assert any("starting" in e.text and "which it lacks" in e.text
               for e in again if isinstance(e, Note))  # fmt: skip
    assert sum(isinstance(e, VideoDone) for e in again) == 1
